"""ZB-V: two chunks in a V, backward split; no bubble where F, I and W take the same time.

    rank 0  F0.0 F1.0 F2.0      F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3.0 I0.0 W0.0 ...      P = 2
    rank 1       F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 F2.0 I0.0 W0.0 ...

Rank r holds stage r and stage 2P-1-r, so the first rank computes both the input and the loss, and every
rank's memory is that of 1F1B's first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from treadle.ir import Cell, F, I, Placement, W
from treadle.schedules.family import Family, Size


def refuse(size: Size) -> str | None:
    """The warm-up alone takes 2P-1 forwards on rank 0."""
    if size.microbatches < 2 * size.pp - 1:
        return f"fills its pipe with 2P-1 = {2 * size.pp - 1} micro-batches"
    return None


class _ZbvRank:
    """Counts what each chunk has done; each step yields the next of its kind."""

    def __init__(self, num_mb: int) -> None:
        self.num_mb = num_mb
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.pending: tuple[deque[int], deque[int]] = (deque(), deque())

    def forward(self, chunk: int) -> Iterator[Cell]:
        if self.forwards[chunk] < self.num_mb:
            yield F(self.forwards[chunk], chunk)
            self.forwards[chunk] += 1

    def dgrad(self, chunk: int) -> Iterator[Cell]:
        yield I(self.backwards[chunk], chunk)
        self.pending[chunk].append(self.backwards[chunk])
        self.backwards[chunk] += 1

    def wgrad(self, chunk: int) -> Iterator[Cell]:
        yield W(self.pending[chunk].popleft(), chunk)

    def one_of_each(self, chunk: int) -> Iterator[Cell]:
        """Dgrad of `chunk`, then its wgrad."""
        yield from self.dgrad(chunk)
        yield from self.wgrad(chunk)


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Yield the cells of a rank in seven phases."""
    after = size.pp - rank
    state = _ZbvRank(size.microbatches)
    # 1. F of chunk 0: down the V
    for _ in range(2 * after - 1):
        yield from state.forward(0)
    # 2. (F F) of chunks 1 and 0: along both arms
    for _ in range(rank):
        yield from state.forward(1)
        yield from state.forward(0)
    # 3. (F I W) of chunk 1: the turn, the first gradients come back
    for _ in range(after):
        yield from state.forward(1)
        yield from state.one_of_each(1)
    # 4. (F I W F I W) of chunks 0 and 1: steady; without F of chunk 0 once it has none left
    while state.forwards[1] < size.microbatches:
        yield from state.forward(0)
        yield from state.one_of_each(0)
        yield from state.forward(1)
        yield from state.one_of_each(1)
    # 5. (I I) of chunks 0 and 1: back along both arms, wgrad held back
    for _ in range(rank):
        yield from state.dgrad(0)
        yield from state.dgrad(1)
    # 6. (I W) of chunk 0: up the V
    for _ in range(after):
        yield from state.one_of_each(0)
    # 7. W of chunk 1, then of chunk 0: the wgrad left over
    for chunk in (1, 0):
        while state.pending[chunk]:
            yield from state.wgrad(chunk)


FAMILY = Family(
    name="zb-v",
    summary="two chunks in a V, weight gradients split off",
    source="Zero Bubble (arXiv 2401.10241), section 6",
    placement=Placement.v,
    row=row,
    refuse=refuse,
    vpps=(2,),
    demands="any P, V=2, M >= 2P-1",
    bubble="(P-1)F/V where F=I=W; 0 from step to step without a flush",
    memory="P micro-batches",
    trainers=("torch (ScheduleZBVZeroBubble)",),
)
