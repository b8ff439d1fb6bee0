"""The handshake of ranks before the first step: what each tells of its stages, and why stages are no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from treadle.ir import Schedule
from treadle.ir.placement import Placement
from treadle.runtime.agreement import Claim, digest_of
from treadle.runtime.model.calling import layers_of
from treadle.runtime.model.segments import is_segmented
from treadle.runtime.model.stage_blocks import blocks_of, children_of, is_layered, side_names
from treadle.runtime.model.weight_grad import WeightGradSplit


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

    @classmethod
    def of(cls, told: Sequence[Sequence[RankStages]], schedule: Schedule) -> Handshake:
        """Return what ranks along pp told, each with its replicas, which may differ in `can_split` only.

        Raises:
            ValueError: the stages are not one model at the grain of layers.

        """
        rows = [of_replicas[0] for of_replicas in told]
        layered = any(any(row.layered) for row in rows)
        if layered:
            _refuse_mixed(rows, schedule.placement)
        places = [(rank, chunk) for rank, row in enumerate(rows) for chunk in range(len(row.blocks))]
        return cls(
            {(rank, chunk): all(row.can_split[chunk] for row in told[rank]) for rank, chunk in places},
            {(rank, chunk): rows[rank].num_layers[chunk] for rank, chunk in places},
            {(rank, chunk): rows[rank].blocks[chunk] for rank, chunk in places},
            layered=layered,
            segments=tuple(next((row.segments for row in rows if row.segments), ())),
            side=frozenset(name for row in rows for name in row.side),
        )


@dataclass(frozen=True)
class RankStages:
    """The facts about a rank's stages that other ranks need, each a list with an entry for each chunk.

    `blocks` are letters (`runtime.model.stage_blocks`), `layered`: has it layers that name their segments, or MTP
    blocks. `segments`: those of its layers that exchange tokens, [] without any. `side`: the side values they could
    read.
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

    def claims(self, placement: Placement, pp_rank: int) -> Iterator[Claim]:
        """Yield what copies of these stages, and all MoE layers of the model, must have the same."""
        alike = "{}; a stage is the same in all replicas, and at both ends of two pipes"
        for stage, depth, row in zip(placement.stages[pp_rank], self.num_layers, self.blocks, strict=True):
            yield Claim(f"stage {stage}", {"layers": str(depth), "blocks": repr(row)}, alike, f"stage {stage}")
        yield Claim(f"side values of {pp_rank}", {"side values": ", ".join(self.side)}, alike)
        if self.segments:
            yield Claim(
                "MoE layers",
                {"segments of MoE layers": ", ".join(self.segments)},
                "{}; all MoE layers of a model have the same: count tokens in all, or pad in all",
            )


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


def claim_of_run(schedule: Schedule, options: Mapping[str, str]) -> Claim:
    """Return the claim that every rank makes: the name, size and rows of its schedule, and its options."""
    digest = digest_of((schedule.placement, schedule.rows, sorted(schedule.receives.items())))
    size = f"{schedule.pp} ranks, {schedule.vpp} chunks, {schedule.num_microbatches} micro-batches"
    return Claim("the run", {"schedule": f"{schedule.name}, {size}, digest {digest:014x}", **options})


def _refuse_mixed(rows: Sequence[RankStages], placement: Placement) -> None:
    """Raises where stages cannot be one model at the grain of layers."""
    holders = [placement.holder(stage) for stage in range(placement.num_stages)]
    blocks = [rows[rank].blocks[chunk] for rank, chunk in holders]
    plain = [stage for stage, (rank, chunk) in enumerate(holders) if not rows[rank].layered[chunk]]
    between = [stage for stage in plain if 0 < stage < len(blocks) - 1]
    if between:
        raise ValueError(
            f"some stages have layers that name their segments, and stage {between[0]} has none; only the first stage "
            "(an embedding) and the last (a head) may have plain modules alone"
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
