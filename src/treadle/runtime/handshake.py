"""The handshake of ranks before the first step: all are in one pipeline, and every rank can run its part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from treadle.dist.gathering import gather_json
from treadle.dist.groups import Group
from treadle.dist.rank_groups import Groups
from treadle.dist.streams import HOST_MEMORY
from treadle.ir import Schedule
from treadle.runtime.model.gradients import Gradients

_NOBODY = -1
_PIECE = 1 << 22  # elements of a parameter that are read at once, so that reading takes little memory
_WEIGHTS = 8191  # of elements, in a sum that depends on their order
_MOST_TEXT = 600


@dataclass(frozen=True)
class Handshake:
    """The result. For each (rank along pp, chunk): whether its backward can be split, its number of layers, its blocks.

    `layered`: the stages run at the grain of layers. `segments`: of the layers that exchange tokens, () without any.
    `side`: the names of the side values that some stage could read.
    """

    splits: Mapping[tuple[int, int], bool]
    layers: Mapping[tuple[int, int], int]
    blocks: Mapping[tuple[int, int], str]
    layered: bool
    segments: tuple[str, ...]
    side: frozenset[str]


@dataclass(frozen=True)
class RankStages:
    """The facts about a rank's stages that other ranks need, each a list with an entry for each chunk.

    `blocks` are letters (`runtime.model.blocks`), `layered`: has it layers that name their segments, or MTP blocks.
    `segments`: those of its layers that exchange tokens, [] without any. `side`: the side values they could read.
    """

    can_split: list[bool]
    num_layers: list[int]
    layered: list[bool]
    blocks: list[str]
    segments: list[str]
    side: list[str]

    def encode(self) -> dict[str, Any]:
        """Returns the fields as JSON has them."""
        return asdict(self)

    @classmethod
    def decode(cls, row: Mapping[str, Any]) -> RankStages:
        """Returns the facts that `encode` wrote."""
        return cls(**row)

    def agrees_with(self, other: RankStages) -> bool:
        """True if the stages are alike but for `can_split`, in which replicas may differ."""
        return replace(self, can_split=other.can_split) == other


@dataclass(frozen=True)
class StartTerms:
    """A rank's part in the agreement to start: digests of its schedule and terms, and ranks known to disagree.

    `rejecting`, `other_schedule` and `other_terms` are a rank each, the highest known, or -1. The encoding has one
    length whatever the schedules, as they may differ.
    """

    rejecting: int
    other_schedule: int
    other_terms: int
    schedule: int
    terms: int

    def encode(self) -> list[int]:
        """Returns the fields in order."""
        return list(astuple(self))

    @classmethod
    def decode(cls, row: Sequence[int]) -> StartTerms:
        """Returns the terms that `encode` wrote."""
        return cls(*row)


class Rejections:
    """Ranks' reasons for rejecting a pipeline, in torch's store: the groups' collectives carry a rank number only."""

    def __init__(self, name: str) -> None:
        self._store = PrefixStore(f"treadle/{name}/rejections", _get_default_store())

    def write(self, rank: int, reason: str) -> None:
        """Stores the reason of a rank, before the collective that names the rank."""
        with suppress(RuntimeError):  # the store is gone; the rank itself still raises its reason
            self._store.set(str(rank), reason[:_MOST_TEXT].encode(errors="replace").decode())

    def read(self, rank: int) -> str:
        """Returns the reason of a rank, behind a colon, or where else to find it."""
        with suppress(RuntimeError):
            if self._store.check([str(rank)]):
                return f": {self._store.get(str(rank)).decode(errors='replace')}"
        return "; its own error says why"


