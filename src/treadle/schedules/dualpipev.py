"""DualPipeV: DualPipe folded in the middle, so that each parameter lives once.

    rank 0  F0.0 F1.0 F2.0 ...      F0.1 I0.1 W0.1 ... (F7.0|B3.1) (F4.1|B0.0) ...
    rank 3  F0.0 F0.1 F1.0 F1.1 ... F4.0 B0.1 (F4.1|B0.0) (F5.0|B1.1) ...

Rank r holds stage r and stage 2P-1-r: the ranks of DualPipe's first half, with what came from the other
end now coming back from the turn of the V.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir import Cell, Placement
from treadle.schedules.dualpipe import phases
from treadle.schedules.family import Family, Size


def row(size: Size, rank: int) -> Iterator[Cell]:
    """DualPipe's phases; the near direction is down the V, the far one back up."""
    num_steady = size.microbatches - 2 * size.pp + rank + 1
    return phases(rank, size.pp - 1 - rank, num_steady, near=0, far=1)


def refuse(size: Size) -> str | None:
    """Refuse fewer micro-batches than stages."""
    if size.microbatches < 2 * size.pp:
        return f"needs at least 2P = {2 * size.pp} micro-batches"
    return None


FAMILY = Family(
    name="dualpipev",
    summary="DualPipe folded into a V",
    source="DualPipe repository (DeepSeek); cut-in-half schedule of Sea AI Lab",
    placement=Placement.v,
    row=row,
    refuse=refuse,
    vpps=(2,),
    demands="any P, V=2, M >= 2P",
    bubble="(P-1)(FB+B-3W) in times of one chunk, exact where F=I=W",
    memory="(2P+1)/2 micro-batches",
    trainers=("torch (ScheduleDualPipeV)",),
    overlapped=True,
)
