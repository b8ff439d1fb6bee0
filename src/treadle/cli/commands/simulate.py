"""`treadle simulate`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from treadle.api import files
from treadle.cli.model import Model
from treadle.cli.options import Json, parse_ranks, spread_options
from treadle.cli.output import print_json
from treadle.cli.target import Target
from treadle.cli.terminal import out, suggest, working
from treadle.cli.update_target import Update
from treadle.ir.show import show_bytes, show_held, show_time
from treadle.ir.trace import Clock, Trace
from treadle.simulate import Metrics, PathSummary, critical_path, measure, summarize_path
from treadle.weights.summary import UpdateMetrics, measure_update

SHOWN_RANKS = 16


@spread_options
def simulate(
    target: Target,
    model: Model,
    update: Update,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the trace: .json, .json.gz (Perfetto) or .npz.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="Write only these ranks' part of a .json trace: 0-7.")] = None,
    slowness: Annotated[float, typer.Option(help="Each rank slower by a random share of up to so much: 0.05.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of that randomness.")] = 0,
    as_json: Json = False,
) -> None:
    """Predicts a step: how long, where it idles, what is hidden, what it holds, what is on the critical path."""
    if not 0 <= slowness <= 10:
        raise ValueError(f"--slowness is a share from 0 to 10, such as 0.05, got {slowness}")
    loaded = update.load(target)
    trace = model.trace(loaded, slowness=slowness, seed=seed)
    with working("measuring"):
        is_update = trace.program.layout.is_update
        metrics = measure_update(trace) if is_update else measure(trace)
        path = summarize_path(trace, critical_path(trace))
    if output is not None:
        with working(f"writing {output}"):
            files.save_trace(trace, output, ranks=parse_ranks(ranks))
    if as_json:
        taken_as_zero = list(model.missing(trace.program)) if trace is not loaded else []
        body = {**_as_dict(metrics, path, trace), "taken_as_zero": taken_as_zero}
        print_json("simulate-update" if is_update else "simulate", body)
        return
    _print_update(metrics, trace) if isinstance(metrics, UpdateMetrics) else _print(metrics, trace)
    _print_path(path, trace.clock)
    again = f"treadle simulate {target} {model} {update} -o trace.json"
    suggest(f"treadle compare {output} ..." if output is not None else " ".join(again.split()))


def _as_dict(metrics: Metrics | UpdateMetrics, path: PathSummary, trace: Trace) -> dict[str, Any]:
    return {**metrics.as_dict(), "about": trace.about, "critical_path": path.as_dict()}


def _print_update(metrics: UpdateMetrics, trace: Trace) -> None:
    clock = metrics.clock
    size = f", {show_bytes(metrics.moved_bytes)} broadcast" if clock.unit != "unit" else ""
    out.print(
        f"[bold]makespan {show_time(clock, metrics.makespan)}[/]{size}, reload {metrics.hidden:.1%} hidden, "
        f"{metrics.num_ops} ops on {len(metrics.devices)} devices; {escape(trace.about)}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("device", "h2d", "hidden", "broadcast", "reload", "hidden"):
        table.add_column(column, justify="right")
    for rank, row in list(enumerate(metrics.devices))[:SHOWN_RANKS]:
        times = (row.h2d, row.h2d_hidden, row.broadcast, row.reload, row.reload_hidden)
        table.add_row(str(rank), *(show_time(clock, ticks) for ticks in times))
    out.print(table)
    if len(metrics.devices) > SHOWN_RANKS:
        out.print(f"... and {len(metrics.devices) - SHOWN_RANKS} more devices (--json has them all)", style="dim")


def _print(metrics: Metrics, trace: Trace) -> None:
    clock = metrics.clock
    out.print(
        f"[bold]makespan {show_time(clock, metrics.makespan)}[/], bubble {metrics.bubble:.2%}, "
        f"{metrics.num_ops} ops on {len(metrics.ranks)} ranks; {escape(trace.about)}",
        soft_wrap=True,
    )
    copies = any(row.copies.total for row in metrics.ranks)
    table = Table(box=None, padding=(0, 2 - copies, 0, 0), header_style="dim")  # 80 columns hold both
    columns = ("rank", "busy", "idle", "bubble", "comm hidden", "exposed")
    for column in (*columns, *(("copies hidden", "exposed") if copies else ()), "peak"):
        table.add_column(column, justify="right")
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, row in enumerate(metrics.ranks):
        covers = [row.communication.hidden, row.communication.exposed]
        covers += [row.copies.hidden, row.copies.exposed] if copies else []
        times = [show_time(clock, value) for value in (row.busy, row.idle)]
        hidden = [show_time(clock, value) for value in covers]
        cells = (*times, f"{row.bubble:.1%}", *hidden, show_held(metrics.peaks[rank], metrics.peak_unit))
        rows.setdefault(cells if len(metrics.ranks) > SHOWN_RANKS else (*cells, str(rank)), []).append(rank)
    for cells, ranks in list(rows.items())[:SHOWN_RANKS]:
        table.add_row(rank_ranges(ranks), *cells[: len(table.columns) - 1])
    out.print(table)
    if len(rows) > SHOWN_RANKS:
        left = sum(len(ranks) for ranks in list(rows.values())[SHOWN_RANKS:])
        out.print(f"... and {left} more ranks (--json has them all)", style="dim")
    if len(metrics.ranks) > SHOWN_RANKS:
        _print_extremes(metrics)


def rank_ranges(ranks: list[int]) -> str:
    """Ranks in order, as ranges: `0-3, 8`; past three ranges `0-3, 8, 10, ... (17 ranks)`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    listed = ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in ranges[:3])
    return listed if len(ranges) <= 3 else f"{listed}, ... ({len(ranks)} ranks)"


def _print_extremes(metrics: Metrics) -> None:
    """Name the worst rank and the median, where a row for each is too much to read."""
    idle = [rank.idle for rank in metrics.ranks]
    worst, fullest = idle.index(max(idle)), metrics.peaks.index(metrics.peak)
    times = f"{show_time(metrics.clock, max(idle))} (rank {worst}), median {show_time(metrics.clock, median(idle))}"
    held = [show_held(size, metrics.peak_unit) for size in (metrics.peak, median(metrics.peaks))]
    out.print(f"most idle: {times}; highest peak: {held[0]} (rank {fullest}), median {held[1]}", soft_wrap=True)


def _print_path(path: PathSummary, clock: Clock) -> None:
    kinds = sorted(path.by_kind.items(), key=lambda item: -item[1])
    total = max(1, path.length)
    parts = [f"{name} {show_time(clock, ticks)} ({ticks / total:.0%})" for name, ticks in kinds if ticks > 0]
    parts += [f"gaps {show_time(clock, path.gaps)} ({path.gaps / total:.0%})"] if path.gaps else []
    out.print(f"critical path: {path.num_ops} ops over {len(path.by_rank)} ranks: {', '.join(parts)}", soft_wrap=True)
