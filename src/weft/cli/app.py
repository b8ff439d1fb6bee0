"""The commands. Each one reads its target, calls the library, prints; each ends with what to try next."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

import weft
from weft.cli.findings import print_report
from weft.cli.target import Json, Microbatches, Name, PlacementName, Pp, Target, Vpp
from weft.cli.terminal import out, plain, suggest, working
from weft.export import FORMATS
from weft.ir import text
from weft.schedules import known
from weft.verify import CODES

app = typer.Typer(
    name="weft",
    help="Distributed training schedules as data: list them, show them, verify them.",
    epilog="Start with: weft schedules",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    """The forms a schedule is written in."""

    TEXT = "text"
    TORCH_CSV = "torch-csv"
    JSON = "json"


assert {f.value for f in Format} == set(FORMATS)


class Receives(StrEnum):
    """In which order a rank posts the receives of a channel."""

    SENDER = "sender"
    USE = "use"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        plain(f"weft {weft.__version__}\n")
        raise typer.Exit


@app.command(epilog="Example: weft schedules --json")
def schedules(as_json: Json = False) -> None:
    """Lists the schedules: what each is, the sizes it takes, its bubble and its memory."""
    if as_json:
        fields = ("name", "summary", "demands", "bubble", "memory", "source")
        rows = [{field: getattr(family, field) for field in fields} for family in known().values()]
        plain(json.dumps(rows, indent=1) + "\n")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for family in known().values():
        lines = {
            "": f"[bold]{escape(family.summary)}[/]",
            "sizes": escape(family.demands),
            "bubble": escape(family.bubble),
            "memory": escape(family.memory),
            "source": f"[dim]{escape(family.source)}[/]",
        }
        for line, (label, content) in enumerate(lines.items()):
            table.add_row(family.name if line == 0 else "", label, content)
    out.print(table)
    out.print(
        "P ranks, V chunks on each, M micro-batches, rank r. bubble: idle time of a rank; F, B = I + W, FB are the "
        "times of a forward, of a backward and its halves, of an overlapped pair, over all chunks of a rank. "
        "memory: activations held at most.",
        style="dim",
    )
    suggest("weft show interleaved-overlap --pp 4 -m 8")


@app.command(
    epilog="Examples: weft show dualpipe --pp 8 -m 20    |    weft show zb-v --pp 4 -m 8 --format torch-csv > zbv.csv"
)
def show(
    name: Name,
    pp: Pp = None,
    vpp: Vpp = None,
    microbatches: Microbatches = None,
    placement: PlacementName = None,
    rows: Annotated[bool, typer.Option("--rows", help="Only the rows, without the # lines.")] = False,
    format: Annotated[Format, typer.Option(help="The form to write.")] = Format.TEXT,
    as_json: Json = False,
) -> None:
    """Prints a schedule, a row a rank; the output is a file that every command reads."""
    form = Format.JSON if as_json else format
    if rows and form is not Format.TEXT:
        raise ValueError(f"--rows is for the text form, got --format {form.value}")
    target = Target(name, pp, vpp, microbatches, placement)
    schedule = target.schedule()
    plain(text.dump(schedule, header=False) if rows else weft.dumps(schedule, form.value))
    suggest(f"weft verify {target}")


@app.command(
    epilog="Examples: weft verify dualpipe --pp 8 -m 20    |    weft verify mine.txt --ring 2    |    "
    "weft show zb-v --pp 4 -m 8 | weft verify - --receives use"
)
def verify(
    name: Name,
    pp: Pp = None,
    vpp: Vpp = None,
    microbatches: Microbatches = None,
    placement: PlacementName = None,
    eager: Annotated[bool, typer.Option("--eager", help="Sends do not wait for their receives.")] = False,
    receives: Annotated[Receives, typer.Option(help="Order of receives where the file gives none.")] = Receives.SENDER,
    ring: Annotated[int | None, typer.Option(help="Receive buffers on each channel; any number if left out.")] = None,
    max_activations: Annotated[int | None, typer.Option(help="Most activations alive at once on a rank.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every finding.")] = False,
    as_json: Json = False,
) -> None:
    """Checks that a schedule finishes, with the right data, within a limit. Exit code 0 if clean, 1 if not."""
    target = Target(name, pp, vpp, microbatches, placement)
    schedule = target.schedule()
    with working("verifying"):
        report = weft.verify(schedule, eager=eager, receives=receives.value, ring=ring, max_activations=max_activations)
    if as_json:
        plain(json.dumps(report.as_dict(), indent=1) + "\n")
    else:
        print_report(report, schedule, everything=everything)
        suggest(f"weft explain {report.findings[0].code}" if report.findings else f"weft show {target} --rows")
    raise typer.Exit(0 if report.clean else 1)


@app.command(epilog="Example: weft explain W201")
def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="A finding's code; all of them if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Says what a finding means, why it matters, and the way out."""
    codes = CODES if code is None else {code.upper(): weft.explain(code)}
    if as_json:
        plain(json.dumps({name: found._asdict() for name, found in codes.items()}, indent=1) + "\n")
        return
    for name, found in codes.items():
        out.print(f"[bold]{name}[/] {escape(found.title)}")
        if code is not None:
            out.print(f"\n{escape(found.meaning)}\n\nFor example:")
            plain("".join(f"    {line}\n" for line in found.example.splitlines()))
            out.print(f"\nThe way out: {escape(found.wayout)}")
    suggest("weft explain W201" if code is None else "weft verify --help")
