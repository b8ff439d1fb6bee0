"""What a file leaves out is filled in: the step of each mark, its chunk, and its micro-batch where none is named.

step           where none is named: the k-th time that a label comes is step k; one that had begun before is 0
chunk          the place of its stage among those of its rank; 0 where a rank has one
micro-batch    where none is named: the order of marks is that of a schedule at this size, which says
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treadle.ir import Placement
from treadle.ir.ops import ACTIONS, OpKind
from treadle.ir.program import Bools, Ints, Longs
from treadle.profiles.mesh_places import RankGrid
from treadle.profiles.naming import actions_of, candidates
from treadle.profiles.recording import UNKNOWN, RankRecording, Recording

_LETTERS = np.array(["F", "B", "I", "W"])


@dataclass(frozen=True)
class PipelineSize:
    """The size of a run's pipeline, as the marks show it."""

    placement: Placement
    num_mb: int
    dp: int


def is_compute(rank: RankRecording) -> Bools:
    """`[mark]`: is it an action of a schedule."""
    chosen: Bools = np.isin(rank.kind, ACTIONS)
    return chosen


def fill(recording: Recording, grid: RankGrid) -> tuple[PipelineSize, RankGrid]:
    """Return the size of the pipeline, and the ranks with step, chunk and micro-batch of every mark filled in.

    Raises:
        ValueError: ranks contradict each other, or micro-batches are not named and no schedule determines them.

    """
    placement = _placement(recording, grid)
    grid = tuple(tuple(_with_chunks(rank, placement, p) for rank in row) for p, row in enumerate(grid))
    named = all((rank.mb[is_compute(rank)] != UNKNOWN).all() for row in grid for rank in row)
    num_mb = _num_mb(recording, grid, placement, named)
    begun = named and any(_num_begun(rank) for row in grid for rank in row)
    grid = tuple(tuple(_with_steps(rank, num_mb, placement.vpp, begun=begun) for rank in row) for row in grid)
    size = PipelineSize(placement, num_mb, len(grid[0]))
    return size, grid if named else _with_microbatches(grid, size)


def _placement(recording: Recording, grid: RankGrid) -> Placement:
    """The stages of each rank of the pipeline: as they are named, or one row of ranks after the other."""
    tables = []
    for row in grid:
        for rank in row:
            stages = rank.stage[is_compute(rank)]
            tables.append(tuple(np.unique(stages).tolist()) if (stages != UNKNOWN).all() else ())
    pp, dp = len(grid), len(grid[0])
    if all(tables):
        by_place = [set(tables[p * dp : (p + 1) * dp]) for p in range(pp)]
        for p, found in enumerate(by_place):
            if len(found) > 1:
                raise ValueError(f"replicas of rank {p} of the pipeline have different stages: {sorted(found)}")
        return Placement.table(tuple(next(iter(found)) for found in by_place))
    most = max(int(rank.chunk[is_compute(rank)].max(initial=0)) for row in grid for rank in row)
    return Placement.loop(pp, recording.vpp if recording.vpp is not None else 1 + max(0, most))


def _with_chunks(rank: RankRecording, placement: Placement, p: int) -> RankRecording:
    """Chunks of marks that have a stage or, where a rank has one chunk, of all."""
    if placement.vpp == 1:
        return replace(rank, chunk=np.zeros_like(rank.chunk))
    place = np.full(placement.num_stages + 1, UNKNOWN, np.int16)  # the last entry is for marks without a stage
    place[list(placement.stages[p])] = np.arange(placement.vpp)
    return replace(rank, chunk=np.where(rank.stage != UNKNOWN, place[rank.stage], rank.chunk).astype(np.int16))


def _num_mb(recording: Recording, grid: RankGrid, placement: Placement, named: bool) -> int:
    if recording.num_mb is not None:
        return recording.num_mb
    if named:
        return 1 + max(int(rank.mb[is_compute(rank)].max()) for row in grid for rank in row)
    first = grid[0][0]
    forwards = first.kind == OpKind.F
    if (first.step == UNKNOWN).any():
        raise ValueError(
            f"{first.source}: neither steps nor micro-batches are named, so their number is unknown; give "
            "`microbatches`, how many a step has"
        )
    counts = Counter(first.step[forwards].tolist()).values()
    return max(counts) // placement.vpp


