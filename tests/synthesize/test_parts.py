"""The parts of the search: bounds hold, orders by rule keep limits, windows and patterns stay sound."""

from __future__ import annotations

from dataclasses import replace

import pytest

import treadle
from tests.synthesize.conftest import WorkClock
from tests.synthesize.costs_of import PUBLISHED, cell_costs
from treadle.costs import Costs
from treadle.ir import Placement
from treadle.synthesize import MemoryLimits, SolverOptions
from treadle.synthesize import order_search as search_module
from treadle.synthesize import repair as repair_module
from treadle.synthesize.evaluate import as_order, as_schedule, start_times, weigh
from treadle.synthesize.greedy import greedy_orders
from treadle.synthesize.lower_bound import lower_bound
from treadle.synthesize.make_problem import fewer_microbatches, make_problem
from treadle.synthesize.order_search import OrderSearch
from treadle.synthesize.ours import our_schedules
from treadle.synthesize.problem import Budget, StepProblem
from treadle.synthesize.repair import repair
from treadle.synthesize.solver import SolverRuns
from treadle.synthesize.stretch import few_microbatches, stretched

SLOW_STAGE = cell_costs(18, 18, 9, send=1, more="[stage.2]\nfactor = 1.2")
LONG_MESSAGES = cell_costs(2, 3, 1, send=5)


def _problem(
    placement: Placement, num_mb: int, costs: Costs = PUBLISHED, *, room: int | None = None, whole: bool = False
) -> StepProblem:
    limits = MemoryLimits(max_activations=room)
    return make_problem(placement, num_mb, costs, limits=limits, whole=whole)


