"""DualPipe: two pipes over the same ranks, one from each end; forward of one with backward of the other.

    rank 0  F0.0 F1.0 F2.0 ...      F0.1 I0.1 W0.1 ... (F7.0|B3.1) (F4.1|B0.0) ...
      ...
    rank 7  F0.1 F1.1 F2.1 ...      F0.0 I0.0 W0.0 ... (F7.1|B3.0) (F4.0|B0.1) ...

The chunk is the direction; micro-batches are numbered in each. Every parameter lives on two ranks, r and
P-1-r, whose gradients are summed before the optimizer's step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from treadle.ir import Action, B, Cell, F, I, Placement, W
from treadle.schedules.family import Family, Size


class _DualPipeRank:
    """The two directions seen from a rank: `near` enters the pipe nearer to it than `far` does."""

    def __init__(self, near: int, far: int) -> None:
        self.near, self.far = near, far
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._weights: deque[Action] = deque()

    def forward(self, direction: int) -> Action:
        mb = self._forwards[direction]
        self._forwards[direction] += 1
        return F(mb, direction)

    def backward(self, direction: int) -> Action:
        mb = self._backwards[direction]
        self._backwards[direction] += 1
        return B(mb, direction)

    def dgrad(self, direction: int) -> Action:
        """Dgrad of the next backward; its wgrad waits in the queue."""
        mb = self.backward(direction).mb
        self._weights.append(W(mb, direction))
        return I(mb, direction)

    def wgrad(self) -> Action:
        return self._weights.popleft()


def phases(ahead: int, behind: int, num_steady: int, *, near: int, far: int) -> Iterator[Cell]:
    """DualPipe's eight phases on a rank with `ahead` ranks between it and its near end, `behind` to the middle."""
    rank = _DualPipeRank(near, far)
    # 1. F of the near direction: fill the pipe up to the middle
    for _ in range(2 * behind):
        yield rank.forward(near)
    # 2. (F F) of both directions: until the far direction's first backward can come
    for _ in range(ahead + 1):
        yield rank.forward(near)
        yield rank.forward(far)
    # 3. (I W F) of the far direction: wgrad fills the wait
    for _ in range(behind):
        yield rank.dgrad(far)
        yield rank.wgrad()
        yield rank.forward(far)
    # 4. (F|B F|B) steady: near forward with far backward, then far forward with near backward
    for step in range(num_steady):
        if step == 0 and behind == 0:  # in the middle the first pair's halves would wait for each other
            yield rank.forward(near)
            yield rank.backward(far)
        else:
            yield rank.forward(near) | rank.backward(far)
        yield rank.forward(far) | rank.backward(near)
    # 5. (B F|B): the near direction has no forwards left
    for _ in range(behind):
        yield rank.backward(far)
        yield rank.forward(far) | rank.backward(near)
    # 6. (B B), from the middle on (I I), of both directions: no forwards are left; later W fill the end
    num_whole = 2 * ((ahead + 1) // 2) + (0 if ahead % 2 else 1)
    for step in range(2 * (ahead + 1)):
        direction = far if step % 2 == 0 else near
        yield rank.backward(direction) if step < num_whole else rank.dgrad(direction)
    # 7. (W I) of the near direction: wgrad fills the wait for its last gradients
    for _ in range(behind):
        yield rank.wgrad()
        yield rank.dgrad(near)
    # 8. W: the wgrad left over
    for _ in range(ahead + 1):
        yield rank.wgrad()


def row(size: Size, rank: int) -> Iterator[Cell]:
    """Rank P-1-r is rank r with the directions swapped."""
    ahead = min(rank, size.pp - 1 - rank)
    near = 0 if rank < size.pp // 2 else 1
    num_steady = size.microbatches // 2 - size.pp + ahead + 1
    return phases(ahead, size.pp // 2 - 1 - ahead, num_steady, near=near, far=1 - near)


def refuse(size: Size) -> str | None:
    """Two equal directions, two equal halves of ranks, and enough micro-batches to meet in the middle."""
    if size.pp % 2:
        return "needs an even number of ranks"
    if size.microbatches % 2:
        return "needs an even number of micro-batches, half for each direction"
    if size.microbatches < 2 * size.pp:
        return f"needs at least 2P = {2 * size.pp} micro-batches"
    return None


FAMILY = Family(
    name="dualpipe",
    summary="two pipes, one from each end, overlapped",
    source="DeepSeek-V3 report (arXiv 2412.19437), Fig. 5",
    placement=Placement.bidirectional,
    row=row,
    refuse=refuse,
    vpps=(2,),
    demands="even P, V=2 (a chunk a direction), even M >= 2P (both directions)",
    bubble="(P/2-1)(FB+B-3W) in times of one chunk, exact where F=I=W",
    memory="P+1 micro-batches, parameters twice",
    overlapped=True,
)
