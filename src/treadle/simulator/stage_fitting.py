"""Costs fitted stage by stage to measured steps, so that they predict other cuts of the same model.

What an action of a stage takes is the median of each op over the steps, then the mean over micro-batches, and the gap
before it. Where the blocks of the stages are known, a layer takes what it takes in the stages of layers alone, and
embedding and head what their stages take more, the embedding at most a layer's time. Costs are then about the model,
and any schedule may cut it.

What neither explains stays: a stage that takes longer than its blocks keeps a factor, which belongs to this cut; a
micro-batch that takes longer than the others in all stages keeps one, too.
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
from treadle.simulator.gaps import ACTIONS, PAIR, Gaps, find_gaps, microbatches

_ENDS = {
    "E": {"f": "embed_f", "b": "embed_b", "i": "embed_b"},
    "L": {"f": "head_f", "b": "head_b", "i": "head_b", "w": "head_w"},
}
_LOOKUP = ("embed_f", "embed_b")
"""Entries of an embedding, which takes less than a layer: a first stage that takes more is slow."""
_DIFFERS = 0.005
"""A stage of unknown blocks whose times are this much from the middle gets a factor."""
_STANDS_OUT = 0.1
"""A stage of known blocks, or a micro-batch, gets one from here: noise binds costs to no cut and no step size."""

Floats = npt.NDArray[np.float64]


def fit_stages(steps: Steps, blocks: Sequence[str] | None = None) -> Costs:
    """Fit costs to measured steps at the grain of cells, a time for each stage.

    Args:
        steps: measured ones.
        blocks: the blocks of each stage, `("Etttttttt", "tttttttt", ...)`; those of the program if left out.

    Returns:
        With blocks, costs of the whole model ([model] and [ends]), which `lower` cuts for any schedule. Without, costs
        of a stage as deep as those that ran ([cells]), and a factor for each stage that differs. Stages of known blocks
        and micro-batches get a factor where they stand out.

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
    took = np.median(steps.end[:, gaps.op] - steps.start[:, gaps.op], axis=0) + gaps.gap
    factors = _of_microbatches(steps, gaps, took)
    ticks = _of_cells(steps, gaps, took / _of_ops(steps, gaps, took, factors))
    message = gaps.message if (factors == 1).all() else find_gaps(steps, factors).message
    about = f"medians of {len(steps.numbers)} steps by stage, with the gaps between ops"
    costs = replace(
        plain,
        message={**plain.message, **({"send": message} if message is not None else {})},
        microbatch={"factors": tuple(map(float, factors))} if (factors != 1).any() else {},
        about=about + (f", of: {steps.about}" if steps.about else ""),
    )
    return _of_model(costs, ticks, rows) if all(rows) else _of_stages(costs, ticks)


def _of_microbatches(steps: Steps, gaps: Gaps, took: Floats) -> Floats:
    """`[micro-batch]`: its times over those of the middle one, over all stages and actions; 1 where none stands out."""
    layout = steps.program.layout
    alone, mb = gaps.action != PAIR, microbatches(steps, gaps.op)
    relative = np.full(len(took), np.nan)
    cell = gaps.stage * len(ACTIONS) + gaps.action
    for each in np.unique(cell[alone]):
        members = cell == each
        middle = float(np.median(took[members]))
        relative[members] = took[members] / middle if middle > 0 else np.nan
    factors = np.ones(layout.num_microbatches)
    for each in np.unique(mb[np.isfinite(relative)]):
        factors[each] = round(float(np.nanmedian(relative[mb == each])), 4)
    stands_out = (np.abs(factors - 1) > _STANDS_OUT).any() and (factors > 0).all()
    return factors if stands_out else np.ones_like(factors)


def _of_ops(steps: Steps, gaps: Gaps, took: Floats, factors: Floats) -> Floats:
    """`[computation]`: the factor of its micro-batch; of a pair, the mean of both, by what each takes alone."""
    mb = microbatches(steps, gaps.op)
    of_op = factors[mb]
    pair = np.flatnonzero(gaps.action == PAIR)
    f, b, i, w = (
        float(np.median(took[gaps.action == at])) if (gaps.action == at).any() else 0.0
        for at in map(ACTIONS.index, "fbiw")
    )
    forward = f / (f + (b or i + w)) if f else 0.5
    of_op[pair] = forward * of_op[pair] + (1 - forward) * factors[microbatches(steps, gaps.op[pair] + 1)]
    return np.asarray(of_op)


