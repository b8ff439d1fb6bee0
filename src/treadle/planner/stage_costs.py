"""What the stages of a cut take and save, one micro-batch, before any schedule runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.costs import Costs
from treadle.ir.blocks import LAYERS, with_dense
from treadle.ir.placement import Placement

_SAVED = {"E": ("embed",), "t": ("attn", "mlp"), "d": ("dense_attn", "dense_mlp"), "m": ("mtp",), "L": ("head",)}
"""The entries of [saved_bytes] that a block is made of."""


@dataclass(frozen=True)
class StageCost:
    """A stage and one micro-batch: ticks of its forward and backward, and what it saves between them.

    `saved` is in the `saved_unit` of its cut.
    """

    blocks: str
    ticks: int
    saved: float


@dataclass(frozen=True)
class CutCosts:
    """A cut of a model into stages, weighed; `ranks[rank]` is the ticks of all stages that a rank holds."""

    stages: tuple[StageCost, ...]
    ranks: tuple[int, ...]
    saved_unit: str

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of each stage."""
        return tuple(stage.blocks for stage in self.stages)

    @property
    def slowest_stage(self) -> int:
        """The first stage that takes the longest."""
        ticks = [stage.ticks for stage in self.stages]
        return ticks.index(max(ticks))

    @property
    def slowest_rank(self) -> int:
        """The first rank whose stages take the longest together."""
        return self.ranks.index(max(self.ranks))


def weigh(costs: Costs, blocks: Sequence[str], placement: Placement) -> CutCosts:
    """Weigh a cut: each stage by its blocks, each rank by its stages.

    What is saved is in bytes if the costs have them for every block; else layers are counted.

    Raises:
        ValueError: the placement has another number of stages, or the costs have no time for a layer.

    Example:
        >>> cut = weigh(treadle.load_costs("unit"), ("Et", "tt", "tt", "tL"), Placement.v(2))
        >>> cut.slowest_stage, cut.slowest_rank
        (1, 1)

    """
    if len(blocks) != placement.num_stages:
        raise ValueError(
            f"the layout has {len(blocks)} stages, and {placement.pp} ranks of {placement.vpp} chunks hold "
            f"{placement.num_stages}; give as many, divided by |"
        )
    factors = costs.stage_factors("factor", len(blocks)) or (1.0,) * len(blocks)
    scales = costs.stage_factors("saved_factor", len(blocks)) or (1.0,) * len(blocks)
    unit = "layers" if costs.unsaved("".join(blocks)) else "bytes"
    stages = tuple(
        StageCost(
            row,
            sum(round(costs.of_stage(action, row) * factor) for action in ("f", "b")),
            _saved(costs, row, unit) * scale,
        )
        for row, factor, scale in zip(blocks, factors, scales, strict=True)
    )
    ranks = tuple(sum(stages[stage].ticks for stage in held) for held in placement.stages)
    return CutCosts(stages, ranks, unit)


def _saved(costs: Costs, row: str, unit: str) -> int:
    if unit == "layers":
        return sum(map(row.count, LAYERS))
    sizes = costs.saved_parts
    return sum(sizes.get(part, sizes.get(part.removeprefix("dense_"), 0)) for block in row for part in _SAVED[block])


def model_blocks(costs: Costs, *, layers: int | None = None, dense: int | None = None, mtp: int | None = None) -> str:
    """Return the letters of a whole model, E first and L last; what is not given is as in the costs' [model].

    Raises:
        ValueError: the number of layers is unknown, the costs have another one, or more are dense.

    Example:
        >>> model_blocks(treadle.load_costs("unit"), layers=4, dense=1, mtp=1)
        'EdtttmL'

    """
    said = costs.model.get("layers")
    if layers is not None and layers < 1:
        raise ValueError(f"a model has at least 1 layer, got {layers}")
    if layers is not None and said is not None and layers != said:
        raise ValueError(
            f"costs {costs.name!r} are of a model of {said} layers, got {layers}; "
            "leave `model_layers` out, or change [model] layers"
        )
    count = layers if layers is not None else said
    if count is None:
        raise ValueError(
            f"costs {costs.name!r} lack the number of layers; add `model_layers=N`, or a [model] section with layers"
        )
    num_mtp = mtp if mtp is not None else costs.model.get("mtp", 0)
    if num_mtp < 0:
        raise ValueError(f"mtp is a whole number from 0, got {num_mtp}")
    num_dense = dense if dense is not None else costs.model.get("dense", 0)
    (row,) = with_dense(("t" * count,), num_dense)
    return f"E{row}{'m' * num_mtp}L"
