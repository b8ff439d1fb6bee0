"""Replicas of a pipeline, each simulated alone with one GPU column of each kind.

A replica is an expert group: `ep` columns, each a GPU on every pipeline rank. Columns that are equally slow on all
pipeline ranks have equal times, and collectives wait for the slowest member, however often it is there. So one column
of each kind gives the times of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from treadle.costs import Costs, ticks
from treadle.folding.step_tail import StepTail, latest, padded
from treadle.ir.execute import Times, execute
from treadle.ir.ops import LaneKind
from treadle.ir.program import Ints, Longs, Program
from treadle.passes.mesh import spread
from treadle.simulator.slowness import Factors

Column: TypeAlias = tuple[float, ...]
"""The factor of a column on each pipeline rank."""

Members: TypeAlias = tuple[Column, ...]
"""The different columns of a replica, in order."""


class BodyTimes(NamedTuple):
    """When a replica's columns are ready for the tail, `ready[column, i]`, and done before it, `done[column, rank]`."""

    ready: Longs
    done: Longs


class Replicas:
    """Simulates replicas of one pipeline that differ in their columns.

    Raises:
        ValueError: replicas wait for each other in the middle of the step, or the program does not finish.

    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.tail = StepTail.of(program, costs)
        self.meets = bool((program.lane_kind == LaneKind.EP).any())
        """True if the columns of a replica meet: there are ops of expert groups."""
        self._last_body = _last_of_ranks(program, self.tail.ops)
        self._spread: tuple[int, Program] = (1, program)

    def body(self, members: Members) -> BodyTimes:
        """Simulate a replica, and keep of it what the tail and the ends of ranks depend on."""
        end = self.execute(members)[1].end.reshape(len(members), -1)
        return BodyTimes(latest(end, self.tail.body), latest(end, self._last_body))

    def execute(self, members: Members) -> tuple[Program, Times]:
        """Simulate a replica alone: the times of its tail are those it would have without the others."""
        program = self.of_size(len(members))
        factor = np.array(members).T.reshape(-1)
        times = execute(program, ticks(program, self.costs, slowness=factor))
        if not times.finished:
            raise ValueError("the program does not finish: 'treadle verify' shows why")
        return program, times

    def of_size(self, num_columns: int) -> Program:
        """Return the Program of a replica; the last one is kept, as replicas come in the order of their sizes."""
        if self._spread[0] != num_columns:
            self._spread = num_columns, spread(self.program, ep=num_columns, dp=1)
        return self._spread[1]


def together(bodies: Sequence[BodyTimes]) -> BodyTimes:
    """Return the rows of all bodies, concatenated."""
    return BodyTimes(*(np.concatenate([body[part] for body in bodies]) for part in range(2)))


def factors_of(replicas: Sequence[Members]) -> Factors:
    """Return the factors of all columns, concatenated: `[row, rank]`."""
    return np.array([column for members in replicas for column in members])


def _last_of_ranks(program: Program, tail: Longs) -> Ints:
    """List for each rank the last op of each of its lanes that is not in the tail."""
    is_tail = np.zeros(program.num_ops, bool)
    is_tail[tail] = True
    rows: list[list[int]] = [[] for _ in range(program.num_ranks)]
    for lane, rank in enumerate(program.lane_rank.tolist()):
        body = np.flatnonzero(~is_tail[program.lane_ptr[lane] : program.lane_ptr[lane + 1]])
        if len(body):
            rows[rank].append(int(program.lane_ptr[lane] + body[-1]))
    return padded(rows)
