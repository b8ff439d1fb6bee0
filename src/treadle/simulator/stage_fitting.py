"""Costs fitted stage by stage to measured steps, so that they predict other cuts of the same model.

What an action of a stage takes is the median of each op over the steps, then the mean over micro-batches, and the gap
before it. Where the blocks of the stages are known, a layer takes what it takes in the stages of layers alone, and
embedding and head what their stages take more. Costs are then about the model, and any schedule may cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from treadle.costs import Costs
from treadle.ir.blocks import LAYERS
from treadle.ir.program import Bools, Longs
from treadle.ir.steps import Steps
from treadle.simulator.fitting import fit
from treadle.simulator.gaps import ACTIONS, Gaps, find_gaps

_ENDS = {
    "E": {"f": "embed_f", "b": "embed_b", "i": "embed_b"},
    "L": {"f": "head_f", "b": "head_b", "i": "head_b", "w": "head_w"},
}
_DIFFERS = 0.005
"""A stage whose times are this much from the middle gets a factor."""

Floats = npt.NDArray[np.float64]


def fit_stages(steps: Steps, blocks: Sequence[str] | None = None) -> Costs:
    """Fit costs to measured steps at the grain of cells, a time for each stage.

    Args:
        steps: measured ones.
        blocks: the blocks of each stage, `("Etttttttt", "tttttttt", ...)`; those of the program if left out.

    Returns:
        With blocks, costs of the whole model ([model] and [ends]), which `lower` cuts for any schedule. Without, costs
        of a stage as deep as those that ran ([cells]), and a factor for each stage that differs.

    Raises:
        ValueError: there are blocks for another number of stages, or the steps are at the grain of layers.

    """
    layout = steps.program.layout
    if layout.by_layer:
        raise ValueError("steps at the grain of layers have their times by part: 'fit' makes costs of them")
    rows = tuple(blocks) if blocks is not None else layout.blocks
    if len(rows) != layout.placement.num_stages:
        raise ValueError(f"blocks are given for each of {layout.placement.num_stages} stages, got {len(rows)}")
    gaps, plain = find_gaps(steps), fit(steps.trace())
    ticks = _of_cells(steps, gaps)
    about = f"medians of {len(steps.numbers)} steps by stage, with the gaps between ops"
    costs = replace(
        plain,
        message={**plain.message, **({"send": gaps.message} if gaps.message is not None else {})},
        about=about + (f", of: {steps.about}" if steps.about else ""),
    )
    return _of_model(costs, ticks, rows) if all(rows) else _of_stages(costs, ticks)


def _of_cells(steps: Steps, gaps: Gaps) -> Floats:
    """`[stage, action]` -> ticks; NaN where a stage has no such action."""
    num_stages = steps.program.layout.placement.num_stages
    took = np.median(steps.end[:, gaps.op] - steps.start[:, gaps.op], axis=0) + gaps.gap
    cell = gaps.stage * len(ACTIONS) + gaps.action
    count = np.bincount(cell, minlength=num_stages * len(ACTIONS))
    mean = np.bincount(cell, took, minlength=len(count)) / np.where(count, count, np.nan)
    return np.asarray(mean.reshape(num_stages, len(ACTIONS)))


def _of_stages(costs: Costs, ticks: Floats) -> Costs:
    """[cells]: the middle of all stages; [stage]: the factors of those that differ from it."""
    middle = _middle(ticks)
    took = np.isfinite(ticks)
    ratio = np.where(took, ticks, 0).sum(axis=1) / np.where(took, middle, 0).sum(axis=1)
    factors = {at: {"factor": round(float(r), 4)} for at, r in enumerate(ratio) if abs(r - 1) > _DIFFERS}
    return replace(costs, cells=_named(middle, 1), stage=factors)


def _of_model(costs: Costs, ticks: Floats, rows: Sequence[str]) -> Costs:
    """[model], [dense] and [ends]: a layer by the stages of layers alone, the ends by what their stages take more."""
    num = {letter: np.array([row.count(letter) for row in rows], np.int64) for letter in "tdm"}
    layers = num["t"] + num["d"]
    alone = np.array([set(row) <= set(LAYERS) for row in rows])
    mixed = bool(num["t"].any() and num["d"].any())
    usual = num["t"] if mixed else layers
    of_layer = _of_block(ticks, alone & (usual == layers), usual)
    more = ticks - usual[:, None] * of_layer
    model = {"layers": int(layers.sum()), **_named(of_layer, int(layers.sum()))}
    dense: dict[str, int] = {}
    if mixed:
        of_dense = _of_block(more, alone & (num["d"] > 0), num["d"])
        more -= num["d"][:, None] * of_dense
        dense = {name: max(0, took) for name, took in _named(of_dense, 1).items() if name != "fb"}
        model["dense"] = int(num["d"].sum())
    if num["m"].any():
        model["mtp"] = int(num["m"].sum())
    return replace(costs, cells={}, model=model, dense=dense, ends=_ends(more, rows))


def _ends(more: Floats, rows: Sequence[str]) -> dict[str, int]:
    """What the stages of embedding and head take more than their layers; an MTP block there counts with the head."""
    ends: dict[str, int] = {}
    for row, took in zip(rows, more, strict=True):
        for letter, names in _ENDS.items():
            for action, ticks in zip(ACTIONS, took, strict=True):
                if letter in row and action in names and ticks >= 1:
                    ends[names[action]] = round(ticks)
    return ends


def _of_block(ticks: Floats, chosen: Bools, num: Longs) -> Floats:
    """`[action]`: what one block takes in the chosen stages; in all that have it where none is chosen."""
    chosen = chosen if chosen.any() else num > 0
    return _middle(ticks[chosen] / num[chosen][:, None])


def _middle(ticks: Floats) -> Floats:
    """`[action]`: the median over stages, NaN where none has the action."""
    none = np.isnan(ticks).all(axis=0)
    return np.where(none, np.nan, np.nanmedian(np.where(none, 0, ticks), axis=0))


def _named(ticks: Floats, times: int) -> dict[str, int]:
    return {name: round(times * took) for name, took in zip(ACTIONS, ticks, strict=True) if np.isfinite(took)}
