"""`treadle draw`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from treadle.cli.model import Model
from treadle.cli.options import parse_ranks, spread_options
from treadle.cli.target import Target
from treadle.cli.terminal import out, suggest, working
from treadle.cli.update_target import Update
from treadle.ir.trace import Trace
from treadle.view.terminal import terminal_rows


class Grain(StrEnum):
    """The content of a row."""

    CELLS = "cells"
    LANES = "lanes"


class CellName(StrEnum):
    """The cell whose lanes are drawn."""

    WARMUP = "warmup"
    STEADY = "steady"
    COOLDOWN = "cooldown"


@spread_options
def draw(
    target: Target,
    model: Model,
    update: Update,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A figure (.svg, .png, .pdf) or a page to explore (.html).")
    ] = None,
    grain: Annotated[
        Grain | None, typer.Option(help="A row a device, or its computation, communication and offload rows.")
    ] = None,
    cell: Annotated[CellName | None, typer.Option(help="Draw one cell's lanes, with --layers.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="The memory curve below, with its peak.")] = False,
    palette: Annotated[str, typer.Option(help="kimi, dualpipe or colourblind.")] = "kimi",
    ranks: Annotated[str | None, typer.Option(help="Only these ranks in a figure: 0-3.")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="A second trace below the first, on one time axis.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="With --against: the part of the time in a figure, in its unit: 2000-3500.")
    ] = None,
) -> None:
    """Draws a schedule, program or trace: on the terminal, as a figure for a paper, or as a page to explore."""
    if window is not None and (against is None or output is None or output.suffix == ".html"):
        raise ValueError("--window is for a figure of two traces; add --against FILE and -o figure.png")
    trace = _trace(target, model, update)
    options = f"{model} {update}".strip()
    if output is None:
        lanes = grain is Grain.LANES
        for row in terminal_rows(
            trace, out.width, colour=out.color_system is not None, palette_name=palette, lanes=lanes
        ):
            out.print(row, soft_wrap=True)
        suggest(f"treadle draw {target} {options} -o figure.svg".replace("  ", " "))
        return
    with working(f"drawing {output}"):
        if output.suffix == ".html":
            _page(trace, output, against, palette)
        elif against is not None:
            _above(target.name, [trace, _second(against)], output, palette, parse_ranks(ranks), _parse_window(window))
        else:
            _figure(target.name, trace, output, grain, cell, memory, palette, parse_ranks(ranks))
    suggest(f"treadle draw {target} {options} -o page.html".replace("  ", " "))


def _trace(target: Target, model: Model, update: Update) -> Trace:
    loaded = update.load(target)
    trace = model.trace(loaded)
    assumed = model.costs.about if trace is not loaded else ""
    return replace(trace, about=f"{trace.about}: {assumed}") if assumed else trace


def _second(path: Path) -> Trace:
    return _trace(Target(str(path)), Model(), Update())


def _called(trace: Trace) -> str:
    return "measured" if trace.measured else "predicted"


def _page(trace: Trace, output: Path, against: Path | None, palette: str) -> None:
    from treadle.view.page import page

    second = [(str(against), _second(against))] if against is not None else []
    output.write_text(page([(_called(trace), trace), *second], palette), "utf-8")


def _above(
    name: str, traces: list[Trace], output: Path, palette: str, ranks: range | None, window: tuple[float, float] | None
) -> None:
    with _matplotlib():
        from treadle.view.against import against_figure
        from treadle.view.frame import described
    title = f"{name}: {described(traces[0])}"
    titles = [_called(trace) for trace in traces]
    against_figure(traces, output, titles=titles, ranks=ranks, window=window, palette_name=palette, title=title)


def _figure(
    name: str,
    trace: Trace,
    output: Path,
    grain: Grain | None,
    cell: CellName | None,
    memory: bool,
    palette: str,
    ranks: range | None,
) -> None:
    with _matplotlib():
        from treadle.view import figure
        from treadle.view.frame import described
    if cell is not None:
        figure.draw_cell(trace, cell.value, output, palette_name=palette)
        return
    rows: Literal["cells", "lanes"] | None = grain.value if grain is not None else None
    title = f"{name}: {described(trace)}"
    figure.draw(trace, output, grain=rows, memory=memory, palette_name=palette, ranks=ranks, title=title)


@contextmanager
def _matplotlib() -> Iterator[None]:
    """Says how to come by what figures need."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"figures need matplotlib ({error}); pip install 'treadle[view]', or -o page.html") from None


def _parse_window(given: str | None) -> tuple[float, float] | None:
    if given is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", given)
    if found is None:
        raise ValueError(f"--window is from a time to a later one, as 2000-3500, got {given!r}")
    return float(found[1]), float(found[2])
