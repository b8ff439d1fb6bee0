"""Schedules that repeat a building block (arXiv 2405.15362): two chunks in a V, backward split, memory as low as asked.

A building block says when a micro-batch is where. It goes down the ranks and back up twice, first with F, then with I:

    rank 0  F.0                 F.1 I.1                 I.0
    rank 1      F.0         F.1         I.1         I.0
    rank 2          F.0 F.1                 I.1 I.0

The next micro-batch does the same six ticks later, because a rank has six passes to do for each: F, I and W of two
chunks. The time that a micro-batch takes decides how many are under way at once: the memory. On a rank F and I keep the
order that the repeated blocks give them, and W stands where the blocks leave a tick free. Then time is squeezed: every
pass takes one tick and starts as soon as it can. W comes sooner where the rank would wait. Once a rank has started its
last micro-batch, W comes only there, so that it holds up no I.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from treadle.ir import Action, Cell, Kind
from treadle.schedules.family import Size

INTERVAL = 6
"""Ticks from a micro-batch to the next: the passes of a rank for each of them."""

PASSES = ((Kind.F, 0), (Kind.F, 1), (Kind.I, 1), (Kind.I, 0), (Kind.W, 1), (Kind.W, 0))
"""What a rank does for a micro-batch, and in which chunk. The first four are in the order of the way."""

_F, _WGRAD = (0, 1), {2: 4, 3: 5}


class BuildingBlock(NamedTuple):
    """Ticks from pass to pass on a micro-batch's way.

    `hops` are from a rank to the next: down with F, up with F, down with I, up with I. `turns` are between two passes
    on one rank: from F to F on the last rank, from F to I on the first, from I to I on the last.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def starts(self, pp: int) -> list[int]:
        """Return the tick of each of the 4P places on the way."""
        arms = [[hop] * (pp - 1) for hop in self.hops]
        turns = [[0], *([turn] for turn in self.turns)]
        return list(accumulate(chain.from_iterable(turn + arm for turn, arm in zip(turns, arms, strict=True))))


def row(block: BuildingBlock, most_held: int, size: Size, rank: int) -> Iterator[Cell]:
    """Yield the cells of a rank that holds at most `most_held` activations of a chunk."""
    seen = [0] * len(PASSES)
    for which in _orders(block, most_held, size)[rank]:
        kind, chunk = PASSES[which]
        yield Action(kind, seen[which], chunk)
        seen[which] += 1


@lru_cache(maxsize=4)
def _orders(block: BuildingBlock, most_held: int, size: Size) -> tuple[bytes, ...]:
    """Return for each rank its passes in order, as places in PASSES: W needs the times of all ranks."""
    starts = block.starts(size.pp)
    ends: list[list[int]] = [[] for _ in starts]
    ranks = [_BlockRank(rank, starts, ends, most_held, size) for rank in range(size.pp)]
    while not all(rank.finished for rank in ranks):
        for rank in chain(ranks, reversed(ranks)):
            rank.run()
    return tuple(bytes(rank.done) for rank in ranks)


def _repeated(starts: list[int], places: tuple[int, ...], num_mb: int) -> Iterator[tuple[int, int]]:
    """Yield a rank's F and I in the order of the blocks, each with the number of W that fit in free ticks before it."""
    ticks = sorted((starts[place] + INTERVAL * mb, which) for which, place in enumerate(places) for mb in range(num_mb))
    made = fitted = free = 0
    for tick, which in ticks:
        fitted += min(tick - free, made - fitted)
        yield which, fitted
        made += which not in _F
        free = tick + 1


class _BlockRank:
    """A rank that runs its F and I in the order of the blocks. `ends[place]` are the ticks when passes ended there."""

    def __init__(self, rank: int, starts: list[int], ends: list[list[int]], most_held: int, size: Size) -> None:
        pp, self.ends, self.most_held = size.pp, ends, most_held
        self.places = (rank, 2 * pp - 1 - rank, 2 * pp + rank, 4 * pp - 1 - rank)
        repeated = list(_repeated(starts, self.places, size.microbatches))
        self.order = bytes(which for which, _ in repeated)
        self.due = [fitted for _, fitted in repeated[: self.order.rindex(0) + 1]]
        self.next, self.tick, self.held, self.num_wgrad = 0, 0, 0, 0
        self.pending: deque[int] = deque()
        self.done = bytearray()

    @property
    def finished(self) -> bool:
        return self.next == len(self.order)

    def run(self) -> None:
        """Run until it is not yet known when the next pass gets what it needs."""
        while not self.finished:
            which = self.order[self.next]
            ready = self.ready(self.places[which])
            if ready is None:
                return
            while self.pending and (self.tick < ready or self.is_wgrad_due(which)):
                self.wgrad()
            self.tick = max(self.tick, ready) + 1
            self.ends[self.places[which]].append(self.tick)
            self.done.append(which)
            self.next += 1
            if which in _F:
                self.held += 1
                assert self.held <= self.most_held, "the building block holds more than it is allowed"
            else:
                self.pending.append(_WGRAD[which])
        while self.pending:
            self.wgrad()

    def ready(self, place: int) -> int | None:
        """Return when the next micro-batch has left the place before this one."""
        if place == 0:
            return 0
        before, mb = self.ends[place - 1], len(self.ends[place])
        return before[mb] if mb < len(before) else None

    def is_wgrad_due(self, which: int) -> bool:
        """Say whether the blocks have one more W before this pass, or this one is an F without memory."""
        behind = self.next < len(self.due) and self.num_wgrad < self.due[self.next]
        return behind or (which in _F and self.held == self.most_held)

    def wgrad(self) -> None:
        self.done.append(self.pending.popleft())
        self.held -= 1
        self.tick += 1
        self.num_wgrad += 1
