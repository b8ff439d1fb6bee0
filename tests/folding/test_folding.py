"""A folded mesh is the unfolded one to the tick: every op of every GPU; and what cannot be folded is refused."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from types import ModuleType

import numpy as np
import pytest

import treadle
from treadle.costs import Costs, load_costs
from treadle.folding import folded_metrics, folded_path, folding, stragglers
from treadle.folding.folded_metrics import measure_folded
from treadle.folding.folding import Folded, ReplicaKinds, fold
from treadle.folding.step_tail import why_not
from treadle.ir.ops import OpKind
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.lowering import LoweringOptions, lower
from treadle.schedules import SCHEDULES
from treadle.simulator import measure, simulate, slowness
from treadle.simulator.slowness import Factors, Stragglers, random_factors

DEEPSEEK = load_costs("deepseek-v3-h800")
STEP_ENDS = (
    (),
    ("optimizer",),
    ("clip", "optimizer"),
    ("optimizer", "gather_params"),
    ("clip", "optimizer", "gather_params"),
)


@dataclass(frozen=True)
class Draw:
    """A random mesh."""

    name: str
    schedule: treadle.Schedule
    costs: Costs
    options: LoweringOptions
    slowness: Factors | None

    @property
    def num_ranks(self) -> int:
        return self.schedule.pp * self.options.ep * self.options.dp

    def folded(self) -> Folded:
        program = lower(self.schedule, self.costs, replace(self.options, every_gpu=False))
        return fold(program, self.costs, ep=self.options.ep, dp=self.options.dp, slowness=self.slowness)


CHOSEN = (*range(40), *range(90, 94))
REST = tuple(sorted({*range(100)} - {*CHOSEN}))
"""Numbers of the draws that are for every change, and of the others."""


def draw(number: int) -> Draw:
    """The last ten of a hundred are large, up to 2,048 GPUs."""
    random = Random(number)
    name = [*SCHEDULES][number % len(SCHEDULES)]
    pp = random.choice((2, 4, 6) if number < 90 else (4, 8))
    most = 96 if number < 90 else 2048 if number < 92 else 1024
    schedule = treadle.generate(name, pp=pp, microbatches=2 * pp * random.choice((1, 2) if number < 90 else (1,)))
    columns = most // pp
    by_layer = random.random() < 0.85
    moe = by_layer and random.random() < 0.75
    ep = random.choice([e for e in (1, 2, 3, 4, 8, 16, 64) if e <= columns // 2]) if moe else 1
    dp = columns // ep if number >= 90 else random.randint(1, max(1, columns // ep))
    costs = draw_costs(random, schedule)
    stages = schedule.placement.num_stages
    layers = random.choice((1, 2, tuple(random.randint(1, 3) for _ in range(stages)))) if by_layer else None
    options = LoweringOptions(
        layers=layers,
        moe=moe,
        dense=random.choice((None, None, 1, 3)) if layers is not None else None,
        embedding=random.choice((None, True)) if by_layer else None,
        head=random.choice((None, True)) if by_layer else None,
        padded=by_layer and random.random() < 0.3,
        offload=by_layer and random.random() < 0.2,
        recompute=random.choice(((), ("attn",), ("mlp",))) if by_layer else (),
        tied=((0, -1),) if by_layer and random.random() < 0.3 else (),
        hold=random.choice((True, False)) if by_layer else None,
        early=False if by_layer else None,
        early_recompute=False if by_layer else None,
        ep=ep,
        dp=dp,
        every_gpu=random.random() < 0.5,
    )
    if isinstance(options.dense, int) and isinstance(layers, int):
        options = replace(options, dense=min(options.dense, layers * stages))
    return Draw(name, schedule, costs, options, draw_slowness(random, pp * ep * dp, number))


def draw_costs(random: Random, schedule: treadle.Schedule) -> Costs:
    step = {name: random.randint(0, 30_000_000) for name in random.choice(STEP_ENDS)}
    message = {
        **DEEPSEEK.message,
        "reduce_grad": random.randint(0, 60_000_000),
        "reduce_tied": random.randint(0, 9_000_000),
    }
    microbatch = {"factors": [random.choice((0.5, 1.0, 1.37)) for _ in range(schedule.num_microbatches)]}
    return replace(
        DEEPSEEK,
        step=step,
        message=message,
        dense={"mlp_f": random.randint(1, 9_000_000)} if random.random() < 0.3 else {},
        ends={"embed_f": 777, "head_f": 9_000_001} if random.random() < 0.4 else {},
        stage={1: {"factor": 1.23}} if random.random() < 0.3 else {},
        microbatch=microbatch if random.random() < 0.2 else {},
    )


def draw_slowness(random: Random, num_ranks: int, number: int) -> Factors | None:
    few = Stragglers(share=random.choice((0.001, 0.02, 0.2)), factor=random.choice((1.0001, 1.2, 3.0)))
    rng = np.random.default_rng(number)
    levels = rng.choice([0.9, 1.0, 1.1, 1.7], num_ranks, p=[0.03, 0.9, 0.05, 0.02])
    return random.choice(
        (
            few.factors(num_ranks, number),
            few.factors(num_ranks, number),
            levels,
            random_factors(num_ranks, 0.1, number),
            None,
        )
    )


def unfolded(drawn: Draw) -> Trace:
    program = lower(drawn.schedule, drawn.costs, replace(drawn.options, every_gpu=True))
    return simulate(program, drawn.costs, slowness=0.0 if drawn.slowness is None else drawn.slowness)


def ends_of(trace: Trace) -> np.ndarray:
    ends = np.zeros(trace.program.num_ranks, np.int64)
    np.maximum.at(ends, trace.program.lane_rank[trace.program.lane_of], trace.end)
    return ends


def check_every_op(folded: Folded, whole: Trace) -> None:
    """Copies of a pipeline stand one behind the other in the unfolded Program, and in that of a kind of replica."""
    num_columns = folded.mesh.num_columns
    times = [column.reshape(num_columns, -1) for column in (whole.start, whole.end)]
    edges = [*folded.kinds.first.tolist(), folded.kinds.num_rows]
    for kind, (first, after) in enumerate(pairwise(edges)):
        trace = folded.trace(kind)
        mine = [column.reshape(after - first, -1) for column in (trace.start, trace.end)]
        for column in np.flatnonzero((folded.kinds.row >= first) & (folded.kinds.row < after)):
            for one, all_of_them in zip(mine, times, strict=True):
                assert np.array_equal(one[folded.kinds.row[column] - first], all_of_them[column])


@pytest.mark.parametrize("number", [*CHOSEN, *(pytest.param(n, marks=pytest.mark.nightly) for n in REST)])
def test_folded_mesh_equals_the_unfolded_one_to_the_tick(number: int) -> None:
    drawn = draw(number)
    whole, folded = unfolded(drawn), drawn.folded()
    assert folded.num_ranks == whole.program.num_ranks == drawn.num_ranks
    assert np.array_equal(folded.ends, ends_of(whole))
    assert folded.makespan == whole.makespan
    assert folded.num_ops == whole.program.num_ops
    check_every_op(folded, whole)


@pytest.mark.parametrize("number", CHOSEN[:40:3])
def test_folded_metrics_and_path_are_those_of_the_unfolded_mesh(number: int) -> None:
    drawn = draw(number)
    whole, folded = unfolded(drawn), drawn.folded()
    assert measure_folded(folded) == measure(whole)
    path = folded_path.folded_path(folded)
    assert path.length == folded.makespan
    assert path.gaps == 0
    assert sum(path.by_rank.values()) == sum(path.by_kind.values()) == path.length


def test_draws_cover_what_can_differ() -> None:
    draws = [draw(number) for number in CHOSEN]
    assert {drawn.name for drawn in draws} == set(SCHEDULES)
    assert max(drawn.num_ranks for drawn in draws) == 2048
    assert {len(drawn.costs.step) for drawn in draws} == {0, 1, 2, 3}
    assert {drawn.options.ep > 1 for drawn in draws} == {bool(drawn.options.tied) for drawn in draws} == {True, False}
    assert sum(drawn.num_ranks > 500 for drawn in draws) == 4


@pytest.mark.parametrize("dp", [3, 300], ids=["plain Python", "compiled"])
def test_halves_of_a_tick_are_rounded_as_in_the_unfolded_mesh(dp: int) -> None:
    odd = replace(
        DEEPSEEK,
        layer={name: 2 * number + 1 for number, name in enumerate(DEEPSEEK.layer)},
        message={"send": 3, "reduce_grad": 5},
        step={"clip": 1, "optimizer": 7, "gather_params": 9},
    )
    options = LoweringOptions(layers=1, ep=2, dp=dp, moe=True)
    drawn = Draw("1f1b", treadle.generate("1f1b", pp=2, microbatches=4), odd, options, np.ones(4 * dp))
    assert drawn.slowness is not None
    drawn.slowness[1::2] = 1.5
    whole, folded = unfolded(drawn), drawn.folded()
    assert np.array_equal(folded.ends, ends_of(whole))
    check_every_op(folded, whole)


@pytest.mark.parametrize("module", [folding, folded_metrics, folded_path, stragglers, slowness])
def test_examples_run(module: ModuleType) -> None:
    ran = doctest.testmod(module, extraglobs={"treadle": treadle, "np": np})
    assert ran.attempted > 0
    assert ran.failed == 0


def mesh_program() -> Program:
    options = LoweringOptions(layers=1, ep=2, dp=2, moe=True)
    return lower(treadle.generate("1f1b", pp=2, microbatches=4), DEEPSEEK, options)


def waiting_for(program: Program, waiter: int, wanted: int) -> Program:
    at = program.dep_ptr[waiter + 1]
    ptr = program.dep_ptr + (np.arange(len(program.dep_ptr)) > waiter)
    return replace(program, dep_ptr=ptr, dep=np.insert(program.dep, at, wanted))


def test_a_step_that_waits_for_a_reduction_in_its_middle_is_refused() -> None:
    program = mesh_program()
    assert why_not(program) is None
    last = int(np.flatnonzero(program.kind == OpKind.ATTN_W)[-1])
    reduction = int(np.flatnonzero(program.kind == OpKind.REDUCE_GRAD)[0])
    coupled = waiting_for(program, last, reduction)
    assert "waits in the middle of the step for reduce_grad .0 on rank 0" in (why_not(coupled) or "")
    with pytest.raises(ValueError, match=r"cannot be folded: .* simulate it unfolded"):
        fold(coupled, DEEPSEEK, ep=2, dp=2)


def test_an_op_behind_a_reduction_on_its_lane_is_refused() -> None:
    program = mesh_program()
    kind = program.kind.copy()
    kind[np.flatnonzero(kind == OpKind.REDUCE_GRAD)[-1]] = OpKind.GC
    assert "is no reduction at the step's end" in (why_not(replace(program, kind=kind)) or "")


def test_a_program_of_every_gpu_is_refused() -> None:
    options = LoweringOptions(layers=1, ep=2, dp=2, every_gpu=True, moe=True)
    program = lower(treadle.generate("1f1b", pp=2, microbatches=4), DEEPSEEK, options)
    with pytest.raises(ValueError, match="of all 8 GPUs already"):
        fold(program, DEEPSEEK, ep=2, dp=2)


@pytest.mark.parametrize(
    ("slowness", "told"),
    [
        (np.ones(7), "a factor for each of 8 ranks"),
        (np.zeros(8), "finite numbers above 0"),
        (np.full(8, np.nan), "finite numbers above 0"),
    ],
)
def test_factors_that_are_not_one_for_each_rank_are_refused(slowness: Factors, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fold(mesh_program(), DEEPSEEK, ep=2, dp=2, slowness=slowness)
    whole = lower(
        treadle.generate("1f1b", pp=2, microbatches=4),
        DEEPSEEK,
        LoweringOptions(layers=1, ep=2, dp=2, every_gpu=True, moe=True),
    )
    with pytest.raises(ValueError, match=told):
        simulate(whole, DEEPSEEK, slowness=slowness)


def test_replicas_with_the_same_set_of_columns_are_one_kind() -> None:
    columns = np.array([[1, 1], [2, 1], [1, 1], [1, 1], [2, 1], [1, 1], [2, 1], [2, 1], [1, 1], [1, 1]], float)
    kinds = ReplicaKinds.of(columns, together=2)
    assert kinds.members == (((1, 1),), ((2, 1),), ((1, 1), (2, 1)))
    assert kinds.row.tolist() == [2, 3, 0, 0, 3, 2, 1, 1, 0, 0]


def test_columns_that_do_not_meet_are_folded_one_by_one() -> None:
    options = LoweringOptions(layers=1, moe=False, dp=6)
    factors = np.ones(12)
    factors[[1, 3, 8]] = 1.5
    folded = Draw("1f1b", treadle.generate("1f1b", pp=2, microbatches=4), DEEPSEEK, options, factors).folded()
    assert folded.num_kinds == 3
    assert folded.about.endswith("folded: 3 different of 6 pipelines")


def test_a_mesh_too_large_for_one_program_is_refused_and_folded() -> None:
    program = mesh_program()
    with pytest.raises(ValueError, match=r"numbers its ops up to .* or fold those that are alike"):
        lower(
            treadle.generate("1f1b", pp=2, microbatches=4),
            DEEPSEEK,
            LoweringOptions(layers=1, moe=True, ep=2, dp=2**28, every_gpu=True),
        )
    assert fold(program, DEEPSEEK, ep=2, dp=2**16).num_ranks == 2**18
