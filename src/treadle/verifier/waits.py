"""Checks that every op waits for what it needs, whatever the durations: by its lane, a dependency, or a chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from treadle.ir.execute import Times, leaders
from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Ints, Program
from treadle.verifier.finding import MOST, Finding

_BROKEN = 200
"""Missing waits after which no more are searched for: a search without a chain sees all ops of its time."""


def check_waits(program: Program, unmet: Ints, times: Times) -> Iterator[Finding]:
    """T401: an op that reads what nothing makes, or what need not be there yet. `unmet` are the suspects."""
    yielded = broken = 0
    search: _Chains | None = None
    for op, wanted in unmet:
        if wanted == NEVER:
            reader = program.op(int(op))
            yield Finding.at("T401", reader, f"{reader} reads what no op makes")
        else:
            search = search or _Chains(program, times)
            if broken == _BROKEN or search.reaches(int(op), int(wanted)):
                continue
            broken += 1
            reader, made = program.op(int(op)), program.op(int(wanted))
            yield Finding.at("T401", reader, f"{reader} does not wait for {made}, which it reads")
        yielded += 1
        if yielded == MOST:
            return


class _Chains:
    """Looks backward from an op for another, over lanes, dependencies and ops that go together."""

    def __init__(self, program: Program, times: Times) -> None:
        self.program, self.times = program, times
        lead = leaders(program)
        order = np.argsort(lead, kind="stable")
        self.lead, self.order = lead, order
        self.starts = np.searchsorted(lead[order], np.arange(program.num_ops + 1))
        self.opens = set(map(int, program.lane_ptr[:-1]))

    def together(self, op: int) -> list[int]:
        """The ops that start and end with this one, itself among them."""
        lead = int(self.lead[op])
        return [int(i) for i in self.order[self.starts[lead] : self.starts[lead + 1]]]

    def before(self, op: int) -> Iterator[int]:
        """Yield the ops that must have ended before this op, or one it goes together with, can start."""
        mates = self.together(op)
        for mate in mates:
            if mate not in self.opens and mate - 1 not in mates:
                yield mate - 1
            yield from (dep for dep in self.program.deps(mate) if dep != NEVER)

    def reaches(self, op: int, wanted: int) -> bool:
        """True if a chain of waits leads from `wanted` to `op`. An op on it has not ended before `wanted` did."""
        goal = set(self.together(wanted))
        end = self.times.end
        seen: set[int] = set()
        queue = deque(self.before(op))
        while queue:
            at = queue.popleft()
            if at in goal:
                return True
            if at in seen or (0 <= end[at] < end[wanted]):
                continue
            seen.add(at)
            queue.extend(self.before(at))
        return False


def check_never(program: Program) -> Iterator[Finding]:
    """T203: a dependency on something that no op is."""
    if not len(program.dep) or program.dep.min() != NEVER:
        return
    ops = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    for index in np.unique(ops[program.dep == NEVER])[:MOST]:
        op = program.op(int(index))
        place = "cell" if op.lane.kind is LaneKind.COMPUTE else "op"
        yield Finding.at("T203", op, f"{op} waits for ever: what this {place} depends on is not in the program")
