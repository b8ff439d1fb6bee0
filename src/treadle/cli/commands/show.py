"""`treadle show`."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.api import load_save
from treadle.cli.common_options import Json, spread_options
from treadle.cli.output import print_json
from treadle.cli.step_flags import StepFlags, make_program
from treadle.cli.target import Target
from treadle.cli.terminal import plain, suggest, wrote
from treadle.cli.writable import check_file, form_of
from treadle.files import FORMATS
from treadle.ir import Schedule, text

if TYPE_CHECKING:
    from treadle.ir.trace import Trace


class FormatName(StrEnum):
    """The forms a schedule is written in."""

    TEXT = "text"
    TORCH_CSV = "torch-csv"
    TORCH_COMMS = "torch-comms"
    JSON = "json"


assert {f.value for f in FormatName} == set(FORMATS)


class WhenPosted(StrEnum):
    """Where a rank posts its receives."""

    EARLY = "early"
    LATE = "late"


@spread_options
def show(
    target: Target,
    flags: StepFlags,
    rows: Annotated[bool, typer.Option("--rows", help="Only the rows, without the # lines.")] = False,
    format: Annotated[
        FormatName | None, typer.Option(help="The form to write; else by the ending of -o, or text.")
    ] = None,
    receives: Annotated[
        WhenPosted | None,
        typer.Option(
            help="With torch-comms: post receives where messages are sent, or as late as a communicator a pair allows."
        ),
    ] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="With torch-comms: for stages under FSDP2.")] = False,
    as_json: Json = False,
    lower: Annotated[bool, typer.Option("--lower", help="What a rank's lanes do, cell by cell.")] = False,
    rank: Annotated[int, typer.Option("--rank", help="The rank that --lower shows.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write it to a file; with --lower, or of an update: the program, which is .npz."
        ),
    ] = None,
) -> None:
    """Prints a schedule, a row a rank, in a form that every command reads; or what it is lowered to.

    Of a weight update: a row a buffer, with when its ops start and end.
    """
    form = FormatName.JSON if as_json else format or FormatName(form_of(output) if output is not None else "text")
    if form is not FormatName.TORCH_COMMS and (receives is not None or fsdp):
        raise ValueError(f"--receives and --fsdp are for --format torch-comms, got {form.value}")
    loaded = target.load()
    if not isinstance(loaded, Schedule) and flags.step(loaded).is_update:
        _show_update(flags.step(loaded).trace, form, rows, output)
        suggest(f"treadle draw {target} -o figure.svg")
        return
    if rows and form is not FormatName.TEXT:
        raise ValueError(f"--rows is for the text form, got --format {form.value}")
    if lower and form is not FormatName.TEXT:
        raise ValueError(f"--lower prints text, got --format {form.value}; -o program.npz writes the program")
    schedule = target.checked_schedule(loaded)
    if not lower:
        shown = load_save.dumps(
            schedule, form.value, receives=receives.value if receives is not None else None, fsdp=fsdp
        )
        _put(text.dump(schedule, header=False) if rows else shown, output)
        suggest(f"treadle verify {target if output is None else shlex.quote(str(output))}")
        return
    from treadle.files import npz
    from treadle.view.lane_rows import lanes_text

    step = flags.step(schedule, target.plan)
    make_program(step)
    program = step.program
    if output is not None:
        npz.save_program(program, output)
        wrote(output)
        suggest(f"treadle verify {shlex.quote(str(output))}")
        return
    cells = [str(cell) for cell in schedule.rows[min(rank // program.layout.num_replicas, schedule.pp - 1)]]
    plain(lanes_text(program, rank, cells))
    suggest(f"treadle simulate {target} {flags}".rstrip())


def _put(shown: str, output: Path | None) -> None:
    if output is None:
        plain(shown)
        return
    if output.suffix == ".npz":
        raise ValueError(f"a program is written as .npz, a schedule as .txt, .csv or .json, got {output}; add --lower")
    check_file(output)
    output.write_text(shown, encoding="utf-8")
    wrote(output)


def _show_update(trace: Trace, form: FormatName, rows: bool, output: Path | None) -> None:
    from treadle.files import npz
    from treadle.view.update_rows import update_object, update_text

    if form in (FormatName.TORCH_CSV, FormatName.TORCH_COMMS):
        raise ValueError("torch's CSV is for schedules; a weight update is shown as text or json")
    if output is not None:
        npz.save_program(trace.program, output)
        wrote(output)
        return
    ranks = range(trace.program.num_ranks)
    if form is FormatName.JSON:
        print_json("update-rows", update_object(trace, ranks))
        return
    text = update_text(trace, ranks)
    plain(text if not rows else "".join(line for line in text.splitlines(True) if not line.startswith("#")))