def meet(
    groups: Groups,
    schedule: Schedule,
    terms: str,
    stages: RankStages,
    problem: ValueError | None,
) -> Handshake:
    """Exchanges the facts about all ranks' stages. If a rank cannot take part, or has another schedule, all raise.

    `terms` is a text of everything else that the plan is made from; it must be the same on all ranks. `problem` is
    this rank's reason for not taking part.
    """
    _agree_to_start(groups, schedule, terms, problem)
    stages = _agree_over_replicas(groups, stages)
    rows = [RankStages.decode(row) for row in gather_json(groups.pp_group, stages.encode())]
    layered = any(any(row.layered) for row in rows)
    if layered:
        _refuse_mixed(rows, groups.pp_group.ranks, schedule)
    places = [(rank, chunk) for rank, row in enumerate(rows) for chunk in range(len(row.blocks))]
    return Handshake(
        {(rank, chunk): rows[rank].can_split[chunk] for rank, chunk in places},
        {(rank, chunk): rows[rank].num_layers[chunk] for rank, chunk in places},
        {(rank, chunk): rows[rank].blocks[chunk] for rank, chunk in places},
        layered=layered,
        segments=tuple(next((row.segments for row in rows if row.segments), ())),
        side=frozenset(name for row in rows for name in row.side),
    )


def digest_of(value: object) -> int:
    """Returns a number of 56 bits that tells values with different `repr` apart."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _gather(group: Group, row: list[int]) -> list[list[int]]:
    return [other.tolist() for other in group.all_gather(torch.tensor(row, dtype=torch.int64, device=HOST_MEMORY))]


def _agree_over_replicas(groups: Groups, stages: RankStages) -> RankStages:
    """Returns the stages with a backward split only where all replicas can. Raises if replicas' stages differ."""
    reason = None
    if groups.dp_group is not None:
        rows = [RankStages.decode(row) for row in gather_json(groups.dp_group, stages.encode())]
        stages = replace(stages, can_split=[all(can) for can in zip(*(row.can_split for row in rows), strict=True)])
        if not all(row.agrees_with(rows[0]) for row in rows):
            reason = "its replicas have stages of other depths or segments; a stage is the same in all of them"
    raise_for_all(groups, reason)
    return stages


def _refuse_mixed(rows: Sequence[RankStages], ranks: Sequence[int], schedule: Schedule) -> None:
    """Raises where stages cannot be one model at the grain of layers."""
    placement = schedule.placement
    holders = [placement.holder(stage) for stage in range(placement.num_stages)]
    blocks = [rows[rank].blocks[chunk] for rank, chunk in holders]
    plain = [stage for stage, (rank, chunk) in enumerate(holders) if not rows[rank].layered[chunk]]
    between = [stage for stage in plain if 0 < stage < len(blocks) - 1]
    if between:
        raise ValueError(
            f"some stages have layers that name their segments, and stage {between[0]} has none; only the first stage "
            "(an embedding) and the last (a head) may have plain modules alone"
        )
    for at, row in enumerate(rows):
        for chunk, letters in enumerate(row.blocks):
            wanted = blocks[placement.stage(at, chunk)]
            if letters != wanted:
                raise ValueError(
                    f"copies of stage {placement.stage(at, chunk)} have the blocks {wanted!r} and, on rank "
                    f"{ranks[at]}, {letters!r}; make them alike"
                )
    exchanging = [(rank, row.segments) for rank, row in zip(ranks, rows, strict=True) if row.segments]
    for rank, segments in exchanging:
        if segments != exchanging[0][1]:
            raise ValueError(
                f"rank {rank} has MoE layers with the segments {', '.join(segments)}, rank {exchanging[0][0]} with "
                f"{', '.join(exchanging[0][1])}; all MoE layers of a model have the same: count tokens in all, or pad "
                "in all"
            )
    with_mtp = [stage for stage, letters in enumerate(blocks) if "m" in letters]
    if len(with_mtp) > 1:
        raise ValueError(
            f"stages {', '.join(map(str, with_mtp))} have MTP blocks; all of a model's stand on one stage, as the "
            "hidden state of one goes to the next: put them behind the last layers, or on one stage before the head"
        )
    later = [at for at, letters in enumerate(blocks) if with_mtp and at > with_mtp[0] and set("dt") & {*letters}]
    if later:
        raise ValueError(
            f"stage {with_mtp[0]} has MTP blocks, and stage {later[0]} behind it has layers; MTP blocks stand behind "
            "all layers of a model"
        )


