"""`treadle hang`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from treadle.cli.common_options import Json
from treadle.cli.output import print_json
from treadle.cli.target import PLACEMENT, Microbatches, Pp, Target, Vpp
from treadle.cli.terminal import note, out, suggest, working
from treadle.recorder.find_hang import find_hang
from treadle.recorder.hang_report import HungPipeline
from treadle.verifier import Communicators


class SharedIn(StrEnum):
    """Which channels of the run share a communicator."""

    PAIR = "pair"
    GROUP = "group"
    DIRECTION = "direction"
    CHANNEL = "channel"


def hang(
    dumps: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|FILE...", help="Dumps of torch's Flight Recorder: one file a rank, <prefix><rank>."
        ),
    ],
    schedule_name: Annotated[
        str, typer.Option("--schedule", metavar="NAME|FILE", help="The schedule that the run was given.")
    ],
    pp: Pp = None,
    vpp: Vpp = None,
    microbatches: Microbatches = None,
    placement: Annotated[str | None, PLACEMENT] = None,
    communicators: Annotated[
        SharedIn | None,
        typer.Option(help="Communicators that channels share: pair, or group where the dumps show batches."),
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="What stands before the rank in the names of files.")] = None,
    as_json: Json = False,
) -> None:
    """Finds why a run hangs, in its Flight Recorder dumps: which rank stopped at which op, who waits for whom."""
    target = Target(schedule_name, pp, vpp, microbatches, placement)
    schedule = target.schedule()
    with working("reading"):
        shared: Communicators | None = communicators.value if communicators is not None else None
        report = find_hang(dumps, schedule, communicators=shared, prefix=prefix)
    if as_json:
        print_json("hang", report.as_dict())
        return
    for remark in report.remarks:
        note(remark)
    for pipeline in report.pipelines:
        _print(pipeline, alone=len(report.pipelines) == 1)
    if any(pipeline.cause == "circle" for pipeline in report.pipelines):
        suggest(f"treadle verify {target} --communicators {report.communicators}")
    elif any(pipeline.cause == "order" for pipeline in report.pipelines):
        suggest(f"treadle show {target}")


def _print(pipeline: HungPipeline, *, alone: bool) -> None:
    in_order = pipeline.ranks == tuple(range(len(pipeline.ranks)))
    if not alone or not in_order:
        named = ", ".join(map(str, pipeline.ranks))
        out.print(escape(f"group {pipeline.group}, whose ranks 0 to {len(pipeline.ranks) - 1} are {named}:"))
    step = f" (step {pipeline.step} of its dumps)" if pipeline.step is not None and pipeline.cause != "outside" else ""
    out.print(f"[bold]{escape(pipeline.sentence[:1].upper() + pipeline.sentence[1:])}[/]{step}.", soft_wrap=True)
    for words in pipeline.circle:
        out.print(escape(f"    {words}"), soft_wrap=True)
    for rank, chain in pipeline.waits.items():
        if chain and not pipeline.circle:
            out.print(escape(f"  rank {rank} waits:"), soft_wrap=True)
            for words in chain:
                out.print(escape(f"    {words}"), soft_wrap=True)
