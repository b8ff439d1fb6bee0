"""Whether all ranks can update by changed elements: whether each has what the others take for granted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch


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
    MissingBase.KEPT: "speak for engines that cannot export, of which no copy of the committed version was kept by this plan",
    MissingBase.TIED: "compare tied tensors with elements that arrive",
}


def gather_lacks(
    group: Any, wait: Callable[[Any], None], own: MissingBase, world: int, device: torch.device
) -> list[MissingBase]:
    """Return what each rank lacks. All ranks call this together."""
    lacks = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    wait(group.allgather([lacks], [torch.tensor([int(own)], dtype=torch.int64, device=device)]))
    return [MissingBase(int(lack)) for lack in lacks]


def why_all_move(lacks: Sequence[MissingBase]) -> str:
    """Return why all elements move, for people; empty where the changed ones are enough."""
    found = [
        f"update ranks {', '.join(str(rank) for rank, its in enumerate(lacks) if its == lack)} {text}"
        for lack, text in _TEXTS.items()
        if lack in lacks
    ]
    return f"all elements move: {'; '.join(found)}" if found else ""
