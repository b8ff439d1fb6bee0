"""A step that does not finish, drawn up to where it hangs: what ran, what waits, and the circle of waits.

Ops that never start have no times. Those that the picture needs stand after the time of the hang, in the order of
their lane, as long as they would take: on each rank up to the last one in the circle, or the first that waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.costs import Costs, durations
from treadle.ir.execute import execute
from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Bools, Longs, Program
from treadle.ir.trace import Trace
from treadle.verifier.graph import Graph

GAP = 0.5
"""Between what ran and what waits, in the length of a usual op."""


@dataclass(frozen=True, eq=False)
class Hang:
    """Where a step stops. `time` is in ticks; `circle` has pairs of ops, of which the first waits for the second."""

    time: int
    waiting: Bools
    circle: tuple[tuple[int, int], ...]

    def since(self, trace: Trace) -> float:
        """When the last op that ran ended, in units of the clock from the first start."""
        return (self.time - int(trace.start.min())) / trace.clock.ticks

    @property
    def in_circle(self) -> Bools:
        """For each op, is it in the circle."""
        found: Bools = np.zeros(len(self.waiting), bool)
        found[[op for op, _ in self.circle]] = True
        return found


def run_to_hang(program: Program, costs: Costs) -> tuple[Trace, Hang] | None:
    """Run a program as far as it goes; None if it finishes."""
    dur = durations(program, costs)
    times = execute(program, dur)
    if times.finished:
        return None
    waiting: Bools = times.end < 0
    stop = int(times.end.max(initial=0))
    circle = _circle(program)
    start, end = np.where(waiting, stop, times.start), np.where(waiting, stop, times.end)
    gap = int(GAP * np.median(dur[dur > 0])) if (dur > 0).any() else 0
    for lane in np.flatnonzero(program.lane_kind == LaneKind.COMPUTE):
        _queue(program, int(lane), waiting, circle, dur, stop + gap, start, end)
    about = f"ran as far as it goes with costs {costs.name!r}; what waits stands after that, in the order of its rank"
    return Trace(program, start, end, costs.clock, about), Hang(stop, waiting, circle)


def _queue(
    program: Program,
    lane: int,
    waiting: Bools,
    circle: tuple[tuple[int, int], ...],
    dur: Longs,
    time: int,
    start: Longs,
    end: Longs,
) -> None:
    """Give the waiting ops of a lane that are drawn their place after the hang."""
    first, last = int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])
    ops = np.arange(first, last)[waiting[first:last]]
    wanted = [op for op, _ in circle if first <= op < last]
    for op in ops[ops <= max(wanted, default=int(ops[0]) if len(ops) else -1)]:
        if program.joined[op] and op > first and waiting[op - 1]:
            start[op], end[op] = start[op - 1], end[op - 1]
            continue
        start[op], end[op] = time, time + max(int(dur[op]), 1)
        time = int(end[op])


def _circle(program: Program) -> tuple[tuple[int, int], ...]:
    """A circle of waits among ops with boxes: a message stands for the action that makes it or reads it."""
    graph = Graph.of(program)
    stuck = graph.stuck()
    if not stuck.any():
        return ()
    chain = [int(op) for edge in graph.cycle(stuck) for op in (graph.target[edge], graph.source[edge])]
    shown = [op for op in (_action(program, op) for op in chain) if op != NEVER]
    shown = [op for op, before in zip(shown, [NEVER, *shown[:-1]], strict=True) if op != before]
    if len(shown) > 1 and shown[0] == shown[-1]:
        shown.pop()
    return tuple(zip(shown, [*shown[1:], *shown[:1]], strict=True))


def _action(program: Program, op: int) -> int:
    """The op whose box stands for this one; NEVER if there is none."""
    kind = program.lane_kind[program.lane_of[op]]
    if kind == LaneKind.SEND:
        return next((int(dep) for dep in program.deps(op) if dep != NEVER), NEVER)
    if kind == LaneKind.RECV:
        readers = np.searchsorted(program.dep_ptr, np.flatnonzero(program.dep == op), side="right") - 1
        return int(readers[0]) if len(readers) else NEVER
    return op