def _with_steps(rank: RankRecording, num_mb: int, vpp: int, *, begun: bool) -> RankRecording:
    """The k-th time that a label comes is step k; where micro-batches are not named, so many of a kind make a step.

    A step that had `begun` before the recording is step 0; the next is 1 on every rank.
    """
    unknown = rank.step == UNKNOWN
    if not unknown.any():
        return rank
    first = _num_begun(rank) if begun else 0
    key = rank.kind.astype(np.int64) * 1000 + rank.chunk + 1
    key = key * 100_000 + rank.layer + 1
    each = np.where(rank.mb == UNKNOWN, num_mb * (vpp if (rank.chunk == UNKNOWN).any() else 1), 1)
    count = np.zeros(len(rank), np.int64)
    count[first:] = occurrences(key[first:] * 10_000_000 + rank.mb[first:] + 1) // each[first:] + begun
    return replace(rank, step=np.where(unknown, count, rank.step).astype(np.int32))


def _num_begun(rank: RankRecording) -> int:
    """How many marks are of a step that began before the recording did: those before the first forward of the first."""
    computed = is_compute(rank)
    if (rank.step[computed] != UNKNOWN).all():
        return 0
    labels = np.stack([rank.kind, rank.mb, rank.chunk])[:, computed]
    _, times = np.unique(labels, axis=1, return_counts=True)
    opens = np.flatnonzero((rank.kind == OpKind.F) & (rank.mb == 0) & (rank.chunk == 0))
    return int(opens[0]) if len(set(times.tolist())) > 1 and len(opens) else 0


def occurrences(key: Longs) -> Longs:
    """Count for each entry the equal ones before it."""
    order = np.argsort(key, kind="stable")
    at = np.arange(len(key))
    opens = np.r_[True, np.diff(key[order]) != 0][: len(key)]
    count = np.empty(len(key), np.int64)
    count[order] = at - np.maximum.accumulate(np.where(opens, at, 0)) if len(key) else 0
    return count


def _with_microbatches(grid: RankGrid, size: PipelineSize) -> RankGrid:
    """Take micro-batches and chunks from the schedule whose kinds of actions come in the same order."""
    orders = [_usual_order(row) for row in grid]
    nearest = []
    for schedule in candidates(size.placement.pp, size.placement.vpp, size.num_mb):
        if schedule.placement.num_pipes > 1 or schedule.placement.pp != size.placement.pp:
            continue
        rows = [actions_of(row) for row in schedule.rows]
        texts = ["".join(action.kind.name for action in row) for row in rows]
        differs = [p for p, (mine, text) in enumerate(zip(orders, texts, strict=True)) if mine != text]
        if not differs:
            labels = [np.array([(a.mb, a.chunk) for a in row], np.int32) for row in rows]
            return tuple(tuple(_labelled(rank, labels[p]) for rank in row) for p, row in enumerate(grid))
        nearest.append(_difference(schedule.name, orders[differs[0]], texts[differs[0]], differs[0]))
    if size.placement.vpp == 1:
        return tuple(tuple(_by_count(rank) for rank in row) for row in grid)
    listed = "; ".join(nearest[:2])
    raise ValueError(
        f"micro-batches and chunks are not named, and the order of forwards and backwards is that of no schedule here "
        f"with {size.placement.vpp} chunks and {size.num_mb} micro-batches ({listed}); name them, or give "
        "`microbatches`"
    )


def _usual_order(row: Sequence[RankRecording]) -> str:
    """The letters of a rank's actions in a step, as most steps of its replicas have them."""
    orders: Counter[str] = Counter()
    for rank in row:
        compute = is_compute(rank)
        for step in np.unique(rank.step[compute]):
            orders["".join(_LETTERS[rank.kind[compute & (rank.step == step)]])] += 1
    return orders.most_common(1)[0][0]


def _labelled(rank: RankRecording, labels: Ints) -> RankRecording:
    mb, chunk = rank.mb.copy(), rank.chunk.copy()
    compute = is_compute(rank)
    for step in np.unique(rank.step[compute]):
        here = np.flatnonzero(compute & (rank.step == step))
        if len(here) == len(labels):
            mb[here], chunk[here] = labels[:, 0], labels[:, 1]
    return replace(rank, mb=mb, chunk=chunk)


def _by_count(rank: RankRecording) -> RankRecording:
    """One chunk: the k-th of a kind in a step is micro-batch k."""
    mb = rank.mb.copy()
    compute = np.flatnonzero(is_compute(rank))
    mb[compute] = occurrences(rank.step[compute].astype(np.int64) * 100 + rank.kind[compute])
    return replace(rank, mb=mb)


def _difference(name: str, mine: str, theirs: str, rank: int) -> str:
    at = next((k for k, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"rank {rank} has {len(mine)} actions, {name} {len(theirs)}"
    return f"action {at} of rank {rank} is {mine[at]}, in {name} {theirs[at]}"
