"""A time that a step takes at least, whatever the order of its ops: what a rank does, and what is before and after."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from treadle.costs import Costs
from treadle.ir import Kind
from treadle.ir.blocks import LAYERS, LETTERS
from treadle.ir.ops import OpPhase, OpRole, where
from treadle.schedules import family, generate

_PHASES = (OpPhase.F, OpPhase.B, OpPhase.W)


def _keys(role: OpRole, block: str) -> tuple[tuple[str, ...], ...]:
    """Return the keys of a block's times in its forward, dgrad and wgrad."""
    kinds = [kind for kind in where(role=role) if block in kind.blocks]
    return tuple(tuple(kind.cost_key for kind in kinds if kind.phase is phase) for phase in _PHASES)


_COMPUTED = {block: _keys(OpRole.COMPUTE, block) for block in LETTERS}
_EXCHANGED = {block: _keys(OpRole.EXCHANGE, block) for block in LETTERS}


class _Ticks(NamedTuple):
    """Times of a block, or of a stage, for one micro-batch."""

    forward: int = 0
    dgrad: int = 0
    wgrad: int = 0
    again: int = 0
    """Recomputed."""

    exchanged: int = 0
    """With experts, in a forward."""

    exchanged_back: int = 0

    @property
    def computed(self) -> int:
        return self.forward + self.dgrad + self.wgrad + self.again

    @property
    def chain(self) -> int:
        """What waits for each other: forward and dgrad, and exchanges between."""
        return self.forward + self.exchanged + self.dgrad + self.exchanged_back


def least_ticks(
    costs: Costs,
    blocks: tuple[str, ...],
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    recompute: tuple[str, ...],
) -> int:
    """Return a time that no step of this job can beat.

    A rank computes its stages for every micro-batch, one op at a time, and cannot begin before the stages in front of
    its first have done a forward. Unless the schedule overlaps them, it waits for the exchanges of a forward and of a
    dgrad, and has only wgrads and recomputation to do meanwhile. Exchanges run one at a time. Where the backward is not
    split, the stages in front of one do their dgrad after it. The step's end follows.
    """
    placement, waits = family(schedule).placement(pp, vpp), not family(schedule).overlapped
    of_block = {block: _of_block(costs, block, recompute) for block in set("".join(blocks))}
    stages = [_Ticks(*map(sum, zip(_Ticks(), *(of_block[block] for block in row), strict=True))) for row in blocks]
    ahead, after = [0], [0]
    for stage in stages:
        ahead.append(ahead[-1] + stage.forward + stage.exchanged)
        after.append(after[-1] + stage.dgrad + stage.exchanged_back)
    splits = _splits(schedule, pp, vpp)
    beside = costs.layer.get("combine_f", 0) + costs.layer.get("combine_b", 0)  # of the cell before or after
    longest = 0
    for held in placement.stages:
        busy = sum(stages[stage].computed for stage in held)
        if waits:
            busy = max(busy, sum(stages[stage].chain - beside for stage in held))
        busy = max(busy, sum(stages[stage].exchanged + stages[stage].exchanged_back for stage in held))
        drain = 0 if splits else max(0, min(after[stage] - stages[stage].wgrad for stage in held))
        longest = max(longest, busy * (microbatches // placement.num_pipes) + min(ahead[s] for s in held) + drain)
    return longest + sum(costs.step.values())


def model_ticks(costs: Costs, blocks: str, schedule: str, num_stages: int) -> int:
    """Return what all ranks of a pipeline do for one micro-batch at least, together, where nothing is recomputed."""
    of_block = {block: _of_block(costs, block, ()) for block in set(blocks)}
    whole = _Ticks(*map(sum, zip(*(of_block[block] for block in blocks), strict=True)))
    beside = costs.layer.get("combine_f", 0) + costs.layer.get("combine_b", 0)
    return whole.computed if family(schedule).overlapped else max(whole.computed, whole.chain - num_stages * beside)


def block_ticks(costs: Costs, block: str, *, overlapped: bool) -> int:
    """Return what a stage takes for a block of a micro-batch; `overlapped`: exchanges run beside what is computed."""
    if not overlapped:
        return costs.of_block(block)
    times = _of_block(costs, block, ())
    return max(times.computed, times.exchanged + times.exchanged_back)


@lru_cache(maxsize=1024)
def _splits(schedule: str, pp: int, vpp: int) -> bool:
    """True if a schedule splits some backward into dgrad and wgrad."""
    rows = generate(schedule, pp=pp, vpp=vpp, microbatches=2 * pp).rows
    return any(action.kind is Kind.I for row in rows for cell in row for action in cell.actions)


def _of_block(costs: Costs, block: str, recompute: tuple[str, ...]) -> _Ticks:
    times = costs.layer if block in LAYERS else costs.ends

    def ticks(key: str) -> int:
        return costs.dense_part(key) if block == "d" else times.get(key, 0)

    forward, dgrad, wgrad = (sum(map(ticks, keys)) for keys in _COMPUTED[block])
    exchanged, exchanged_back, _ = (sum(map(ticks, keys)) for keys in _EXCHANGED[block])
    again = sum(_again(costs, block, part) for part in recompute) if block in LAYERS else 0
    return _Ticks(forward, dgrad, wgrad, again, exchanged, exchanged_back)


def _again(costs: Costs, block: str, part: str) -> int:
    """Return the ticks of a part that is recomputed: its own, or those of its forward."""
    if block == "d":
        own = costs.dense.get(f"{part}_r")
        return own if own is not None else costs.dense_part(f"{part}_f")
    return costs.layer.get(f"{part}_r", costs.layer.get(f"{part}_f", 0))
