"""The one execution under costs, or under a duration for each op, as a Trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.costs import Costs, ticks
from treadle.ir.execute import Times, execute
from treadle.ir.program import Longs, Program
from treadle.ir.trace import MICROSECONDS, Clock, Trace
from treadle.simulator.slowness import Factors, checked_factors, random_factors


@dataclass(frozen=True, eq=False, repr=False)
class Durations:
    """A duration for each op of a Program, in ticks of a clock; costs have one for each kind of op.

    Ops of a group (a send and its receive, a collective on its members) start together. They end together, after the
    longest of their durations; with `own_ends` each ends after its own.

    Example:
        >>> program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=2))
        >>> trace = treadle.simulate(program, Durations(np.full(program.num_ops, 1000)))
        >>> trace.clock.show(trace.makespan)
        8

    """

    ticks: Longs
    clock: Clock = MICROSECONDS
    own_ends: bool = False
    about: str = "a duration for each op"

    def __repr__(self) -> str:
        """Return the size: the column is too long to read."""
        return f"<Durations: {len(self.ticks)} ops; {self.about}>"


def simulate(program: Program, costs: Costs | Durations, *, slowness: float | Factors = 0.0, seed: int = 0) -> Trace:
    """Predict when each op starts and ends.

    Args:
        program: one that finishes.
        costs: how long ops take: by kind, or each.
        slowness: each rank is slower by a random share of up to this much, 0.05 is 5 %; or the factor of each rank,
            which multiplies all its times.
        seed: of that share.

    Raises:
        ValueError: the program does not finish (`treadle.verify` explains why), or durations are not one for each
            op, or negative, or factors are not one for each rank.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> trace = simulate(treadle.lower(treadle.generate("gpipe", pp=2, microbatches=2), unit), unit)
        >>> trace.clock.show(trace.makespan)
        9

    """
    factor, slower = _slower(program, slowness, seed)
    if isinstance(costs, Durations):
        times = _execute_each(program, costs, factor)
        return Trace(program, times.start, times.end, costs.clock, f"predicted with {costs.about}{slower}")
    times = _finished(execute(program, ticks(program, costs, slowness=factor)))
    about = f"predicted with costs {costs.name!r}{slower}"
    if program.layout.model_layers and not program.layout.by_layer:
        about += f", a model of {program.layout.model_layers} layers"
    return Trace(program, times.start, times.end, costs.clock, about)


def _slower(program: Program, slowness: float | Factors, seed: int) -> tuple[Factors | None, str]:
    """Return the factor of each rank, if any differs, and the words for it."""
    if not isinstance(slowness, int | float):
        factor = checked_factors(np.asarray(slowness), program.num_ranks)
        return factor, f", {np.count_nonzero(factor != 1.0)} of {len(factor)} ranks slower"
    if not slowness:
        return None, ""
    return random_factors(program.num_ranks, slowness, seed), f", ranks up to {slowness:.0%} slower"


def _execute_each(program: Program, durations: Durations, factor: Factors | None) -> Times:
    dur = np.asarray(durations.ticks, np.int64)
    if dur.shape != (program.num_ops,):
        raise ValueError(f"durations are one for each of {program.num_ops} ops, got an array of shape {dur.shape}")
    if (dur < 0).any():
        op = int(np.argmax(dur < 0))
        raise ValueError(f"durations are 0 or more ticks, got {dur[op]} for {program.op(op)} (op {op})")
    if factor is not None:
        dur = np.rint(dur * factor[program.lane_rank[program.lane_of]]).astype(np.int64)
    return _finished(execute(program, dur, own_ends=durations.own_ends))


def _finished(times: Times) -> Times:
    if not times.finished:
        raise ValueError("the program does not finish: 'treadle verify' shows why")
    return times
