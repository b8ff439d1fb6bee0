"""`treadle simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from treadle import api
from treadle.cli.model import Model
from treadle.cli.options import Json, parse_ranks, spread_options
from treadle.cli.target import Target
from treadle.cli.terminal import out, plain, suggest, working
from treadle.cli.update_target import Update
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
    trace = model.trace(update.load(target), slowness=slowness, seed=seed)
    with working("measuring"):
        is_update = trace.program.layout.is_update
        metrics = measure_update(trace) if is_update else measure(trace)
        path = summarize_path(trace, critical_path(trace))
    if output is not None:
        with working(f"writing {output}"):
            api.save_trace(trace, output, ranks=parse_ranks(ranks))
    if as_json:
        plain(json.dumps(_as_dict(metrics, path, trace), indent=1) + "\n")
        return
    _print_update(metrics, trace) if isinstance(metrics, UpdateMetrics) else _print(metrics, trace)
    _print_path(path, trace.clock)
    again = f"treadle simulate {target} {model} {update} -o trace.json"
    suggest(f"treadle compare {output} ..." if output is not None else " ".join(again.split()))


def _as_dict(metrics: Metrics | UpdateMetrics, path: PathSummary, trace: Trace) -> dict[str, Any]:
    return {**metrics.as_dict(), "about": trace.about, "critical_path": path.as_dict()}


def show_time(clock: Clock, ticks: float) -> str:
    """A time as a person reads it, with its unit where it is a real one."""
    if clock.unit == "unit":
        return f"{clock.show(ticks):.6g}"
    seconds = ticks / clock.ticks * {"us": 1e-6, "ms": 1e-3}[clock.unit]
    unit, scale = next(((u, s) for u, s in (("s", 1), ("ms", 1e-3)) if seconds >= s), ("us", 1e-6))
    return f"{seconds / scale:.4g} {unit}"


def show_bytes(size: int) -> str:
    """A size as a person reads it."""
    unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size >= s), ("", 1))
    return f"{size / scale:.4g}{' ' + unit if unit else ''}"


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
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    copies = any(row.copies.total for row in metrics.ranks)
    columns = ("rank", "busy", "idle", "bubble", "comm hidden", "exposed")
    for column in (*columns, *(("copies hidden", "exposed") if copies else ()), "peak"):
        table.add_column(column, justify="right")
    for rank, row in list(enumerate(metrics.ranks))[:SHOWN_RANKS]:
        covers = [row.communication.hidden, row.communication.exposed]
        covers += [row.copies.hidden, row.copies.exposed] if copies else []
        times = [show_time(clock, value) for value in (row.busy, row.idle)]
        hidden = [show_time(clock, value) for value in covers]
        table.add_row(str(rank), *times, f"{row.bubble:.1%}", *hidden, show_bytes(metrics.peak_bytes[rank]))
    out.print(table)
    if len(metrics.ranks) > SHOWN_RANKS:
        out.print(f"... and {len(metrics.ranks) - SHOWN_RANKS} more ranks (--json has them all)", style="dim")


def _print_path(path: PathSummary, clock: Clock) -> None:
    kinds = sorted(path.by_kind.items(), key=lambda item: -item[1])
    total = max(1, path.length)
    parts = [f"{name} {show_time(clock, ticks)} ({ticks / total:.0%})" for name, ticks in kinds if ticks > 0]
    parts += [f"gaps {show_time(clock, path.gaps)} ({path.gaps / total:.0%})"] if path.gaps else []
    out.print(f"critical path: {path.num_ops} ops over {len(path.by_rank)} ranks: {', '.join(parts)}", soft_wrap=True)
