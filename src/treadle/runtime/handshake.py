"""The handshake of ranks before the first step: all are in one pipeline, and every rank can run its part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from treadle.dist.gathering import gather_json
from treadle.dist.rank_groups import Groups
from treadle.dist.streams import HOST_MEMORY
from treadle.ir import Schedule
from treadle.ir.placement import Placement
from treadle.runtime.agreement import Facts, agree_to_start, difference, digest_of, raise_for_all
from treadle.runtime.model.calling import layers_of
from treadle.runtime.model.gradients import Gradients
from treadle.runtime.model.segments import is_segmented
from treadle.runtime.model.stage_blocks import blocks_of, children_of, is_layered, side_names
from treadle.runtime.model.weight_grad import WeightGradSplit

_PIECE = 1 << 16  # elements of a parameter that are read at once, so that reading takes little memory
_LONG = (1 << 64) - 1
_FACTOR = 0x5851F42D4C957F2D
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


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


def _depth_of(module: nn.Module) -> int:
    """Return how many layers a stage has: of those that name their segments, else of any."""
    named = [is_segmented(child) for child in children_of(module)]
    return sum(named) if is_layered(module) else len(layers_of(module))


def stages_of(
    modules: Mapping[int, nn.Module], schedule: Schedule, pp_rank: int, splits: Mapping[int, WeightGradSplit]
) -> RankStages:
    """Return the facts about this rank's stages that other ranks need; of chunks without a module nothing."""
    chunks, placement = range(schedule.vpp), schedule.placement
    layers = [child for module in modules.values() for child in children_of(module)]
    named = [[segment.name for segment in layer.segments()] for layer in layers if is_segmented(layer)]
    return RankStages(
        can_split=[splits[c].possible if c in splits else True for c in chunks],
        num_layers=[_depth_of(modules[c]) if c in modules else 0 for c in chunks],
        layered=[c in modules and is_layered(modules[c]) for c in chunks],
        blocks=[
            blocks_of(modules[c], placement.stage(pp_rank, c), placement.num_stages) if c in modules else ""
            for c in chunks
        ],
        segments=next((names for names in named if "dispatch" in names), []),
        side=sorted({name for layer in layers for name in side_names(layer)}),
    )


def meet(
    groups: Groups,
    schedule: Schedule,
    facts: Facts,
    stages: RankStages,
    problem: ValueError | None,
) -> Handshake:
    """Exchanges the facts about all ranks' stages. If a rank cannot take part, or has another schedule, all raise.

    `facts` are what else must be the same on all ranks. `problem` is this rank's reason for not taking part.
    """
    agree_to_start(groups, {"schedule": _named(schedule), **facts}, problem)
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


def _named(schedule: Schedule) -> str:
    """Returns the name and size of a schedule, and a digest of its rows."""
    digest = digest_of((schedule.placement, schedule.rows, sorted(schedule.receives.items())))
    size = f"{schedule.pp} ranks, {schedule.vpp} chunks, {schedule.num_microbatches} micro-batches"
    return f"{schedule.name}, {size}, digest {digest:014x}"


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
            "hidden state of one goes to the next: put them after the last layers, or on one stage before the head"
        )
    later = [at for at, letters in enumerate(blocks) if with_mtp and at > with_mtp[0] and set("dt") & {*letters}]
    if later:
        raise ValueError(
            f"stage {with_mtp[0]} has MTP blocks, and stage {later[0]} after it has layers; MTP blocks stand after "
            "all layers of a model"
        )


def check_copies(groups: Groups, placement: Placement, modules: Mapping[int, nn.Module], gradients: Gradients) -> None:
    """Raises on all ranks if copies of a stage do not start from the same parameters, bit by bit.

    An expert is compared with the same expert of other expert groups, and of the pipe's other end.
    """
    group, position = groups.replica_group, groups.position
    if group is None or any(p.is_meta for module in modules.values() for p in module.parameters()):
        return
    named = [
        (f"{name} of stage {placement.stage(position.pp_rank, chunk)}", param)
        for chunk, module in modules.items()
        for name, param in module.named_parameters()
    ]
    digests = digests_of([param for _, param in named])
    forms = {name: f"{form_of(param)}, bits {bits}" for (name, param), bits in zip(named, digests, strict=True)}
    owned = {name for name, param in named if param in gradients.owned}
    shared, experts = ({name: form for name, form in forms.items() if (name in owned) is of} for of in (False, True))
    parts = {0: shared, 1 + position.dp_rank % position.ep: experts}
    reason = difference(groups, [group], parts, num_parts=1 + position.ep)
    if reason is not None:
        reason = (
            f"copies of a stage start from different parameters: {reason}; make them from one seed, or broadcast them "
            "before making the Pipeline"
        )
    raise_for_all(groups, reason)


def form_of(param: nn.Parameter) -> str:
    """Returns the shape and type of a parameter, and whether it trains."""
    return f"shape {tuple(param.shape)}, {param.dtype}, requires_grad={param.requires_grad}"


def digests_of(params: Sequence[nn.Parameter]) -> list[str]:
    """Returns a digest of each parameter's bits, in which the place of each element counts.

    It is a sum of elements times random weights, modulo 2**64. In each further piece all weights are multiplied by
    one more random number, so they do not repeat.
    """
    if not params:
        return []
    weights = _weights(_PIECE, params[0].device)
    totals = []
    for param in params:
        flat = param.detach().reshape(-1).contiguous()
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        bits = flat.view(_BITS[min(flat.itemsize, 4)])
        total = torch.zeros((), dtype=torch.int64, device=param.device)
        for first in range(0, bits.numel(), _PIECE):
            piece = bits[first : first + _PIECE].to(torch.int64)
            total = total * _FACTOR + (piece * weights[: len(piece)]).sum()
        totals.append(total)
    return [f"{total & _LONG:016x}" for total in torch.stack(totals).to(HOST_MEMORY).tolist()]


def _weights(num: int, device: torch.device) -> Tensor:
    """Returns odd random numbers, the same on every rank (splitmix64)."""
    mixed = torch.arange(1, num + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ ((mixed >> shift) & (_LONG >> shift))) * _signed(factor)
    return (mixed ^ ((mixed >> 31) & (_LONG >> 31))) | 1


def _signed(number: int) -> int:
    """Returns the number of 64 bits as int64 has it."""
    return number - (1 << 64) if number >> 63 else number
