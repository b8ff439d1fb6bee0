"""`treadle draw`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from treadle.cli.common_options import parse_ranks, spread_options
from treadle.cli.compared import beside_plan, make_steps
from treadle.cli.step_flags import StepFlags, note_missing
from treadle.cli.target import PLACEMENT, Microbatches, Pp, Target, Vpp, label
from treadle.cli.terminal import again, err, out, suggest, working, wrote
from treadle.drawing import PAGE, Shown, require_matplotlib
from treadle.step import Step
from treadle.view.described import described
from treadle.view.palette import PALETTES, palette
from treadle.view.style import SUFFIXES, WIDTHS, FigureStyle, checked_path

if TYPE_CHECKING:
    from treadle.verifier import Finding


class Grain(StrEnum):
    """The content of a row."""

    CELLS = "cells"
    LANES = "lanes"


class CellName(StrEnum):
    """The cell whose lanes are drawn."""

    WARMUP = "warmup"
    STEADY = "steady"
    COOLDOWN = "cooldown"


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="A figure (-o x.svg, .png, .pdf)")


@dataclass(frozen=True)
class FigureOptions:
    """The options of figures as given."""

    width: Annotated[
        str | None,
        _option("--width", help=f"{', '.join(f'{n} ({i} in)' for n, i in WIDTHS.items())}, or inches: 6.5."),
    ] = None
    fold: Annotated[
        int | None, _option("--fold", help="Strips of time below each other; else as many as the labels need.")
    ] = None
    font_size: Annotated[
        float | None, _option("--font-size", help="Points of the names: 8; 7 in a column, 14 on a slide.")
    ] = None
    title: Annotated[str | None, _option("--title", help="Title, also of a page; else what is drawn and its size.")] = (
        None
    )
    no_title: Annotated[bool, _option("--no-title", help="No title.")] = False
    window: Annotated[
        str | None, _option("--window", help="Only from one time to another, in units or microseconds: 20:45.")
    ] = None
    ranks: Annotated[str | None, _option("--ranks", help="Only these ranks: 0-3.")] = None
    memory: Annotated[bool, _option("--memory", help="The memory curve below, with its peak.")] = False
    cell: Annotated[CellName | None, _option("--cell", help="One cell's lanes, with --layers.")] = None

    def check_for(self, output: Path | None) -> None:
        """Raise a ValueError for an option that the kind of output has no use for."""
        given = {
            "--width": self.width,
            "--fold": self.fold,
            "--font-size": self.font_size,
            "--title": self.title,
            "--no-title": self.no_title or None,
            "--window": self.window,
            "--ranks": self.ranks,
            "--memory": self.memory or None,
            "--cell": self.cell,
        }
        shown = ("--title", "--memory") if output is not None else ()
        if output is None or output.suffix == PAGE:
            where = "the terminal" if output is None else "a page"
            for option, value in given.items():
                if value is not None and option not in shown:
                    raise ValueError(f"{option} is for a figure, not for {where}; add -o figure.svg, or leave it out")
        if self.title is not None and self.no_title:
            raise ValueError("--title and --no-title exclude each other; leave one out")

    def style(self, title: str, palette_name: str) -> FigureStyle:
        """Return the style as figures take it; `title` is the one that is not given."""
        chosen = "" if self.no_title else self.title if self.title is not None else title
        return FigureStyle(self.width, self.fold, self.font_size, chosen, palette_name)


@spread_options
def draw(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE...",
            help="Schedules by name, or files: schedules (text, torch-csv, json), programs (npz), traces (json, npz);"
            " what plan --files wrote; - is a schedule on stdin. Several are drawn on one time axis.",
        ),
    ],
    flags: StepFlags,
    figure: FigureOptions,
    pp: Pp = None,
    vpp: Vpp = None,
    microbatches: Microbatches = None,
    placement: Annotated[str | None, PLACEMENT] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A figure (.svg, .png, .pdf) or a page to explore (.html).")
    ] = None,
    grain: Annotated[
        Grain | None, typer.Option(help="A row a device, or its computation, communication and offload rows.")
    ] = None,
    palette_name: Annotated[str, typer.Option("--palette", help=f"{', '.join(PALETTES)}.")] = "kimi",
    against: Annotated[
        Path | None, typer.Option("--against", help="A second trace below the first, on one time axis.")
    ] = None,
) -> None:
    """Draws schedules, programs or traces: on the terminal, as a figure for a paper, or as a page to explore.

    Several schedules get the same model: one of --model-layers, or the smallest that all of them cut evenly.
    """
    _check(output, figure, palette_name)
    sized = [Target(name, pp, vpp, microbatches, placement) for name in names]
    sized = sized if len(sized) == 1 else [each if each.is_name() else Target(each.name) for each in sized]
    targets = beside_plan(sized)
    things = [target.load() for target in targets]
    loaded = list(zip(label(targets, things), things, strict=True))
    noted: set[str] = set()
    drawn = [_shown(step, noted) for step in make_steps(targets, loaded, flags)]
    if against is not None:
        drawn.append(_shown(Step(Target(str(against)).load(), name=str(against)), noted))
    if output is None:
        _terminal(drawn, grain, palette_name)
        suggest(again("-o figure.svg"))
    else:
        _write(drawn, output, figure, grain, palette_name)
    hanging = [each.finding for each in drawn if each.finding is not None]
    for finding in hanging:
        _tell(finding)
    if hanging:
        raise typer.Exit(1)


def _check(output: Path | None, figure: FigureOptions, palette_name: str) -> None:
    """Refuse what cannot be drawn before anything is computed."""
    if output is not None:
        checked_path(output, (*SUFFIXES, PAGE))
        if output.suffix != PAGE:
            require_matplotlib()
    figure.check_for(output)
    figure.style("", palette_name)
    _parse_window(figure.window)
    parse_ranks(figure.ranks)
    palette(palette_name)


def _shown(step: Step, noted: set[str]) -> Shown:
    with working("simulating"):
        shown = Shown.of(step)
    if shown.finding is None:
        note_missing(step, noted)
    return shown


def _tell(finding: Finding) -> None:
    err.print(f"[bold red]{finding.code}[/] rank {finding.rank}: {escape(finding.message)}", soft_wrap=True)
    for step in finding.steps:
        err.print(f"    {escape(step)}", soft_wrap=True)


def _terminal(drawn: list[Shown], grain: Grain | None, palette_name: str) -> None:
    from treadle.view.character_rows import terminal_rows

    for each in drawn:
        if len(drawn) > 1:
            out.print(each.title, style="bold", soft_wrap=True)
        coloured, lanes = out.color_system is not None, grain is Grain.LANES
        rows = terminal_rows(
            each.trace, out.width, colour=coloured, palette_name=palette_name, lanes=lanes, hang=each.hang
        )
        for row in rows:
            out.print(row, soft_wrap=True)


def _write(drawn: list[Shown], output: Path, figure: FigureOptions, grain: Grain | None, palette_name: str) -> None:
    with working(f"drawing {output}"):
        size = (
            _page(drawn, output, figure, palette_name)
            if output.suffix == PAGE
            else _figure(drawn, output, figure, grain, palette_name)
        )
    wrote(output, size)


def _page(drawn: list[Shown], output: Path, figure: FigureOptions, palette_name: str) -> str:
    from treadle.view.page import page

    if any(each.hang is not None for each in drawn):
        raise ValueError("a page shows a step that finishes; -o figure.svg draws it up to where it hangs")
    text = page([(_called(each, drawn), each.trace) for each in drawn], palette_name, title=figure.title)
    output.write_text(text, "utf-8")
    return f"{len(text.encode()) / 1000:,.0f} kB"


def _called(each: Shown, drawn: list[Shown]) -> str:
    """A trace's name on a page or in a figure of several: which, and if some are measured, what it is."""
    kinds = {other.trace.measured for other in drawn}
    return f"{each.name} ({'measured' if each.trace.measured else 'predicted'})" if len(kinds) > 1 else each.name


