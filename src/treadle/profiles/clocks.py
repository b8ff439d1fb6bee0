"""The clocks of ranks, put together by what cannot have happened otherwise.

A receive does not end before its send has started, and a stage does not start before the stage before it has ended.
Each such pair says how far apart two clocks are at least; pairs in both directions leave an interval, and its middle
is taken. The width of the interval is what nobody can know from these times.

    rank 0   send |----|                     on its clock        offset of rank 1  >=  send's start - receive's end
    rank 1                recv |--------|    on its own

All bounds together are a system of differences, solved by longest paths, so that no order is violated where there is a
solution. One offset a rank is sought for the whole recording; where there is none (clocks drift, or start anew with
each step), one for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle.ir.columns import Waits
from treadle.ir.crossings import crossings
from treadle.ir.program import Bools, Ints, Longs, Program
from treadle.profiles.recording import Remark

_NONE = np.iinfo(np.int64).min // 4
"""No bound: sums of two of them do not overflow."""
_TRIMMED = 0.05
"""Of contradicting bounds of two ranks, the share that is taken for wrong."""
_SYNCHRONISED_NS = 500_000
"""What a trainer that put its ranks on one clock itself left: moving them by so little explains nothing."""
_LISTED = 4
UNBOUNDED = -1
"""The uncertainty of a clock that messages bound from one side only."""


class Order(NamedTuple):
    """Columns: in a step, one rank did something at `first_time[i]` before another did something at `then_time[i]`.

    Times are nanoseconds, each of its own rank's clock; `first` and `then` are the ranks.
    """

    step: Ints
    first: Ints
    first_time: Longs
    then: Ints
    then_time: Longs

    def of(self, rows: Bools | Longs) -> Order:
        """Return some of the rows."""
        return Order(self.step[rows], self.first[rows], self.first_time[rows], self.then[rows], self.then_time[rows])


@dataclass(frozen=True, eq=False)
class Aligned:
    """`offset[step, rank]` is to be added to a rank's times; `uncertainty[rank]` is how far it may be off.

    It is UNBOUNDED where messages go in one direction only: the least offset they allow is taken then. `apart` are the
    groups of ranks whose clocks no message links with that of the first rank.
    """

    offset: Longs
    uncertainty: Longs
    apart: tuple[Ints, ...]
    remarks: tuple[Remark, ...]


def order_of(program: Program, start: Longs, end: Longs, known: Bools, *, waits_inside: bool = False) -> Order:
    """Find what happened before what in measured steps.

    Args:
        program: of one step.
        start: `[step, op]`, each op on the clock of its rank.
        end: likewise.
        known: `[op]`, has the op been measured. Messages are used where both ends have, else their maker and reader.
        waits_inside: a reader's time includes its wait for the message, as where a receive is only posted. Messages
            show nothing then, and a reader has its input by its end, less the shortest time of its like.

    """
    rank_of = program.lane_rank[program.lane_of]
    found = crossings(program)
    carried = known[found.send] & known[found.recv] & (not waits_inside)
    made = ~carried & known[found.maker] & known[found.reader]
    read_at = end - _least(program, rank_of, end - start) if waits_inside else start
    together = _together(program, known)
    parts = (
        (found.send[carried], start, found.recv[carried], end),
        (found.maker[made], end, found.reader[made], read_at),
        (together.ptr, start, together.dep, end),
    )
    columns = [_rows(rank_of, *part) for part in parts]
    return Order(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _least(program: Program, rank_of: Ints, took: Longs) -> Longs:
    """`[op]`: the shortest time that its rank took for an op of its kind and chunk, which waited the least."""
    label = (rank_of.astype(np.int64) * 256 + program.kind) * (1 + int(program.chunk.max(initial=0))) + program.chunk
    _, like = np.unique(label, return_inverse=True)
    least = np.full(int(like.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, like, took.min(axis=0))
    return least[like]


def _rows(rank_of: Ints, first: Longs | Ints, first_at: Longs, then: Longs | Ints, then_at: Longs) -> Order:
    num_steps = len(first_at)
    step = np.repeat(np.arange(num_steps, dtype=np.int32), len(first))
    ranks = (np.tile(rank_of[first], num_steps), np.tile(rank_of[then], num_steps))
    return Order(step, ranks[0], first_at[:, first].ravel(), ranks[1], then_at[:, then].ravel())


def _together(program: Program, known: Bools) -> Waits:
    """Pairs of ops of one collective, each member with the next, both ways: all start before any ends."""
    first, then = [], []
    ptr, lanes = program.groups
    for group in range(len(ptr) - 1):
        members = lanes[ptr[group] : ptr[group + 1]]
        sizes = program.lane_ptr[members + 1] - program.lane_ptr[members]
        if len(members) < 2 or (program.lane_kind[members] != program.lane_kind[members[0]]).any() or not sizes.min():
            continue
        ops = program.lane_ptr[members][:, None] + np.arange(sizes.min())
        one, two = ops.ravel(), np.roll(ops, -1, axis=0).ravel()
        both = known[one] & known[two]
        first += [one[both], two[both]]
        then += [two[both], one[both]]
    empty = np.empty(0, np.int64)
    return Waits(np.concatenate(first or [empty]), np.concatenate(then or [empty]).astype(np.int32))


def align(order: Order, clocks: Sequence[str], num_steps: int) -> Aligned:
    """Find what to add to each rank's times so that nothing is read before it was made.

    Ranks whose clocks have the same name and contradict each other by no more than a synchronised clock is off are left
    as they are.

    Args:
        order: what happened before what.
        clocks: the name of each rank's clock.
        num_steps: steps of the recording.

    Returns:
        Offsets to the first rank of those that messages link. Remarks say which clocks were moved, which ranks no
        message links, and where the times contradict each other.

    """
    num_ranks = len(clocks)
    offset, uncertainty = np.zeros((num_steps, num_ranks), np.int64), np.zeros(num_ranks, np.int64)
    remarks: list[Remark] = []
    linked = _linked(order, num_ranks)
    for ranks in linked:
        here = order.of(np.isin(order.first, ranks))
        late = here.first_time - here.then_time
        agree = len({clocks[rank] for rank in ranks}) == 1 and late.max(initial=0) <= _SYNCHRONISED_NS
        if len(ranks) > 1 and not agree:
            offset[:, ranks], uncertainty[ranks], said = _align_linked(here, ranks, num_steps)
            remarks += said
    apart = tuple(ranks for ranks in linked[1:] if {clocks[r] for r in ranks} != {clocks[r] for r in linked[0]})
    if apart:
        listed = _listed([int(rank) for ranks in apart for rank in ranks])
        said_apart = f"no message links rank {linked[0][0]} with rank {listed}"
        remarks.append(Remark(f"{said_apart}: each step is taken to begin on them together"))
    moved = _told(offset, uncertainty)
    return Aligned(offset, uncertainty, apart, (*((moved,) if moved else ()), *remarks))


def _align_linked(order: Order, ranks: Ints, num_steps: int) -> tuple[Longs, Longs, list[Remark]]:
    """Offsets and uncertainties of ranks that messages link."""
    zero = np.full(len(ranks), np.iinfo(np.int64).max)  # clocks may begin decades apart: count from their first times
    for rank, time in ((order.first, order.first_time), (order.then, order.then_time)):
        np.minimum.at(zero, np.searchsorted(ranks, rank), time)
    near = order._replace(
        first_time=order.first_time - zero[np.searchsorted(ranks, order.first)],
        then_time=order.then_time - zero[np.searchsorted(ranks, order.then)],
    )
    offset, remarks = np.empty((num_steps, len(ranks)), np.int64), []
    closed = _closed(_bounds(near, ranks))
    if closed is not None:
        offset[:], uncertainty = _middle(closed)
    else:
        remarks.append(
            Remark(
                f"no one offset of the clocks of ranks {_listed(ranks.tolist())} fits all steps: "
                "they were put together step by step"
            )
        )
        offset[:], uncertainty = 0, np.zeros(len(ranks), np.int64)
        worst, num_unused = 0, 0
        for step in np.unique(near.step):
            found = _of_step(near.of(near.step == step), ranks)
            worst, num_unused = max(worst, found.slack), num_unused + found.num_unused
            offset[step], widest = _middle(found.closed)
            uncertainty = np.where((widest < 0) | (uncertainty < 0), UNBOUNDED, np.maximum(widest, uncertainty))
        if num_unused:
            remarks.append(Remark("messages contradict the others about the clocks, and were not used", "", num_unused))
        if worst:
            remarks.append(Remark(f"times contradict each other by up to {_shown(worst)} on any clock"))
    return offset + (zero[0] - zero), uncertainty, remarks


class _OfStep(NamedTuple):
    """The bounds of a step, closed; how many were not used, and by how much the rest was weakened."""

    closed: Longs
    num_unused: int = 0
    slack: int = 0


def _of_step(order: Order, ranks: Ints) -> _OfStep:
    """The bounds of one step, without those that contradict most, or weakened until they do not contradict."""
    closed = _closed(_bounds(order, ranks))
    if closed is not None:
        return _OfStep(closed)
    trimmed = _without_outliers(order)
    closed = _closed(_bounds(trimmed, ranks))
    if closed is not None:
        return _OfStep(closed, num_unused=len(order.step) - len(trimmed.step))
    bounds = _bounds(order, ranks)
    least, most = 0, int(bounds.max() - bounds[bounds > _NONE // 2].min()) + 1
    while most - least > 1:
        slack = (least + most) // 2
        least, most = (slack, most) if _closed(_weaker(bounds, slack)) is None else (least, slack)
    closed = _closed(_weaker(bounds, most))
    assert closed is not None, "any bounds hold once they are weak enough"
    return _OfStep(closed, slack=most)


def _weaker(bounds: Longs, slack: int) -> Longs:
    return np.where(bounds > _NONE // 2, bounds - slack, bounds)


def _bounds(order: Order, ranks: Ints) -> Longs:
    """`[a, b]`: what the offset of b is more than that of a, at least."""
    place = np.searchsorted(ranks, np.stack([order.first, order.then]))
    bounds = np.full((len(ranks), len(ranks)), _NONE, np.int64)
    np.maximum.at(bounds, (place[0], place[1]), order.first_time - order.then_time)
    np.fill_diagonal(bounds, 0)
    return bounds


def _without_outliers(order: Order) -> Order:
    """Leave out the strongest few bounds of each ordered pair of ranks that has enough of them."""
    bound = order.first_time - order.then_time
    by_pair = np.lexsort((-bound, order.then, order.first))
    pair = np.stack([order.first, order.then])[:, by_pair]
    opens = np.r_[True, (pair[:, 1:] != pair[:, :-1]).any(axis=0)]
    begin = np.flatnonzero(opens)
    size = np.diff(np.r_[begin, len(by_pair)])
    rank_in_pair = np.arange(len(by_pair)) - np.repeat(begin, size)
    kept = by_pair[rank_in_pair >= np.repeat(np.where(size >= 4, np.ceil(size * _TRIMMED), 0), size)]
    return order.of(kept)


def _closed(bounds: Longs) -> Longs | None:
    """All bounds that follow from these (longest paths), or None where they contradict each other."""
    closed = bounds.copy()
    for via in range(len(closed)):
        np.maximum(closed, np.maximum(closed[:, via, None] + closed[None, via, :], _NONE), out=closed)
    return None if (np.diagonal(closed) > 0).any() else closed


def _middle(closed: Longs) -> tuple[Longs, Longs]:
    """Offsets within closed bounds, each in the middle of what those before it leave, and half of its interval."""
    offset, half = np.zeros(len(closed), np.int64), np.zeros(len(closed), np.int64)
    for rank in range(1, len(closed)):
        low = int((offset[:rank] + closed[:rank, rank]).max())
        high = int((offset[:rank] - closed[rank, :rank]).min())
        if low > _NONE // 2 and high < -_NONE // 2:
            offset[rank] = (low + high) // 2
            half[rank] = (-closed[rank, 0] - closed[0, rank]) // 2
        else:  # messages in one direction only: as near as they allow
            offset[rank] = low if low > _NONE // 2 else high
            half[rank] = UNBOUNDED
    return offset, half


def _linked(order: Order, num_ranks: int) -> list[Ints]:
    """The ranks in groups that messages link, in order of their first ranks."""
    label = np.arange(num_ranks, dtype=np.int32)
    pairs = np.unique(np.stack([order.first, order.then]), axis=1)
    while True:
        least = label.copy()
        np.minimum.at(least, pairs[0], label[pairs[1]])
        np.minimum.at(least, pairs[1], label[pairs[0]])
        least = least[least]
        if (least == label).all():
            return [np.flatnonzero(label == each).astype(np.int32) for each in np.unique(label)]
        label = least


def _told(offset: Longs, uncertainty: Longs) -> Remark | None:
    """Name the clocks that were moved by more than is not known about them."""
    largest = offset[np.abs(offset).argmax(axis=0), np.arange(offset.shape[1])]
    moved = np.flatnonzero(np.abs(largest) > np.maximum(uncertainty, 0))
    if not len(moved):
        return None
    first = moved[np.argsort(-np.abs(largest[moved]), kind="stable")]
    said = [
        f"rank {rank} by {'+' if largest[rank] > 0 else '-'}{_shown(abs(int(largest[rank])))} "
        + (f"(known to {_shown(int(uncertainty[rank]))})" if uncertainty[rank] >= 0 else "(at least)")
        for rank in first[:_LISTED]
    ]
    more = f" and {len(moved) - _LISTED} more" if len(moved) > _LISTED else ""
    return Remark(f"clocks were moved to agree with the messages: {', '.join(said)}{more}")


def _shown(nanoseconds: int) -> str:
    for unit, scale in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= scale:
            return f"{nanoseconds / scale:.3f} {unit}"
    return f"{nanoseconds} ns"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= _LISTED:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:_LISTED]))} and {len(ranks) - _LISTED} more"
