"""`treadle verify`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from treadle.cli.findings import print_report
from treadle.cli.model import Model
from treadle.cli.options import Json, parse_bytes, spread_options
from treadle.cli.output import print_json
from treadle.cli.target import Target
from treadle.cli.terminal import suggest, working
from treadle.cli.update_target import Update
from treadle.costs import durations
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.verify import VerifyReport, verify_program, verify_schedule
from treadle.weights.verify import verify_update


class Receives(StrEnum):
    """The order in which a rank posts the receives of a channel."""

    SENDER = "sender"
    USE = "use"


@spread_options
def verify(
    target: Target,
    model: Model,
    update: Update,
    eager: Annotated[bool, typer.Option("--eager", help="Sends do not wait for their receives.")] = False,
    receives: Annotated[Receives, typer.Option(help="Order of receives where the file gives none.")] = Receives.SENDER,
    ring: Annotated[int | None, typer.Option(help="Receive buffers on each channel; any number if left out.")] = None,
    max_activations: Annotated[int | None, typer.Option(help="Most activations alive at once on a rank.")] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Most bytes of activations on a rank, with --layers or --model-layers: 60GB.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every finding.")] = False,
    as_json: Json = False,
) -> None:
    """Checks that a schedule or program finishes, with the right data, within limits. Exits with 0 if so, 1 if not."""
    limit = parse_bytes(memory_limit) if memory_limit is not None else None
    loaded = update.load(target)
    schedule, program = (loaded, None) if isinstance(loaded, Schedule) else (None, loaded)
    if isinstance(program, Trace):
        program = program.program
    report: VerifyReport | None = None
    if schedule is not None:
        with working("verifying"):
            report = verify_schedule(
                schedule, eager=eager, receives=receives.value, ring=ring, max_activations=max_activations
            )
        if model.knows_layers and report.clean:
            if limit is not None:
                _check_bytes(model)
            program = model.lower(schedule)
    if program is not None and program.layout.is_update:
        with working("verifying the update"):
            report = _verify_update(program, ring, limit)
    elif limit is not None and program is None:
        raise ValueError(
            "--memory-limit is about bytes, which need --layers or --model-layers; --max-activations counts activations"
        )
    elif program is not None:
        with working("verifying the program"):
            report = verify_program(program, durations(program, model.costs), ring=ring, memory_limit=limit)
    assert report is not None
    if as_json:
        print_json("verify", report.as_dict())
    else:
        print_report(report, schedule, program, everything=everything)
        simulate = f"treadle simulate {target} {model} {update}".replace("  ", " ").rstrip()
        suggest(f"treadle explain {report.findings[0].code}" if report.findings else simulate)
    raise typer.Exit(0 if report.clean else 1)


def _check_bytes(model: Model) -> None:
    costs = model.costs
    silent = costs.unsaved(costs.blocks)
    if silent:
        raise ValueError(
            f"costs {costs.name!r} do not say what layers save, so nothing can be said about --memory-limit; add "
            f"[saved_bytes] {', '.join(silent)} to a costs file (0 where nothing is saved)"
        )


def _verify_update(program: Program, ring: int | None, limit: int | None) -> VerifyReport:
    """The limit is on what a device's buffers take; channels with rings are a pipeline's."""
    if ring is not None:
        raise ValueError("--ring is for the channels of a pipeline, which an update has none of; leave it out")
    return verify_update(program, memory_limit=limit)