def _agree_to_start(groups: Groups, schedule: Schedule, terms: str, problem: ValueError | None) -> None:
    """Raises on all ranks if one has a problem, another schedule or other terms. Ranks with a problem raise that."""
    rejections = Rejections(groups.name)
    if problem is not None:
        rejections.write(groups.position.rank, str(problem))
    own = StartTerms(
        rejecting=_NOBODY if problem is None else groups.position.rank,
        other_schedule=_NOBODY,
        other_terms=_NOBODY,
        schedule=digest_of((schedule.placement, schedule.rows, sorted(schedule.receives.items()))),
        terms=digest_of(terms),
    )
    for group in (groups.dp_group, groups.pp_group):  # each group passes on what the one before found
        if group is not None:
            rows = [StartTerms.decode(row) for row in _gather(group, own.encode())]
            own = _merge(own, rows, group.ranks)
    if problem is not None:
        raise problem
    if own.rejecting != _NOBODY:
        reason = rejections.read(own.rejecting)
        raise ValueError(f"rank {own.rejecting} could not make its part of the pipeline{reason}")
    if own.other_schedule != _NOBODY:
        raise ValueError(
            f"not all ranks have the same schedule, rank {own.other_schedule} has another; make one for all of them"
        )
    if own.other_terms != _NOBODY:
        raise ValueError(
            f"not all ranks have the same costs, `saved`, `recompute` and `shapes`: rank {own.other_terms} has others"
        )


def _merge(own: StartTerms, rows: Sequence[StartTerms], ranks: Sequence[int]) -> StartTerms:
    """Returns `own` with the highest rank that rejects, or that has other digests, as this group knows them."""
    schedules = [rank for rank, row in zip(ranks, rows, strict=True) if row.schedule != own.schedule]
    terms = [rank for rank, row in zip(ranks, rows, strict=True) if row.terms != own.terms]
    return replace(
        own,
        rejecting=max(row.rejecting for row in rows),
        other_schedule=max([*schedules, *(row.other_schedule for row in rows)]),
        other_terms=max([*terms, *(row.other_terms for row in rows)]),
    )


def raise_for_all(groups: Groups, reason: str | None) -> None:
    """Raises on every rank if one has a reason to reject the pipeline; ranks without one quote the highest that has."""
    rank, rejections = groups.position.rank, Rejections(groups.name)
    if reason is not None:
        rejections.write(rank, reason)
    told = torch.tensor([_NOBODY if reason is None else rank], dtype=torch.int64, device=HOST_MEMORY)
    for group in (groups.dp_group, groups.copies_group, groups.pp_group):
        if group is not None:
            group.all_reduce(told, largest=True)
    named = int(told)
    if named != _NOBODY:
        raise ValueError(
            f"rank {rank}: {reason}"
            if reason is not None
            else f"rank {named} rejected the pipeline{rejections.read(named)}"
        )


def check_copies(groups: Groups, modules: Mapping[int, nn.Module], gradients: Gradients) -> None:
    """Raises on all ranks if copies of a stage do not start from the same parameters."""
    group, reason = groups.replica_group, None
    if group is None or any(p.is_meta for module in modules.values() for p in module.parameters()):
        return
    named = [
        (chunk, name, p)
        for chunk in gradients.order
        for name, p in modules[chunk].named_parameters()
        if p not in gradients.owned
    ]
    digests = [digest_of_values(p) for _, _, p in named] or [torch.zeros(2, dtype=torch.float64)]
    sums = torch.stack(digests).to(HOST_MEMORY)
    both = torch.stack([sums, -sums])
    group.all_reduce(both, largest=True)
    apart = torch.nonzero((both[0] != -both[1]).any(-1)).flatten().tolist()
    if apart:
        chunk, name, param = named[apart[0]]
        reason = (
            f"copies of a stage start from different parameters, the first {name} of chunk {chunk}, of shape "
            f"{tuple(param.shape)}; make them from one seed, or broadcast them before making the Pipeline"
        )
    raise_for_all(groups, reason)


def digest_of_values(param: nn.Parameter) -> Tensor:
    """Returns two sums over the elements, of which one depends on their order."""
    flat = param.detach().reshape(-1)
    total = torch.zeros(2, dtype=torch.float64, device=param.device)
    for first in range(0, flat.numel(), _PIECE):
        piece = flat[first : first + _PIECE].double()
        weight = torch.arange(first, first + len(piece), device=param.device) % _WEIGHTS + 1
        total += torch.stack([piece.sum(), (piece * weight).sum()])
    return total
