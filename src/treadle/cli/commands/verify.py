"""`treadle verify`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from treadle.cli.common_options import Json, parse_bytes, spread_options
from treadle.cli.findings import print_report
from treadle.cli.output import print_json
from treadle.cli.step_flags import StepFlags
from treadle.cli.target import Target
from treadle.cli.terminal import suggest, working
from treadle.ir import Schedule


class Receives(StrEnum):
    """The order in which a rank posts the receives of a channel."""

    SENDER = "sender"
    USE = "use"


class Shared(StrEnum):
    """Which channels share a communicator."""

    PAIR = "pair"
    GROUP = "group"
    DIRECTION = "direction"
    CHANNEL = "channel"


@spread_options
def verify(
    target: Target,
    flags: StepFlags,
    receives: Annotated[Receives, typer.Option(help="Order of receives where the file gives none.")] = Receives.SENDER,
    ring: Annotated[int | None, typer.Option(help="Receive buffers on each channel; any number if left out.")] = None,
    max_activations: Annotated[int | None, typer.Option(help="Most activations alive at once on a rank.")] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Most bytes of activations on a rank, with --layers or --model-layers: 60GB.")
    ] = None,
    communicators: Annotated[
        Shared | None,
        typer.Option(help="Communicators that channels share: pair for files with messages, else each by itself."),
    ] = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Communicators are made at their first message.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every finding.")] = False,
    as_json: Json = False,
) -> None:
    """Checks that a schedule or program finishes, with the right data, within limits. Exits with 0 if so, 1 if not."""
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    step = flags.step(target.load(), target.plan)
    with working("verifying"):
        report, program = step.verify(
            receives=receives.value,
            ring=ring,
            max_activations=max_activations,
            memory_limit=limit,
            communicators=communicators.value if communicators is not None else None,
            lazy=lazy,
        )
    if as_json:
        print_json("verify", report.as_dict())
    else:
        schedule = step.target if isinstance(step.target, Schedule) else None
        print_report(report, schedule, program, everything=everything)
        simulate = f"treadle simulate {target} {flags}".rstrip()
        suggest(f"treadle explain {report.findings[0].code}" if report.findings else simulate)
    raise typer.Exit(0 if report.clean else 1)
