"""A time that a step takes at least, whatever the order of its ops: what a rank computes, after what is before it."""

from __future__ import annotations

from treadle.costs import Costs
from treadle.ir.blocks import LAYERS, LETTERS
from treadle.ir.ops import OpPhase, OpRole, where
from treadle.ir.placement import Placement

_COMPUTED = {
    block: tuple(
        tuple(kind.cost_key for kind in where(role=OpRole.COMPUTE) if block in kind.blocks and kind.phase in phases)
        for phases in ((OpPhase.F,), (OpPhase.B, OpPhase.W))
    )
    for block in LETTERS
}
"""The keys of the times that a block computes in its forward and in its backward."""


def least_ticks(
    costs: Costs, blocks: tuple[str, ...], placement: Placement, microbatches: int, recompute: tuple[str, ...]
) -> int:
    """Return a time that no step of this job can beat.

    A rank computes its stages for every micro-batch, one op at a time, and cannot begin before the stages in front of
    its first have computed a forward. The step's end follows.
    """
    of_block = {block: _computed(costs, block, recompute) for block in set("".join(blocks))}
    forward = [sum(of_block[block][0] for block in row) for row in blocks]
    whole = [sum(sum(of_block[block]) for block in row) for row in blocks]
    before = [sum(forward[:stage]) for stage in range(len(blocks))]
    per_pipe = microbatches // placement.num_pipes
    longest = max(
        sum(whole[stage] for stage in held) * per_pipe + min(before[stage] for stage in held)
        for held in placement.stages
    )
    return longest + sum(costs.step.values())


def _computed(costs: Costs, block: str, recompute: tuple[str, ...]) -> tuple[int, int]:
    """Return the ticks that a block computes in its forward and in its backward."""
    times = costs.layer if block in LAYERS else costs.ends

    def ticks(key: str) -> int:
        return costs.dense_part(key) if block == "d" else times.get(key, 0)

    forward, backward = (sum(map(ticks, keys)) for keys in _COMPUTED[block])
    again = sum(_again(costs, block, part) for part in recompute) if block in LAYERS else 0
    return forward, backward + again


def _again(costs: Costs, block: str, part: str) -> int:
    """Return the ticks of a part that is recomputed: its own, or those of its forward."""
    if block == "d":
        own = costs.dense.get(f"{part}_r")
        return own if own is not None else costs.dense_part(f"{part}_f")
    return costs.layer.get(f"{part}_r", costs.layer.get(f"{part}_f", 0))