def _of_cells(steps: Steps, gaps: Gaps, took: Floats) -> Floats:
    """`[stage, action]` -> ticks; NaN where a stage has no such action."""
    num_stages = steps.program.layout.placement.num_stages
    cell = gaps.stage * len(ACTIONS) + gaps.action
    count = np.bincount(cell, minlength=num_stages * len(ACTIONS))
    mean = np.bincount(cell, took, minlength=len(count)) / np.where(count, count, np.nan)
    return np.asarray(mean.reshape(num_stages, len(ACTIONS)))


def _of_stages(costs: Costs, ticks: Floats) -> Costs:
    """[cells]: the middle of all stages; [stage]: the factors of those that differ from it."""
    middle = _middle(ticks)
    return replace(costs, cells=_named(middle, 1), stage=_factors(ticks, np.tile(middle, (len(ticks), 1)), _DIFFERS))


def _factors(ticks: Floats, expected: Floats, least: float) -> dict[int, dict[str, float]]:
    """[stage]: the factor of each stage that takes this much more or less than expected, and the cut it belongs to."""
    took = np.isfinite(ticks) & np.isfinite(expected)
    both = np.where(took, ticks, 0).sum(axis=1), np.where(took, expected, 0).sum(axis=1)
    ratio = [float(one / other) if one > 0 and other > 0 else 1.0 for one, other in zip(*both, strict=True)]
    return {at: {"factor": round(r, 4), "stages": len(ratio)} for at, r in enumerate(ratio) if abs(r - 1) > least}


def _of_model(costs: Costs, ticks: Floats, rows: Sequence[str]) -> Costs:
    """[model], [dense] and [ends]: a layer by the stages of layers alone, the ends by what their stages take more."""
    num = {letter: np.array([row.count(letter) for row in rows], np.int64) for letter in "tdm"}
    layers = num["t"] + num["d"]
    alone = np.array([set(row) <= set(LAYERS) for row in rows])
    mixed = bool(num["t"].any() and num["d"].any())
    usual = num["t"] if mixed else layers
    of_layer = _of_layer(ticks, alone, usual, layers)
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
    ends = _ends(more, rows)
    if sum(ends.get(name, 0) for name in _LOOKUP) > np.nansum(of_layer[[ACTIONS.index(action) for action in "fbi"]]):
        ends = {name: took for name, took in ends.items() if name not in _LOOKUP}
    left = more - np.array([[_end(row, action, ends) for action in ACTIONS] for row in rows])
    left[:, PAIR] = np.nan  # of its two stages one is known
    return replace(
        costs, cells={}, model=model, dense=dense, ends=ends, stage=_factors(ticks, ticks - left, _STANDS_OUT)
    )


def _of_layer(ticks: Floats, alone: Bools, usual: Longs, layers: Longs) -> Floats:
    """`[action]`: what a layer takes: by the stages of layers alone, and by others that take less than those."""
    plain = usual == layers
    found = _of_block(ticks, alone & plain, usual)
    least = (1 - _STANDS_OUT) * np.nansum(usual[:, None] * found, axis=1)
    cheaper = plain & (usual > 0) & (np.nansum(ticks, axis=1) < least)
    return _of_block(ticks, (alone & plain) | cheaper, usual) if (cheaper & ~alone).any() else found


def _ends(more: Floats, rows: Sequence[str]) -> dict[str, int]:
    """What the stages of embedding and head take more than their layers; an MTP block there counts with the head."""
    ends: dict[str, int] = {}
    for row, took in zip(rows, more, strict=True):
        for letter, names in _ENDS.items():
            for action, ticks in zip(ACTIONS, took, strict=True):
                if letter in row and action in names and ticks >= 1:
                    ends[names[action]] = round(ticks)
    return ends


def _end(row: str, action: str, ends: dict[str, int]) -> int:
    """What the embedding and head of a stage add to an action of it."""
    names = (names[action] for letter, names in _ENDS.items() if letter in row and action in names)
    return sum(ends.get(name, 0) for name in names)


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
