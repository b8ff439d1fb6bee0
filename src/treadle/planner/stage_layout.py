"""The layout of a candidate's stages: even in layers, or such that the busiest rank has least to do."""

from __future__ import annotations

from functools import lru_cache

from treadle.costs import Costs
from treadle.ir.blocks import LAYERS
from treadle.passes.cut import cut_evenly
from treadle.planner.balance import balance
from treadle.planner.least_time import block_ticks
from treadle.schedules import family

_STEPS = 100
"""Times are balanced in so many steps of a layer's: jobs whose layers differ by less share a layout, and a Program."""


def layout(
    costs: Costs, blocks: str, schedule: str, pp: int, vpp: int, *, balanced: bool, light: bool = False
) -> tuple[str, ...]:
    """Return the blocks of each stage.

    Args:
        costs: what blocks take.
        blocks: the letters of the whole model.
        schedule: whose placement puts stages on ranks.
        pp: ranks of the pipeline.
        vpp: stages on each.
        balanced: take, of four cuts, the one whose busiest rank has least to do: layers even, the slowest stage as
            fast as possible, the same where a stage needs no layer, the same where the embedding counts as a layer. A
            rank may hold several stages, so none of them is always best.
        light: the embedding counts as a layer (Megatron's account_for_embedding_in_pipeline_split). The first rank,
            which keeps the activations of most micro-batches, then has less to keep.

    """
    num_stages = family(schedule).placement(pp, vpp).num_stages
    if not (balanced or light) and _enough_layers(blocks, num_stages):
        return cut_evenly(blocks, num_stages)
    overlapped = family(schedule).overlapped
    times = {block: block_ticks(costs, block, overlapped=overlapped) for block in set(blocks)}
    unit = max(times.get("t", 0), times.get("d", 0), 1) / _STEPS
    rounded = tuple(sorted((block, round(time / unit)) for block, time in times.items()))
    if light:
        return _cut(blocks, num_stages, _embedding_as_layer(rounded), layer_in_each=_enough_layers(blocks, num_stages))
    return _balanced(blocks, schedule, pp, vpp, rounded)


def _embedding_as_layer(times: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((block, _STEPS if block == "E" else time) for block, time in times)


def _enough_layers(blocks: str, num_stages: int) -> bool:
    """Return True if each stage can have a layer; else embedding and head are stages of their own."""
    return sum(map(blocks.count, LAYERS)) >= num_stages


@lru_cache(maxsize=16384)
def _balanced(blocks: str, schedule: str, pp: int, vpp: int, times: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    placement, of_block = family(schedule).placement(pp, vpp), dict(times)

    def busiest(cut: tuple[str, ...]) -> tuple[int, int]:
        of_stage = [sum(of_block[block] for block in row) for row in cut]
        return max(sum(of_stage[stage] for stage in held) for held in placement.stages), max(of_stage)

    num_stages = placement.num_stages
    cuts = [_cut(blocks, num_stages, times, layer_in_each=False)]
    if _enough_layers(blocks, num_stages):
        whole = [_cut(blocks, num_stages, each, layer_in_each=True) for each in (times, _embedding_as_layer(times))]
        cuts = [whole[0], *cuts, cut_evenly(blocks, num_stages), whole[1]]
    return min(cuts, key=busiest)


@lru_cache(maxsize=4096)
def _cut(blocks: str, num_stages: int, times: tuple[tuple[str, int], ...], *, layer_in_each: bool) -> tuple[str, ...]:
    of_block = dict(times)
    cut = balance(blocks, [of_block[block] for block in blocks], num_stages, layer_in_each=layer_in_each)
    return tuple(blocks[stage.start : stage.stop] for stage in cut)
