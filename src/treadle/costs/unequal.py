"""Micro-batches that are not alike: what multiplies their times and what they save, by the costs' [microbatch].

With `lengths`, a micro-batch of x times the reference length takes x times as long, and of attention's time the share
`quadratic` grows with x squared. What it saves and moves grows with x.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from treadle.costs.costs import PHASES, Costs
from treadle.ir.blocks import LAYERS
from treadle.ir.ops import ACTIONS, KIND_OF, OpKind, OpPart
from treadle.ir.program import Layout


def mb_factors(layout: Layout, costs: Costs, row: str) -> npt.NDArray[np.float64]:
    """`[micro-batch, kind]` -> what multiplies a time of a stage, pipe after pipe; without rows where all are alike.

    `row` is the stage's blocks, empty where they are not known.

    Raises:
        ValueError: the costs are about another number of micro-batches.

    """
    if not costs.microbatch or layout.is_update:
        return np.empty((0, len(OpKind)))
    _check_number(layout.num_microbatches, costs)
    if "factors" in costs.microbatch:
        factors = np.array(costs.microbatch["factors"])
        return np.repeat(factors[:, None], len(OpKind), axis=1)
    relative = _relative(costs)
    quadratic = costs.microbatch.get("quadratic", 0.0)
    shares = np.zeros(len(OpKind))  # of the time that grows with the square
    shares[[kind for kind in OpKind if kind.part is OpPart.ATTN]] = quadratic
    for kind in ACTIONS:
        shares[kind] = quadratic * _attention_share(costs, kind.cost_key, row)
    return relative[:, None] * (1 - shares) + (relative**2)[:, None] * shares


def mb_saved(num_microbatches: int, costs: Costs) -> tuple[float, ...]:
    """Return what multiplies the bytes that each micro-batch saves; empty where all are alike."""
    if not costs.microbatch:
        return ()
    _check_number(num_microbatches, costs)
    if "factors" in costs.microbatch:
        return tuple(costs.microbatch.get("saved_factors", costs.microbatch["factors"]))
    return tuple(float(each) for each in _relative(costs))


def _relative(costs: Costs) -> npt.NDArray[np.float64]:
    """Lengths, in lengths that the costs are about."""
    lengths = np.array(costs.microbatch["lengths"])
    relative: npt.NDArray[np.float64] = lengths / costs.microbatch.get("reference", lengths.mean())
    return relative


def _attention_share(costs: Costs, action: str, row: str) -> float:
    """The share of a stage's action that is attention of its layers.

    Where the blocks are not known it is that of a layer; where the costs do not tell attention from the rest it is half
    of a layer.
    """
    if not row:
        whole = costs.of_layer(action) if costs.says_layers else costs.cell(action)
        return min(1.0, _attention(costs, action, "t", whole) / whole) if whole else 0.5
    of_layers = {block: costs.of_layer(action, block) for block in set(row) & set(LAYERS)}
    attention = sum(_attention(costs, action, block, of_layers[block]) for block in row if block in of_layers)
    whole = costs.of_stage(action, row)
    return min(1.0, attention / whole) if whole else 0.0


def _attention(costs: Costs, action: str, block: str, of_layer: int) -> float:
    """Ticks of attention in an action of a layer."""
    if not costs.has_parts:
        return of_layer / 2
    parts = [KIND_OF[OpPart.ATTN, phase].cost_key for phase in PHASES[action]]
    return sum(costs.dense_part(part) if block == "d" else costs.layer.get(part, 0) for part in parts)


def _check_number(num_microbatches: int, costs: Costs) -> None:
    given = costs.microbatch.get("factors", costs.microbatch.get("lengths", ()))
    if len(given) != num_microbatches:
        raise ValueError(
            f"costs {costs.name!r} have {len(given)} micro-batches in [microbatch], and the step has "
            f"{num_microbatches}; give one number for each, or leave [microbatch] out"
        )
