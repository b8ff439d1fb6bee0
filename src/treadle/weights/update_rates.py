"""Rates of an update's copies and broadcasts, and the Trace that they predict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.costs.costs import UNIT
from treadle.ir.execute import execute
from treadle.ir.ops import BUCKET_MOVES, UPDATE, OpKind
from treadle.ir.program import Longs, Program
from treadle.ir.trace import MICROSECONDS, Clock, Trace

UNIT_TICKS = {kind: UNIT.ticks * (4 if kind is OpKind.H2D else 1) for kind in UPDATE}
"""As published figures draw it: a bucket of each of four devices takes as long to copy as to broadcast in turn."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second by kind of op (None: takes no time); seconds that each broadcast takes besides, and the first.

    A bucket that goes along a route takes at each hop what a broadcast of it takes.
    """

    h2d: float | None = None
    broadcast: float | None = None
    reload: float | None = None
    latency_s: float = 0.0
    start_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("h2d", "broadcast", "reload"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"a rate is above 0 bytes a second, or None for no time at all; got {name} {rate}")
        if self.latency_s < 0 or self.start_s < 0:
            raise ValueError(f"seconds are 0 or more, got latency_s {self.latency_s}, start_s {self.start_s}")

    def __str__(self) -> str:
        rates = [(name, getattr(self, name)) for name in ("h2d", "broadcast", "reload")]
        words = [f"{name} {rate / 1e9:.4g} GB/s" if rate is not None else f"{name} free" for name, rate in rates]
        words += [f"{self.latency_s * 1e3:.4g} ms a broadcast"] if self.latency_s else []
        words += [f"{self.start_s:.4g} s at the start"] if self.start_s else []
        return ", ".join(words)


def update_ticks(program: Program, rates: Rates | None) -> tuple[Longs, Clock]:
    """Ticks of each op and what they count; without rates, units."""
    if rates is None:
        table = np.zeros(len(OpKind), np.int64)
        table[list(UNIT_TICKS)] = list(UNIT_TICKS.values())
        return table[program.kind], UNIT
    dur = np.zeros(program.num_ops)
    moving = np.isin(program.kind, BUCKET_MOVES)
    for mine, rate in (
        (program.kind == OpKind.H2D, rates.h2d),
        (moving, rates.broadcast),
        (program.kind == OpKind.RELOAD, rates.reload),
    ):
        if rate is not None:
            dur[mine] = program.size_bytes[mine] / rate
    dur[moving] += rates.latency_s
    first = moving & (program.cell == program.cell[moving].min(initial=np.iinfo(np.int32).max))
    rank, peer = (column[program.lane_of] for column in (program.lane_rank, program.lane_peer))
    sends_on = first & (program.kind != OpKind.BROADCAST) & (rank != program.layer) & (peer != program.layer)
    dur[first & ~sends_on] += rates.start_s
    return np.rint(dur * 1e6 * MICROSECONDS.ticks).astype(np.int64), MICROSECONDS


def simulate_update(program: Program, rates: Rates | None = None) -> Trace:
    """When each op starts and ends if it starts as soon as it can."""
    dur, clock = update_ticks(program, rates)
    times = execute(program, dur)
    if not times.finished:
        raise ValueError("the update does not finish: 'treadle verify' shows why")
    assumed = str(rates) if rates is not None else "h2d 4, broadcast 1, reload 1"
    return Trace(program, times.start, times.end, clock, f"predicted: {assumed}")
