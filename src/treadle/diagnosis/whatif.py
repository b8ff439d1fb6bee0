"""What if: measured steps executed again, with some ops made ordinary.

The duration of a message or a collective is its *transfer*: its own end less the last start in its group. Waiting for a
late peer is so counted once, where the peer is late. A transfer that ends 10 ms or more before its last start is a
clock's error and counts as 0.

The *ordinary* duration of an op is that of its type over all ranks and steps: the mean where a rank computes, the
median of communication and copies, which have outliers. A step of ordinary ops is the *ideal* step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.execute import leaders, makespans
from treadle.ir.ops import COMMUNICATION, MESSAGES, SENDS, LaneKind
from treadle.ir.program import Bools, Bytes, Ints, Longs, Program
from treadle.ir.steps import Steps
from treadle.simulator.grouping import WORK, work_of

Floats: TypeAlias = npt.NDArray[np.float64]

_MOST_NEGATIVE_US = 10_000


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Durations of measured steps, and how long a step takes with some of them replaced.

    `measured[s, i]` is the duration of op i in step s, `ordinary[i]` the one of its type.
    """

    program: Program
    measured: Longs
    ordinary: Longs

    @classmethod
    def of(cls, steps: Steps) -> WhatIf:
        """Take the durations of measured steps.

        Raises:
            ValueError: the steps are of a weight update, or their program does not finish.

        """
        program = steps.program
        if program.layout.is_update:
            raise ValueError("this is a weight update, which has no stages; 'treadle simulate' shows what it waits for")
        measured = transfers(steps)
        made = cls(program, measured, _ordinary(program, measured))
        if made.ideal < 0:
            raise ValueError("the program of these steps does not finish: 'treadle verify' shows why")
        return made

    @cached_property
    def ideal(self) -> int:
        """Ticks of a step in which every op is ordinary."""
        return int(makespans(self.program, self.ordinary[None])[0])

    @cached_property
    def no_gaps(self) -> Longs:
        """Ticks of each step with the measured durations, and no time between an op and what it waits for."""
        return makespans(self.program, self.measured)

    def only(self, chosen: Bools) -> Longs:
        """Ticks of each step in which the chosen ops take what they took, and all others are ordinary."""
        return makespans(self.program, np.where(chosen, self.measured, self.ordinary))

    def without(self, chosen: Bools) -> Longs:
        """Ticks of each step in which the chosen ops are ordinary, and all others take what they took."""
        return makespans(self.program, np.where(chosen, self.ordinary, self.measured))

    def free(self, chosen: Bools) -> Longs:
        """Ticks of each step in which the chosen ops take no time."""
        return makespans(self.program, np.where(chosen, 0, self.measured))

    def taking(self, dur: Longs) -> Longs:
        """Ticks of each step with these durations."""
        return makespans(self.program, dur)

    def slowdown(self, took: Longs) -> float:
        """How much longer than the ideal step, on average."""
        return float(took.mean() / self.ideal) if self.ideal else 1.0

    def recovered(self, took: Longs) -> float:
        """The share of the time over the ideal step that is not lost in these steps; 0 where there is none to lose."""
        lost = self.no_gaps.mean() - self.ideal
        return float((self.no_gaps.mean() - took.mean()) / lost) if lost else 0.0

    @cached_property
    def communicates(self) -> Bools:
        """`[op]`: is it on a lane that communicates."""
        found: Bools = np.isin(self._lane_kind, COMMUNICATION)
        return found

    @cached_property
    def is_message(self) -> Bools:
        """`[op]`: is it a send or a receive of the pipeline."""
        found: Bools = np.isin(self.program.kind, MESSAGES)
        return found

    @property
    def is_collective(self) -> Bools:
        """`[op]`: does it communicate with other replicas or all ranks."""
        found: Bools = self.communicates & ~self.is_message
        return found

    @cached_property
    def computes(self) -> Bools:
        """`[op]`: does it compute for a micro-batch."""
        found: Bools = (self._lane_kind == LaneKind.COMPUTE) & (self.program.mb >= 0)
        return found

    @property
    def _lane_kind(self) -> Bytes:
        return self.program.lane_kind[self.program.lane_of]

    @cached_property
    def types(self) -> dict[str, Bools]:
        """The ops of each type, by its name in costs; sends and receives of a direction are one type."""
        work = work_of(self.program)
        found: dict[str, Bools] = {}
        for kind in np.unique(work).tolist():
            name = _TYPE_NAMES.get(kind, WORK[kind])
            found[name] = found.get(name, np.zeros(len(work), bool)) | (work == kind)
        return found

    @cached_property
    def stage(self) -> Ints:
        """`[op]` -> the stage that it computes, or whose message it moves."""
        program = self.program
        chunk = program.chunk.astype(np.int64)
        sends = np.flatnonzero(np.isin(program.kind, SENDS))  # named by who reads them
        chunk[sends] = program.chunk[program.dep[program.dep_ptr[sends]]]
        return np.array(program.layout.placement.stages, np.int32)[self.place, chunk]

    @cached_property
    def place(self) -> Ints:
        """`[op]` -> its rank in the pipeline, which holds one stage or several."""
        return (self._rank // self.program.layout.num_replicas).astype(np.int32)

    @cached_property
    def replica(self) -> Ints:
        """`[op]` -> its replica of the pipeline."""
        return (self._rank % self.program.layout.num_replicas).astype(np.int32)

    @cached_property
    def worker(self) -> Ints:
        """`[op]` -> its worker: the rank of the run."""
        return self._rank.astype(np.int32)

    @property
    def _rank(self) -> Ints:
        return self.program.lane_rank[self.program.lane_of]


_TYPE_NAMES = {int(kind): f"messages_{kind.name[-1].lower()}" for kind in MESSAGES}


def transfers(steps: Steps) -> Longs:
    """`[step, op]` -> its duration; of ops that go together, from the last start among them to the own end."""
    program, dur = steps.program, steps.end - steps.start
    grouped = np.flatnonzero(program.lane_group[program.lane_of] >= 0)
    if not len(grouped):
        return dur
    lead = leaders(program)[grouped]
    order = np.argsort(lead, kind="stable")
    opens = np.flatnonzero(np.r_[True, np.diff(lead[order]) != 0])
    last = np.maximum.reduceat(steps.start[:, grouped[order]], opens, axis=1)
    sizes = np.diff(np.r_[opens, len(order)])
    own = grouped[order]
    moved = steps.end[:, own] - np.repeat(last, sizes, axis=1)
    limit = _MOST_NEGATIVE_US * steps.clock.ticks if steps.clock.unit == "us" else 0
    dur[:, own] = np.where(moved <= -limit, np.maximum(moved, 0), moved)
    return dur


def _ordinary(program: Program, measured: Longs) -> Longs:
    """`[op]` -> the duration of its type over all ranks and steps."""
    work, lane_kind = work_of(program), program.lane_kind[program.lane_of]
    ordinary = np.zeros(program.num_ops, np.int64)
    for kind in np.unique(work):
        ops = work == kind
        computes = lane_kind[np.argmax(ops)] == LaneKind.COMPUTE
        ordinary[ops] = round(float((np.mean if computes else np.median)(measured[:, ops])))
    return ordinary
