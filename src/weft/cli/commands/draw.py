"""`weft draw`."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.cli.model import Model
from weft.cli.options import parse_ranks, spread_options
from weft.cli.target import Target
from weft.cli.terminal import out, suggest, working
from weft.ir.trace import Trace
from weft.view.terminal import terminal_rows


class Grain(StrEnum):
    """What a row is."""

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
        Path | None, typer.Option("--against", help="A second trace below the first, on one time axis (.html).")
    ] = None,
) -> None:
    """Draws a schedule, program or trace: on the terminal, as a figure for a paper, or as a page to explore."""
    trace = _trace(target, model)
    if output is None:
        lanes = grain is Grain.LANES
        for row in terminal_rows(
            trace, out.width, colour=out.color_system is not None, palette_name=palette, lanes=lanes
        ):
            out.print(row, soft_wrap=True)
        suggest(f"weft draw {target} {model} -o figure.svg".replace("  ", " "))
        return
    with working(f"drawing {output}"):
        _write(target.name, trace, output, grain, cell, memory, palette, against, parse_ranks(ranks))
    suggest(f"weft draw {target} {model} -o page.html".replace("  ", " "))


def _trace(target: Target, model: Model) -> Trace:
    loaded = target.load()
    trace = model.trace(loaded)
    assumed = model.costs.about if trace is not loaded else ""
    return replace(trace, about=f"{trace.about}: {assumed}") if assumed else trace


def _write(
    name: str,
    trace: Trace,
    output: Path,
    grain: Grain | None,
    cell: CellName | None,
    memory: bool,
    palette: str,
    against: Path | None,
    ranks: range | None,
) -> None:
    if output.suffix == ".html":
        from weft.view.page import page

        second = [(str(against), _trace(Target(str(against)), Model()))] if against is not None else []
        output.write_text(page([("predicted" if not trace.measured else "measured", trace), *second], palette), "utf-8")
        return
    if against is not None:
        raise ValueError("--against is for a page; give -o a name that ends in .html")
    try:
        from weft.view import figure
        from weft.view.frame import described
    except ImportError as error:
        raise ValueError(f"figures need matplotlib ({error}); pip install 'weft[view]', or -o page.html") from None
    if cell is not None:
        figure.draw_cell(trace, cell.value, output, palette_name=palette)
    else:
        rows: Literal["cells", "lanes"] | None = grain.value if grain is not None else None
        title = f"{name}: {described(trace)}"
        figure.draw(trace, output, grain=rows, memory=memory, palette_name=palette, ranks=ranks, title=title)
