"""`treadle simulate`."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from treadle.api import load_save
from treadle.cli.common_options import Json, parse_ranks, spread_options
from treadle.cli.output import print_json
from treadle.cli.slow import Slow
from treadle.cli.step_flags import StepFlags, make_traces, note_missing
from treadle.cli.target import Target
from treadle.cli.terminal import again, note, out, suggest, working, wrote
from treadle.ir.show import show_bytes, show_held, show_time
from treadle.ir.trace import Clock
from treadle.simulator import Metrics, PathSummary
from treadle.step import Step
from treadle.weights.summary import UpdateMetrics

if TYPE_CHECKING:
    from treadle.cli.printed import SimulateJson, SimulateUpdateJson

SHOWN_RANKS = 16


@spread_options
def simulate(
    target: Target,
    flags: StepFlags,
    slow: Slow,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the trace: .json, .json.gz (Perfetto) or .npz.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="Write only these ranks' part of a .json trace: 0-7.")] = None,
    unfolded: Annotated[
        bool, typer.Option("--unfolded", help="With --every-gpu: simulate all GPUs, also those that are alike.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Predicts a step: how long, where it idles, what is hidden, what it holds, what is on the critical path."""
    slow.check()
    if unfolded and not flags.every_gpu:
        raise ValueError("--unfolded is about every GPU of a mesh; add --every-gpu, or leave it out")
    step = flags.step(
        target.load(),
        target.plan,
        slowness=slow.slowness,
        stragglers=slow.stragglers(),
        seed=slow.seed,
        unfolded=unfolded or output is not None,
    )
    _predict(step)
    if output is not None:
        with working(f"writing {output}"):
            load_save.save_trace(step.trace, output, ranks=parse_ranks(ranks))
        wrote(output)
    with working("measuring"):
        metrics, path = step.metrics, step.path
    if as_json:
        print_json("simulate-update" if step.is_update else "simulate", step_object(step))
        return
    if isinstance(metrics, UpdateMetrics):
        print_update(metrics, step.about)
    else:
        _print(metrics, step.about)
    print_path(path, metrics.clock)
    suggest(again("-o trace.json") if output is None else f"treadle draw {shlex.quote(str(output))} -o page.html")


def _predict(step: Step) -> None:
    """Simulate a step, with progress; notes say whether every GPU of a mesh is simulated."""
    if not step.has_replicas or step.unfolded:
        make_traces([step])
        return
    with working("verifying"):
        step.check_sound()
    with working("lowering"):
        reason = step.why_unfolded
    if reason is not None:
        note(f"every GPU is simulated, unfolded: {reason}")
        make_traces([step])
        return
    note_missing(step, set())
    if step.num_columns == step.options.ep * step.options.dp:
        num_ops = step.num_columns * step.pipeline.num_ops
        note(f"nothing folds, as every replica differs: {num_ops:,} ops are simulated")
    with working("simulating"):
        _ = step.folded


def step_object(step: Step) -> SimulateJson | SimulateUpdateJson:
    """Return a step in numbers, for JSON."""
    metrics, path, zero = step.metrics, step.path.as_dict(), list(step.missing)
    if isinstance(metrics, UpdateMetrics):
        return {**metrics.as_dict(), "about": step.about, "critical_path": path, "taken_as_zero": zero}
    return {**metrics.as_dict(), "about": step.about, "critical_path": path, "taken_as_zero": zero}


def print_update(metrics: UpdateMetrics, about: str) -> None:
    """Print a weight update: its makespan, and a row a device."""
    clock = metrics.clock
    size = f", {show_bytes(metrics.moved_bytes)} broadcast" if clock.unit != "unit" else ""
    out.print(
        f"[bold]makespan {show_time(clock, metrics.makespan)}[/]{size}, reload {metrics.hidden:.1%} hidden, "
        f"{metrics.num_ops} ops on {len(metrics.devices)} devices; {escape(about)}",
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


def _print(metrics: Metrics, about: str) -> None:
    clock = metrics.clock
    out.print(
        f"[bold]makespan {show_time(clock, metrics.makespan)}[/], bubble {metrics.bubble:.2%}, "
        f"{metrics.num_ops} ops on {len(metrics.ranks)} ranks; {escape(about)}",
        soft_wrap=True,
    )
    copies = any(row.copies.total for row in metrics.ranks)
    table = Table(box=None, padding=(0, 2 - copies, 0, 0), header_style="dim")  # 80 columns hold both
    columns = ("rank", "busy", "idle", "idle %", "comm hidden", "exposed")
    for column in (*columns, *(("copies hidden", "exposed") if copies else ()), "peak"):
        table.add_column(column, justify="right")
    rows: dict[tuple[str, ...], list[int]] = {}
    shown: dict[tuple[int, float], tuple[str, ...]] = {}  # ranks of a folded step share their numbers
    for rank, (row, peak) in enumerate(zip(metrics.ranks, metrics.peaks, strict=True)):
        cells = shown.get((id(row), peak))
        if cells is None:
            covers = [row.communication, *([row.copies] if copies else [])]
            hidden = [show_time(clock, ticks) for cover in covers for ticks in (cover.hidden, cover.exposed)]
            times = [show_time(clock, ticks) for ticks in (row.busy, row.idle)]
            cells = (*times, f"{row.idle_share:.1%}", *hidden, show_held(peak, metrics.peak_unit))
            shown[id(row), peak] = cells
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
    told = []
    for what, times in (("busiest", [r.busy for r in metrics.ranks]), ("most idle", [r.idle for r in metrics.ranks])):
        most, middle = (show_time(metrics.clock, ticks) for ticks in (max(times), median(times)))
        if what != "busiest" or most != middle:  # all are equally busy, but for slow ranks
            told.append(f"{what}: {most} (rank {times.index(max(times))}), median {middle}")
    held = [show_held(size, metrics.peak_unit) for size in (metrics.peak, median(metrics.peaks))]
    told.append(f"highest peak: {held[0]} (rank {metrics.peaks.index(metrics.peak)}), median {held[1]}")
    out.print("; ".join(told), soft_wrap=True)


def print_path(path: PathSummary, clock: Clock) -> None:
    """Print the critical path by kind of op."""
    kinds = sorted(path.by_kind.items(), key=lambda item: -item[1])
    total = max(1, path.length)
    parts = [f"{name} {show_time(clock, ticks)} ({ticks / total:.0%})" for name, ticks in kinds if ticks > 0]
    parts += [f"gaps {show_time(clock, path.gaps)} ({path.gaps / total:.0%})"] if path.gaps else []
    out.print(f"critical path: {path.num_ops} ops over {len(path.by_rank)} ranks: {', '.join(parts)}", soft_wrap=True)
