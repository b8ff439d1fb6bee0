"""Whether all ranks can update by changed elements: whether each has what the others take for granted."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import torch

from treadle.dist.streams import Download, upload
from treadle.update.protocol.update_messages import Status
from treadle.update.rank.comparing import TieComparison
from treadle.update.rank.context import RankContext
from treadle.update.rank.shares import Shares


class MissingBase(IntEnum):
    """What a rank or its worker lacks. Ranks gather these, and move all elements where one lacks something."""

    NOTHING = 0
    COPY = 1
    HELD = 2
    KEPT = 3
    TIED = 4


_TEXTS = {
    MissingBase.COPY: "have no copy of what they sent of the committed version by this plan",
    MissingBase.HELD: "speak for workers that do not serve the committed version",
    MissingBase.KEPT: "speak for engines that cannot export, and no copy of what they serve was kept by this plan",
    MissingBase.TIED: "compare tied tensors with elements that arrive",
}


def missing_base(
    context: RankContext, shares: Shares, status: Status | None, ties: TieComparison | None
) -> MissingBase:
    """Return what this rank, or its worker with that status, lacks for an update by changed elements."""
    sends = any(bucket.source == context.rank for bucket in shares.plan.buckets)
    if sends and not context.share.holds(shares.digest):
        return MissingBase.COPY
    if ties is not None and ties.needs_arrivals:
        return MissingBase.TIED
    if status is None:
        return MissingBase.NOTHING
    if status.state != "serving":
        return MissingBase.HELD
    kept = status.base == shares.name(context.rank) and context.options.rollback_place != "none"
    return MissingBase.NOTHING if status.can_export or kept else MissingBase.KEPT


def gather_missing(context: RankContext, group: int, own: MissingBase) -> dict[int, MissingBase]:
    """Return what each rank lacks. All ranks call this together. `group`: the attempt that made the process group."""
    broadcasts, device = context.broadcasts, context.device
    made = broadcasts.group_of(group, context.inbox)
    assert broadcasts.waiter is not None
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in made.ranks]
    broadcasts.waiter.wait(made.communicator.allgather([found], [upload([int(own)], torch.int64, device)]))
    return {rank: MissingBase(Download(missing).tolist()[0]) for rank, missing in zip(made.ranks, found, strict=True)}


def why_all_move(missing: Mapping[int, MissingBase]) -> str:
    """Return why all elements move, for people; empty where the changed ones are enough."""
    found = [
        f"update ranks {', '.join(str(rank) for rank, its in missing.items() if its == base)} {text}"
        for base, text in _TEXTS.items()
        if base in missing.values()
    ]
    return f"all elements move: {'; '.join(found)}" if found else ""
