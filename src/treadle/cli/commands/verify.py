"""`treadle verify`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.common_options import Json, parse_bytes, spread_options
from treadle.cli.findings import print_report
from treadle.cli.output import print_json
from treadle.cli.step_flags import StepFlags
from treadle.cli.target import Target
from treadle.cli.terminal import suggest, working, wrote
from treadle.drawing import draw_circle
from treadle.ir import Schedule
from treadle.verifier import Communicators


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
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the circle of T207 (.svg, .png, .pdf).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every finding.")] = False,
    as_json: Json = False,
) -> None:
    """Checks that a schedule or program finishes, with the right data, within limits. Exits with 0 if so, 1 if not."""
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    step = flags.step(target.load(), target.plan)
    shared: Communicators | None = communicators.value if communicators is not None else None
    with working("verifying"):
        report, program = step.verify(
            receives=receives.value,
            ring=ring,
            max_activations=max_activations,
            memory_limit=limit,
            communicators=shared,
            lazy=lazy,
        )
    if as_json:
        print_json("verify", report.as_dict())
    else:
        schedule = step.target if isinstance(step.target, Schedule) else None
        print_report(report, schedule, program, everything=everything)
        simulate = f"treadle simulate {target} {flags}".rstrip()
        if output is not None:
            hang = step.shared_hang(receives=receives.value, communicators=shared, lazy=lazy)
            if hang is None:
                raise ValueError(
                    f"{target} has no circle on shared communicators; 'treadle draw {target} -o {output}' draws the "
                    "step, up to where it hangs if it does"
                )
            wrote(output, str(draw_circle(hang, output)))
        suggest(f"treadle explain {report.findings[0].code}" if report.findings else simulate)
    raise typer.Exit(0 if report.clean else 1)
