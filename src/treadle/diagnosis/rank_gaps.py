"""Gaps: time between an op and what it waits for, by the worker or the link that has it, and before a step's first op.

start of an op  =  latest of (end of the op before it on its lane, ends of what it waits for) + gap
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treadle.diagnosis.whatif import WhatIf
from treadle.ir.crossings import crossings
from treadle.ir.execute import makespans
from treadle.ir.program import Bools, Longs, Program
from treadle.ir.steps import Steps


@dataclass(frozen=True, eq=False)
class RankGaps:
    """`gap[step, op]` before each computation; `opens[op]` marks those that begin a step without a message."""

    whatif: WhatIf
    gap: Longs
    opens: Bools

    @classmethod
    def of(cls, steps: Steps, whatif: WhatIf) -> RankGaps:
        """Find what computations waited for nothing."""
        program, end = steps.program, steps.end.copy()
        found = crossings(program)
        posted = _ready(program, steps.start.min(axis=1), end)[:, found.recv]
        came = np.maximum(end[:, found.maker], posted) + whatif.measured[:, found.recv]  # a host may find it later
        end[:, found.recv] = np.minimum(end[:, found.recv], came)
        ready = _ready(program, steps.start.min(axis=1), end)
        for second in np.flatnonzero(program.joined):  # a pair waits for the inputs of both
            ready[:, second - 1] = np.maximum(ready[:, second - 1], ready[:, second])
        counted = whatif.computes & ~program.joined
        gap = np.where(counted, np.maximum(steps.start - ready, 0), 0)
        ops = np.flatnonzero(counted)
        first = np.zeros(program.num_ops, bool)
        worker = whatif.worker[ops]
        first[ops[np.unique(worker, return_index=True)[1]]] = True
        first[found.reader - program.joined[found.reader]] = False
        return cls(whatif, gap, first)

    @cached_property
    def replayed(self) -> float:
        """Ticks of a step with the gaps, on average."""
        return self._taking(self.gap)

    def cost(self, chosen: Bools) -> float:
        """Ticks of a step that go with the gaps before the chosen ops."""
        return self.replayed - self._taking(np.where(chosen, 0, self.gap))

    def _taking(self, gap: Longs) -> float:
        return float(makespans(self.whatif.program, self.whatif.measured + gap).mean())

    @cached_property
    def total(self) -> Longs:
        """`[op]`: ticks before it, over all steps."""
        return np.asarray(self.gap.sum(axis=0), np.int64)

    @cached_property
    def slowest(self) -> tuple[int, Bools]:
        """The worker with the longest gaps but for the first of its step, and the ops that they are before."""
        within = np.where(self.opens, 0, self.total)
        worker = int(np.bincount(self.whatif.worker, within).argmax())
        return worker, (self.whatif.worker == worker) & ~self.opens

    @cached_property
    def latest(self) -> tuple[int, Bools]:
        """The worker whose steps begin latest, and the op that they begin with."""
        worker = int(np.bincount(self.whatif.worker, np.where(self.opens, self.total, 0)).argmax())
        return worker, (self.whatif.worker == worker) & self.opens

    @cached_property
    def late(self) -> float:
        """Ticks of a step that go where no worker begins its steps later than its messages come."""
        return self.cost(self.opens)

    @cached_property
    def link(self) -> tuple[tuple[int, int] | None, Bools]:
        """The two pipeline ranks between which messages without a mark may have taken longest, and their readers."""
        whatif, program = self.whatif, self.whatif.program
        found = crossings(program)
        none = np.zeros(program.num_ops, bool)
        if not len(found.reader) or whatif.measured[:, whatif.is_message].any():
            return None, none
        src, dst = whatif.place[found.maker], whatif.place[found.reader]
        low, high, num_ranks = np.minimum(src, dst), np.maximum(src, dst), program.layout.placement.pp
        code = low.astype(np.int64) * num_ranks + high
        reader = found.reader - program.joined[found.reader]
        most = int(np.bincount(code, self.total[reader]).argmax())
        none[reader[code == most]] = True
        return divmod(most, num_ranks), none


def _ready(program: Program, begin: Longs, end: Longs) -> Longs:
    """`[step, op]`: when the op before it on its lane and all that it waits for have ended; else the step's begin."""
    ready = np.repeat(begin[:, None], program.num_ops, axis=1)
    after = np.flatnonzero(np.r_[False, program.lane_of[1:] == program.lane_of[:-1]])
    ready[:, after] = np.maximum(ready[:, after], end[:, after - 1])
    waits = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    known = program.dep >= 0
    for step in range(len(begin)):
        np.maximum.at(ready[step], waits[known], end[step, program.dep[known]])
    return ready