def _figure(drawn: list[Shown], output: Path, figure: FigureOptions, grain: Grain | None, palette_name: str) -> str:
    from treadle.view import figure as figures

    many = len(drawn) > 1
    style = figure.style("" if many else drawn[0].title, palette_name)
    traces = [each.trace for each in drawn]
    if figure.cell is not None:
        if many:
            raise ValueError(f"--cell draws one cell of one step, got {len(drawn)}; draw one a figure")
        named = style if figure.title is not None or figure.no_title else replace(style, title=None)
        return str(figures.draw_cell(traces[0], figure.cell.value, output, named))
    window, ranks = _parse_window(figure.window), parse_ranks(figure.ranks)
    content = figures.FigureContent(grain.value if grain is not None else None, figure.memory, ranks, window)
    names = [_named(each, drawn) for each in drawn] if many else [drawn[0].title]
    return str(figures.draw(traces, output, content, style, names=names, hangs=[each.hang for each in drawn]))


def _named(each: Shown, drawn: list[Shown]) -> str:
    """The name of a panel: with its size, where the sizes differ."""
    sizes = {described(other.trace) for other in drawn}
    called = _called(each, drawn)
    return f"{called}: {described(each.trace)}" if len(sizes) > 1 else called


def _parse_window(given: str | None) -> tuple[float, float] | None:
    if given is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)[:-](\d+(?:\.\d+)?)", given)
    if found is None or float(found[1]) >= float(found[2]):
        raise ValueError(f"--window is from a time to a later one, as 20:45, got {given!r}")
    return float(found[1]), float(found[2])
