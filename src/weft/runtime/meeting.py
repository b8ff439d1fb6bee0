"""What ranks tell each other before the first step: are we all in one pipeline, and does every part of it stand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.ir import Schedule
from weft.runtime.communicators import Communicators
from weft.runtime.gradients import Gradients

_FINE = -1


@dataclass(frozen=True)
class Met:
    """Of each (rank along pp, chunk): whether its backward can be split, and how many layers it has."""

    splits: Mapping[tuple[int, int], bool]
    layers: Mapping[tuple[int, int], int]


def meet(
    talk: Communicators,
    schedule: Schedule,
    splits: list[bool],
    layers: list[int],
    problem: ValueError | None,
    device: torch.device,
) -> Met:
    """Exchanges what each rank has. If one cannot take part, or has another schedule, all of them say so."""
    text = repr((schedule.placement, schedule.rows))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    rank, vpp = talk.place.rank, schedule.vpp
    parts = [*splits, *layers] if problem is None else [0] * (2 * vpp)
    head = [_FINE if problem is None else rank, _FINE, number]
    mine = torch.tensor([*head, *parts], dtype=torch.int64, device=device)
    rows: list[list[int]] = []
    for circle in (talk.replicas, talk.pipe):  # what one circle heard, the next one hears
        if circle is not None:
            rows = [row.tolist() for row in circle.all_gather(mine)]
            mine[0] = max(row[0] for row in rows)
            strangers = [r for r, row in zip(circle.ranks, rows, strict=True) if row[2] != number]
            mine[1] = max([*strangers, *(row[1] for row in rows)])
    broken, stranger = int(mine[0]), int(mine[1])
    if problem is not None:
        raise problem
    if broken != _FINE:
        raise ValueError(f"rank {broken} could not make its part of the pipeline; its own error says why")
    if stranger != _FINE:
        raise ValueError(f"not all ranks have the same schedule, rank {stranger} has another; make one for all of them")
    places = [(r, chunk) for r in range(len(rows)) for chunk in range(vpp)]
    return Met(
        {(r, c): bool(rows[r][len(head) + c]) for r, c in places},
        {(r, c): rows[r][len(head) + vpp + c] for r, c in places},
    )


def check_copies(gradients: Gradients, device: torch.device) -> None:
    """Refuses copies of a stage that do not start from the same parameters."""
    params = [(chunk, p) for chunk in gradients.order for p in gradients.params[chunk]]
    if gradients.circle is None or not params or device.type == "meta":
        return
    sums = torch.stack([p.detach().double().sum() for _, p in params])
    both = torch.stack([sums, -sums])
    gradients.circle.all_reduce(both, largest=True)
    apart = torch.nonzero(both[0] != -both[1]).flatten().tolist()
    if apart:
        chunk, param = params[apart[0]]
        raise ValueError(
            f"copies of a stage start from different parameters, the first in chunk {chunk}, of shape "
            f"{tuple(param.shape)}; make them from one seed, or broadcast them before making the Pipeline"
        )
