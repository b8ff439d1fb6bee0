"""The solver's optimum is that of all orders there are, on steps small enough to try them all."""

from __future__ import annotations

import random

import pytest

from tests.synthesize.every_order import Tiny
from treadle.costs import Costs, parse
from treadle.ir import Kind, Placement
from treadle.synthesize import MemoryLimits, SolverOptions, Synthesis, synthesize_schedule

SPLIT, WHOLE, EITHER = ((Kind.I, Kind.W),), ((Kind.B,),), ((Kind.I, Kind.W), (Kind.B,))


def _draw(
    seed: int, placement: Placement, num_mb: int, ways: tuple[tuple[Kind, ...], ...], *, alike: bool
) -> tuple[Tiny, Costs]:
    draw = random.Random(seed)
    f, i, w = (draw.randint(1, 6) for _ in range(3))
    b = i + w if ways is not EITHER else max(i, i + w - draw.randint(1, 2))
    send = draw.choice((0, 1, 2, 9))
    of_rank = [draw.choice((1, 2)) for _ in range(placement.pp)]
    factors = [of_rank[placement.holder(stage)[0]] for stage in range(placement.num_stages)]
    of_mb = [1] * num_mb if alike else [draw.choice((1, 2, 3)) for _ in range(num_mb)]
    lines = ['name = "drawn"', 'unit = "unit"', "[cells]", f"f = {f}", f"i = {i}", f"w = {w}", f"b = {b}"]
    lines += ["[message]", f"send = {send}"]
    lines += [line for n, factor in enumerate(factors) for line in (f"[stage.{n}]", f"factor = {factor}")]
    if not alike:
        lines += ["[microbatch]", f"factors = {of_mb}"]
    room = draw.choice((None, placement.vpp, placement.vpp + 1))
    base = {Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: b}
    ticks = {
        (kind, stage, mb): ticks * factors[stage] * of_mb[mb]
        for kind, ticks in base.items()
        for stage in range(placement.num_stages)
        for mb in range(num_mb)
    }
    tiny = Tiny(placement, num_mb, ticks, tuple(send * factor for factor in of_mb), room, ways)
    return tiny, parse("\n".join(lines))


def _synthesize(tiny: Tiny, costs: Costs, *, whole: bool) -> Synthesis:
    return synthesize_schedule(
        pp=tiny.placement.pp,
        placement=tiny.placement,
        microbatches=tiny.num_mb,
        costs=costs,
        limits=MemoryLimits(max_activations=tiny.room),
        whole=whole,
        solver=SolverOptions(time_limit_s=60, workers=1),
    )


CASES = {
    "split": ("loop", 2, 2, SPLIT, True),
    "split, three ranks": ("loop", 3, 2, SPLIT, True),
    "whole": ("loop", 2, 3, WHOLE, True),
    "whole where faster": ("loop", 2, 2, EITHER, True),
    "micro-batches that differ": ("loop", 2, 3, WHOLE, False),
    "v": ("v", 2, 1, SPLIT, True),
    "two chunks": ("wrapped", 2, 1, SPLIT, True),
    "two chunks, micro-batches that differ": ("v", 1, 2, WHOLE, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_proven_order_is_the_best_of_all(case: str) -> None:
    name, pp, num_mb, ways, alike = CASES[case]
    vpp = 1 if name == "loop" else 2
    placement = Placement.v(pp) if name == "v" else Placement.loop(pp, vpp)
    for seed in range(4):
        tiny, costs = _draw(seed, placement, num_mb, ways, alike=alike)
        found = _synthesize(tiny, costs, whole=ways is WHOLE)
        assert found.proven, (case, seed)
        assert found.clock.show(found.makespan) == tiny.shortest(), (case, seed)
