"""The makespan of many micro-batches from few equals the simulated one, and no step beats its bound."""

from __future__ import annotations

import random

import pytest

from tests.support.budget import Budget
from treadle.costs import Costs
from treadle.ir.trace import MICROSECONDS
from treadle.lowering import LoweringOptions
from treadle.passes.cut import cut_evenly
from treadle.planner.least_time import least_ticks
from treadle.planner.simulated_step import every_microbatch, simulate_step, simulate_variant
from treadle.planner.structure import Structure, Variant
from treadle.schedules import SCHEDULES, family

PARTS = ("attn_f", "mlp_f", "mlp_b", "attn_b", "mlp_w", "attn_w")
EXCHANGES = ("dispatch_f", "combine_f", "combine_b", "dispatch_b")
ENDS = ("embed_f", "embed_b", "mtp_f", "mtp_b", "mtp_w", "head_f", "head_b", "head_w")

NAMES = tuple(SCHEDULES)


def drawn(rng: random.Random, number: int, *, alike: bool) -> tuple[Structure, Costs]:
    """The next schedule on a small pipeline, with costs of any proportion; `alike` stages have the same blocks."""
    name, pp = NAMES[number % len(NAMES)], rng.choice([2, 4, 6])
    vpp = rng.choice(family(name).vpps or (2, 3))
    moe = rng.random() < 0.5
    num_stages, layers = family(name).placement(pp, vpp).num_stages, rng.choice([1, 2])
    dense = "d" * rng.choice([0, 1])
    model = f"E{dense}{'t' * (layers * num_stages - len(dense))}{'m' * rng.choice([0, 1])}L"
    blocks = ("t" * layers,) * num_stages if alike else cut_evenly(model, num_stages)
    costs = Costs(
        "drawn",
        MICROSECONDS,
        layer={part: rng.randint(0, 1000) for part in PARTS}
        | {part: rng.randint(0, 1000) * rng.choice([0, 1]) for part in EXCHANGES if moe},
        dense={"mlp_f": rng.randint(1, 900)},
        ends={part: rng.randint(1, 500) for part in ENDS},
        message={part: rng.randint(0, 900) for part in ("send", "reduce_grad", "offload", "onload")},
        step={"optimizer": rng.randint(1, 1000)},
    )
    recompute = rng.choice([(), (), ("attn",), ("mlp",)])
    offload, dp = rng.random() < 0.2, 2 if rng.random() < 0.8 else 1
    options = LoweringOptions(
        blocks=blocks, by_layer=True, moe=moe, padded=True, recompute=recompute, offload=offload, dp=dp
    )
    return Structure(name, pp, vpp, options, tuple(sorted(costs.step))), costs


@pytest.mark.slow
def test_makespan_is_linear_in_microbatches_from_2p_on(budget: Budget) -> None:
    """To the tick, in every schedule; where stages are alike the rhythm is there from 2P on."""
    rng = budget.random(0)
    for number in budget.draws(least=6 * len(NAMES)):
        structure, costs = drawn(rng, number, alike=True)
        pp = structure.pp
        microbatches = pp * rng.choice([5, 7, 12])
        variant = Variant(
            rng.random() < 0.5, rng.random() < 0.5, bool(structure.options.recompute) and rng.random() < 0.5
        )
        whole = every_microbatch(structure, microbatches, variant, costs).ticks
        assert simulate_variant(structure, microbatches, variant, costs).ticks == whole, structure
    budget.covered(f"{len(NAMES)} schedules in turn")


@pytest.mark.slow
def test_makespan_is_near_where_stages_differ(budget: Budget) -> None:
    """A rhythm may change late, as another stage's comes through: nearly all draws are exact, and none is far off."""
    rng = budget.random(1)
    exact = []
    for number in budget.draws(least=4 * len(NAMES)):
        structure, costs = drawn(rng, number, alike=False)
        microbatches = structure.pp * rng.choice([5, 15])
        found, whole = (
            how(structure, microbatches, Variant(), costs).ticks for how in (simulate_variant, every_microbatch)
        )
        exact.append(found == whole)
        assert found == pytest.approx(whole, rel=0.03), structure
    assert sum(exact) >= 0.95 * len(exact)
    budget.covered(f"{len(NAMES)} schedules in turn, {sum(exact)} exact")


def test_microbatches_that_are_no_multiple_of_ranks() -> None:
    rng = random.Random(2)
    for _ in range(4):
        structure, costs = drawn(rng, NAMES.index("1f1b"), alike=True)
        found, whole = (how(structure, 41, Variant(), costs).ticks for how in (simulate_variant, every_microbatch))
        assert found == whole


def test_no_step_beats_its_bound(budget: Budget) -> None:
    rng = budget.random(3)
    for number in budget.draws(least=4 * len(NAMES)):
        structure, costs = drawn(rng, number, alike=rng.random() < 0.5)
        name, pp, vpp, microbatches = structure.schedule, structure.pp, structure.vpp, structure.pp * 2
        least = least_ticks(costs, structure.blocks, name, pp, vpp, microbatches, structure.options.recompute)
        assert 0 < least <= simulate_step(structure, microbatches, costs).ticks, structure
    budget.covered(f"{len(NAMES)} schedules in turn")
