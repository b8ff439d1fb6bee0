"""A step of every GPU of a mesh, folded: what is the same is simulated once, and the ends of all ranks are exact.

Replicas meet only at the end of a step, in the reductions of gradients and what follows. So each different replica is
simulated alone, with one GPU column of each kind (`replicas.py`), and the end of the step is computed over all of them
(`step_tail.py`). Where an op in the middle of a step waits for a reduction, this does not hold, and `fold` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.costs import Costs
from treadle.folding.replicas import Members, Replicas, factors_of, together
from treadle.folding.step_tail import TailTimes
from treadle.ir.ops import LaneKind
from treadle.ir.program import Longs, Program
from treadle.ir.trace import Clock, Trace
from treadle.simulator.slowness import Factors, checked_factors


@dataclass(frozen=True)
class MeshSize:
    """The replicas of a pipeline: `dp` expert groups of `ep` columns each."""

    ep: int
    dp: int

    @property
    def num_columns(self) -> int:
        """Copies of the pipeline."""
        return self.ep * self.dp


@dataclass(frozen=True, eq=False)
class ReplicaKinds:
    """The different replicas of a mesh, and the row of each column.

    `members[k]` are the columns of the k-th kind of replica; rows count the columns of all kinds in order, from
    `first[k]` on. `row[c]` is the row of column c = d * ep + e.
    """

    members: tuple[Members, ...]
    first: Longs
    row: Longs

    @property
    def num_rows(self) -> int:
        """Rows of all kinds."""
        return sum(map(len, self.members))

    @classmethod
    def of(cls, columns: Factors, *, together: int) -> ReplicaKinds:
        """Find the kinds of replicas; `columns[c]` are the factors of column c, and each `together` are a replica."""
        different, number = np.unique(columns, axis=0, return_inverse=True)
        of_replica = number.reshape(-1, together)
        keys = [tuple(np.unique(numbers).tolist()) for numbers in of_replica]
        kinds = {key: k for k, key in enumerate(sorted(set(keys), key=lambda key: (len(key), key)))}
        first = np.r_[0, np.cumsum([len(key) for key in kinds])].astype(np.int64)
        row = [first[kinds[key]] + np.searchsorted(key, numbers) for key, numbers in zip(keys, of_replica, strict=True)]
        values = [tuple(column) for column in different.tolist()]
        members = tuple(tuple(values[number] for number in key) for key in kinds)
        return cls(members, first[:-1], np.concatenate(row).astype(np.int64))


@dataclass(frozen=True, eq=False, repr=False)
class Folded:
    """A simulated step of every GPU of a mesh.

    Ranks are numbered `(pp * dp + d) * ep + e`, as in the unfolded Program. `ends[rank]` is when a rank's last op ends,
    in ticks of `clock`.

    Example:
        >>> schedule, unit = treadle.generate("1f1b", pp=2, microbatches=4), treadle.load_costs("unit")
        >>> options = treadle.LoweringOptions(layers=1, ep=2, dp=64, moe=True)
        >>> folded = fold(treadle.lower(schedule, unit, options), unit, ep=2, dp=64)
        >>> len(folded.ends), folded.clock.show(folded.makespan), folded.num_kinds
        (256, 14, 1)

    """

    replicas: Replicas
    mesh: MeshSize
    kinds: ReplicaKinds
    ready: Longs
    tail: TailTimes
    ends: Longs
    about: str

    @property
    def pipeline(self) -> Program:
        """The Program of one pipeline."""
        return self.replicas.program

    @property
    def clock(self) -> Clock:
        """The clock of all times."""
        return self.replicas.costs.clock

    @property
    def num_ranks(self) -> int:
        """GPUs of the mesh."""
        return self.pipeline.num_ranks * self.mesh.num_columns

    @property
    def num_ops(self) -> int:
        """Ops of all GPUs, most of them folded away."""
        return self.pipeline.num_ops * self.mesh.num_columns

    @property
    def num_kinds(self) -> int:
        """Different replicas, which were simulated; where columns do not meet, different columns."""
        return len(self.kinds.members)

    @property
    def makespan(self) -> int:
        """Ticks from the first start to the last end."""
        return int(self.ends.max(initial=0))

    def __repr__(self) -> str:
        """Return the size, the makespan and what was folded."""
        unit = "" if self.clock.unit == "unit" else f" {self.clock.unit}"
        makespan = f"{self.clock.show(self.makespan):.6g}{unit}"
        return f"<Folded: {self.num_ranks} ranks, {self.num_ops} ops, makespan {makespan}; {self.about}>"

    def trace(self, kind: int) -> Trace:
        """Simulate a kind of replica again and return its Trace, with the times that it has in the whole mesh.

        Its ranks are those of a mesh with one column of each kind: `pp * columns + column`.
        """
        members, first = self.kinds.members[kind], int(self.kinds.first[kind])
        program, times = self.replicas.execute(members)
        rows, ops = slice(first, first + len(members)), self.replicas.tail.ops
        for column, known in ((times.start, self.tail.start), (times.end, self.tail.end)):
            column.reshape(len(members), -1)[:, ops] = known[rows]
        return Trace(program, times.start, times.end, self.clock, self.about)


def fold(program: Program, costs: Costs, *, ep: int, dp: int, slowness: Factors | None = None) -> Folded:
    """Simulate `ep * dp` copies of a pipeline, folded.

    Args:
        program: one pipeline, lowered without `every_gpu`.
        costs: how long ops take.
        ep: columns of an expert group, which meet in every MoE layer.
        dp: expert groups.
        slowness: by which factor each rank of the mesh is slower; None for 1.

    Returns:
        The end of every rank, equal to that of the unfolded Program to the tick.

    Raises:
        ValueError: an op in the middle of the step waits for a reduction over all replicas, the program does not
            finish, or factors are not one for each rank.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=4), unit)
        >>> fold(program, unit, ep=1, dp=3, slowness=np.array([1, 1, 1, 2, 1, 1.0])).ends // unit.clock.ticks
        array([27, 15, 15, 25, 13, 13])

    """
    mesh, replicas = MeshSize(ep, dp), Replicas(program, costs)
    kinds = ReplicaKinds.of(columns_of(program, mesh, slowness), together=ep if replicas.meets else 1)
    body = together([replicas.body(members) for members in kinds.members])
    tail = replicas.tail.run(body.ready, factors_of(kinds.members))
    ends = replicas.tail.ends(body.done, tail)
    slow = 0 if slowness is None else np.count_nonzero(slowness != 1.0)
    slower = f", {slow} of {mesh.num_columns * program.num_ranks} ranks slower" if slow else ""
    about = f"predicted with costs {costs.name!r}{slower}, folded: {_counted(replicas, kinds, mesh)}"
    return Folded(replicas, mesh, kinds, body.ready, tail, ends.T[:, kinds.row].reshape(-1), about)


def num_simulated(program: Program, *, ep: int, dp: int, slowness: Factors | None = None) -> int:
    """Return how many of the `ep * dp` columns `fold` simulates: those that differ."""
    meets = bool((program.lane_kind == LaneKind.EP).any())
    columns = columns_of(program, MeshSize(ep, dp), slowness)
    return ReplicaKinds.of(columns, together=ep if meets else 1).num_rows


def columns_of(program: Program, mesh: MeshSize, slowness: Factors | None) -> Factors:
    """Return the factors of each column: `[d * ep + e, pipeline rank]`."""
    shape = (mesh.num_columns, program.num_ranks)
    if slowness is None:
        return np.ones(shape)
    factor = checked_factors(slowness, shape[0] * shape[1])
    return np.ascontiguousarray(factor.reshape(shape[::-1]).T)


def _counted(replicas: Replicas, kinds: ReplicaKinds, mesh: MeshSize) -> str:
    what, total = ("replicas", mesh.dp) if replicas.meets else ("pipelines", mesh.num_columns)
    return f"{len(kinds.members)} different of {total} {what}"