STEPS = {
    "loop": lambda: _problem(Placement.loop(4), 8),
    "tight": lambda: _problem(Placement.loop(4), 8, SLOW_STAGE, room=2),
    "whole": lambda: _problem(Placement.loop(4), 6, LONG_MESSAGES, whole=True),
    "v": lambda: _problem(Placement.v(4), 8, LONG_MESSAGES, room=5),
    "small v": lambda: _problem(Placement.v(2), 8, LONG_MESSAGES, room=5),
    "two chunks": lambda: _problem(Placement.loop(2, 2), 8, SLOW_STAGE, room=3),
    "two pipes": lambda: _problem(Placement.bidirectional(4), 8),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_order_beats_the_bound(name: str) -> None:
    problem = STEPS[name]()
    bound = lower_bound(problem) * problem.scale
    ours = [weighed for schedule in our_schedules(problem) if (weighed := weigh(problem, schedule)) is not None]
    by_rule = [weigh(problem, as_schedule(problem, order)) for order in greedy_orders(problem)]
    assert all(weighed.makespan >= bound for weighed in ours)
    assert all(weighed is not None and weighed.makespan >= bound for weighed in by_rule)
    assert by_rule or ours


@pytest.mark.parametrize("name", STEPS)
def test_an_order_as_a_schedule_is_the_same_order(name: str) -> None:
    problem = STEPS[name]()
    for order in greedy_orders(problem):
        schedule = as_schedule(problem, order)
        assert treadle.verify(schedule, max_activations=problem.limits.max_activations).clean
        assert as_order(problem, schedule) == order
        starts = start_times(problem, order)
        ends = [starts[number] + problem.tasks[number].ticks for number in starts]
        weighed = weigh(problem, schedule)
        assert weighed is not None
        assert max(ends) * problem.scale == weighed.makespan


def test_whole_backwards_are_split_into_their_halves() -> None:
    problem = _problem(Placement.loop(2), 4)
    order = as_order(problem, treadle.generate("1f1b", pp=2, microbatches=4))
    assert order is not None
    apart, whole = as_schedule(problem, order), treadle.generate("1f1b", pp=2, microbatches=4)
    assert apart.num_cells == whole.num_cells + 8
    split, kept = weigh(problem, apart), weigh(problem, whole)
    assert split is not None
    assert kept is not None
    assert split.makespan <= kept.makespan


def _one_at_a_time(problem: StepProblem) -> tuple[Budget, ...]:
    """Room for one micro-batch on a rank."""
    return tuple(replace(budget, limit=problem.placement.vpp) for budget in problem.budgets)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tight", "small v", "two chunks"])
def test_repair_only_improves(name: str, by_work: WorkClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_module, "_WINDOW_S", 0.02)
    problem = STEPS[name]()
    serial = as_schedule(problem, next(iter(greedy_orders(replace(problem, budgets=_one_at_a_time(problem))))))
    order = as_order(problem, serial)
    assert order is not None
    start = weigh(problem, as_schedule(problem, order))
    assert start is not None
    told: list[int] = []
    runs = SolverRuns(SolverOptions(120, workers=1, seed=1), by_work.now)
    enough = max(lower_bound(problem), start.makespan * 9 // (10 * problem.scale))  # where it may stop
    found = repair(problem, order, start.makespan, runs, bound=enough, until_s=120, report=told.append)
    weighed = weigh(problem, as_schedule(problem, found))
    assert weighed is not None
    assert [start.makespan, *told] == sorted({start.makespan, *told}, reverse=True)
    assert weighed.makespan == min([start.makespan, *told])
    assert told, "an order that runs one micro-batch at a time can be improved"


def test_a_middle_is_repeated_without_more_memory() -> None:
    problem = _problem(Placement.loop(4), 40, SLOW_STAGE, room=4)
    few = few_microbatches(problem, 100)
    assert few == 8
    small = fewer_microbatches(problem, 12)
    order = min(
        greedy_orders(small), key=lambda order: getattr(weigh(small, as_schedule(small, order)), "makespan", 1 << 60)
    )
    before = weigh(small, as_schedule(small, order))
    found = [weighed for o in stretched(problem, small, order) if (weighed := weigh(problem, as_schedule(problem, o)))]
    assert before is not None
    assert found
    period = max(sum(t.ticks for t in problem.tasks if t.rank == r and t.action.mb == 0) for r in range(4))
    best = min(weighed.makespan for weighed in found)
    assert best == before.makespan + 28 * period * problem.scale
    assert max(treadle.verify(found[0].schedule).peak_activations) <= 4


def test_few_microbatches_are_none_where_they_differ() -> None:
    factors = ", ".join(["1", "2"] * 20)
    problem = _problem(Placement.loop(2), 40, cell_costs(1, 1, 1, more=f"[microbatch]\nfactors = [{factors}]"))
    assert few_microbatches(problem, 100) is None
    assert few_microbatches(_problem(Placement.loop(2), 2), 100) is None


@pytest.mark.slow
@pytest.mark.usefixtures("by_work")
@pytest.mark.parametrize(("most_exact", "room", "limit_s"), [(60, 3, 0.1), (100, 4, 0.2)])
def test_a_step_past_what_is_solved_at_once_is_repeated_and_repaired(
    most_exact: int, room: int, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first the pattern of few micro-batches is the best that is found, in the second its repair."""
    monkeypatch.setattr(search_module, "MOST_EXACT", most_exact)
    problem = _problem(Placement.loop(4), 12, SLOW_STAGE, room=room)
    assert len(problem.tasks) > most_exact
    by_rule = [weigh(problem, as_schedule(problem, order)) for order in greedy_orders(problem)]
    found = OrderSearch(problem, SolverOptions(limit_s, workers=1)).run()
    assert found.source in ("pattern", "repair")
    assert found.ours == ("zb-h1" if room == 4 else None)
    assert all(found.makespan < weighed.makespan for weighed in by_rule if weighed is not None)
    assert found.lower_bound <= found.makespan
    assert found.makespan < (found.ours_makespan or problem.work * problem.scale)
    assert treadle.verify(found.schedule, max_activations=room).clean
