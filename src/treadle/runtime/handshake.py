"""What ranks tell each other before the first step: are we all in one pipeline, and does every part of it stand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treadle.dist.rank_groups import Groups
from treadle.ir import Schedule
from treadle.runtime.model.gradients import Gradients

_NOBODY = -1
_PIECE = 1 << 22  # elements of a parameter that are looked at together, so that looking takes little memory
_WEIGHTS = 8191  # of elements in a sum that tells their order


@dataclass(frozen=True)
class Handshake:
    """Of each (rank along pp, chunk): whether its backward can be split, and how many layers it has.

    `layered`: do the layers name their segments, all of them or none. `embedding`: does the first stage have plain
    modules before such layers.
    """

    splits: Mapping[tuple[int, int], bool]
    layers: Mapping[tuple[int, int], int]
    layered: bool
    embedding: bool


def meet(
    groups: Groups,
    schedule: Schedule,
    terms: str,
    splits: list[bool],
    layers: list[int],
    layered: list[bool],
    embeds: list[bool],
    segments: list[str],
    problem: ValueError | None,
    device: torch.device,
) -> Handshake:
    """Exchanges what each rank has. If one cannot take part, or has another schedule, all of them say so.

    `terms` are what else the plan is made from; ranks with others would make another one.
    """
    _agree_to_start(groups, schedule, terms, problem, device)
    vpp = schedule.vpp
    told = [*splits, *layers, *layered, *embeds, _number(repr(segments))]
    mine = torch.tensor(told, dtype=torch.int64, device=device)
    culprit = _NOBODY
    if groups.dp_group is not None:  # what one replica cannot split, none does
        everyone = torch.stack(groups.dp_group.all_gather(mine))
        mine[:vpp] = everyone[:, :vpp].min(0).values
        culprit = groups.position.rank if bool((everyone[:, vpp:] != everyone[0, vpp:]).any()) else _NOBODY
    raise_for_all(
        groups,
        culprit,
        device,
        "its replicas have stages of other depths or segments; a stage is the same in all of them",
    )
    rows = [row.tolist() for row in groups.pp_group.all_gather(mine)]
    places = [(rank, chunk) for rank in range(len(rows)) for chunk in range(vpp)]
    named = {bool(flag) for row in rows for flag in row[2 * vpp : 3 * vpp]}
    if len(named) > 1:
        raise ValueError("some stages have layers that name their segments, and some have none; either all do, or none")
    strangers = [rank for rank, row in zip(groups.pp_group.ranks, rows, strict=True) if row[-1] != rows[0][-1]]
    if strangers:
        raise ValueError(
            f"rank {strangers[0]} has layers of other segments than rank {groups.pp_group.ranks[0]}; "
            "all layers of a model have the same"
        )
    return Handshake(
        {(r, c): bool(rows[r][c]) for r, c in places},
        {(r, c): rows[r][vpp + c] for r, c in places},
        layered=named == {True},
        embedding=any(flag for row in rows for flag in row[3 * vpp : 4 * vpp]),
    )


def _agree_to_start(
    groups: Groups, schedule: Schedule, terms: str, problem: ValueError | None, device: torch.device
) -> None:
    """What is exchanged is of one size, whatever the schedules: they may differ."""
    number = _number(repr((schedule.placement, schedule.rows, sorted(schedule.receives.items()))))
    rank, own = groups.position.rank, _number(terms)
    told = [_NOBODY if problem is None else rank, _NOBODY, _NOBODY, number, own]
    mine = torch.tensor(told, dtype=torch.int64, device=device)
    for group in (groups.dp_group, groups.pp_group):  # what one group heard, the next one hears
        if group is not None:
            rows = [row.tolist() for row in group.all_gather(mine)]
            mine[0] = max(row[0] for row in rows)
            for at, what in ((1, number), (2, own)):
                strangers = [r for r, row in zip(group.ranks, rows, strict=True) if row[at + 2] != what]
                mine[at] = max([*strangers, *(row[at] for row in rows)])
    broken, stranger, other = mine.tolist()[:3]
    if problem is not None:
        raise problem
    if broken != _NOBODY:
        raise ValueError(f"rank {broken} could not make its part of the pipeline; its own error says why")
    if stranger != _NOBODY:
        raise ValueError(f"not all ranks have the same schedule, rank {stranger} has another; make one for all of them")
    if other != _NOBODY:
        raise ValueError(f"not all ranks have the same costs and the same `saved`: rank {other} has others")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def raise_for_all(groups: Groups, culprit: int, device: torch.device, what: str) -> None:
    """Raises on every rank if there is a culprit on one; the others point to it."""
    told = torch.tensor([culprit], dtype=torch.int64, device=device)
    for group in (groups.dp_group, groups.copies_group, groups.pp_group):
        if group is not None:
            group.all_reduce(told, largest=True)
    named = int(told)
    if named != _NOBODY:
        raise ValueError(f"rank {named}: {what}" if culprit != _NOBODY else f"rank {named} refuses; its error says why")


def check_copies(groups: Groups, modules: Mapping[int, nn.Module], gradients: Gradients, device: torch.device) -> None:
    """Refuses copies of a stage that do not start from the same parameters, on all ranks."""
    group, culprit, what = gradients.group, _NOBODY, ""
    if group is None or any(p.is_meta for module in modules.values() for p in module.parameters()):
        return
    named = [
        (chunk, name, p)
        for chunk in gradients.order
        for name, p in modules[chunk].named_parameters()
        if p not in gradients.owned
    ]
    sums = torch.stack([_digest(p) for _, _, p in named]) if named else torch.zeros(1, 2, device=device)
    both = torch.stack([sums, -sums])
    group.all_reduce(both, largest=True)
    apart = torch.nonzero((both[0] != -both[1]).any(-1)).flatten().tolist()
    if apart:
        chunk, name, param = named[apart[0]]
        culprit = groups.position.rank
        what = (
            f"copies of a stage start from different parameters, the first {name} of chunk {chunk}, of shape "
            f"{tuple(param.shape)}; make them from one seed, or broadcast them before making the Pipeline"
        )
    raise_for_all(groups, culprit, device, what)


def _digest(param: nn.Parameter) -> Tensor:
    """Two sums that tell parameters apart, also by the order of their elements."""
    flat = param.detach().reshape(-1)
    total = torch.zeros(2, dtype=torch.float64, device=param.device)
    for first in range(0, flat.numel(), _PIECE):
        piece = flat[first : first + _PIECE].double()
        weight = torch.arange(first, first + len(piece), device=param.device) % _WEIGHTS + 1
        total += torch.stack([piece.sum(), (piece * weight).sum()])
    return total
