"""The protocol of weight updates, explored: with its rules no state is wrong, without them the known faults are found.

More than is done here: `python -m tests.support.update.model_checker --ranks 2 --workers 2 --updates 2 --crashes 2`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.budget import Budget
from tests.support.update import world
from tests.support.update.model_checker import explore
from tests.support.update.world import LEASE_NS, RULES, Sizes
from treadle.update.protocol import attempt, coordinator_decisions, leases, rank, worker_decisions
from treadle.update.protocol.record import Record, committed
from treadle.update.protocol.update_messages import Grant, Status
from treadle.update.protocol.worker_decisions import WorkerState

LEASED = Sizes(leases=True, least=1, updates=1, crashes=0, recoveries=0)

SMALL = {
    "crash": Sizes(updates=1, crashes=1),
    "replaced": Sizes(updates=1, crashes=0, replacements=1),
    "mistake": Sizes(updates=1, crashes=0, mistakes=1),
    "two updates": Sizes(updates=2, crashes=0),
    "one worker": Sizes(ranks=1, workers=1, updates=1, crashes=1, replacements=1),
    "restored": Sizes(updates=2, crashes=0, restores=1),
    "a child": Sizes(updates=1, crashes=0, children=1),
    "a source without a worker": Sizes(ranks=2, workers=1, sources=1, updates=1, crashes=1),
    "fewer ranks, one a source": Sizes(ranks=3, workers=2, sources=1, updates=1, crashes=0, mistakes=1),
    "leases, a worker is cut off": replace(LEASED, ticks=2, cuts=1, reports=1),
    "leases, all are needed": replace(LEASED, least=None, ticks=2, reports=1),
    "leases, a crash": replace(LEASED, crashes=1, ticks=1),
    "leases, one worker, a crash": replace(LEASED, ranks=1, workers=1, crashes=1, ticks=2, reports=1),
    "leases, fewer ranks": replace(LEASED, mistakes=1, ticks=2),
    "leases, replaced": replace(LEASED, replacements=1, ticks=2),
    "leases, cut off and recovered": replace(LEASED, cuts=1, recoveries=1, ticks=1),
    "leases, two coordinators": replace(LEASED, ranks=1, workers=1, updates=2, doubles=1, ticks=2),
    "leases, restored": replace(LEASED, updates=2, restores=1, ticks=1),
    "leases, a child": replace(LEASED, children=1, ticks=2),
    "agents": Sizes(ranks=2, workers=1, sources=1, agents=1, updates=1, crashes=1, reports=1),
    "leases, a source without a worker": replace(LEASED, ranks=3, sources=1, cuts=1, ticks=2),
}


@pytest.mark.parametrize("name", SMALL)
def test_no_state_is_wrong(name: str, budget: Budget) -> None:
    found = explore(SMALL[name])
    budget.covered(f"all {found.states} states")
    assert not found.wrong, "\n".join((found.wrong, *found.trace))
    assert found.whole
    assert found.states > 200


@pytest.mark.slow
def test_no_state_of_all_kinds_of_trouble_together_is_wrong(budget: Budget) -> None:
    """There are too many of them: the nearest are explored, as many as the budget allows."""
    found = explore(Sizes(replacements=1, mistakes=1, restores=1, children=1), round(NEAREST * budget.factor))
    budget.covered(f"the nearest {found.states} states")
    assert not found.wrong, "\n".join((found.wrong, *found.trace))
    assert found.whole or found.states > NEAREST


@pytest.mark.slow
def test_no_state_of_leases_and_all_kinds_of_trouble_together_is_wrong(budget: Budget) -> None:
    """Late reports and grants, cut off workers, crashes and a second coordinator: the nearest states of these."""
    sizes = replace(LEASED, updates=2, crashes=1, ticks=3, reports=3, cuts=1, doubles=1, recoveries=1, children=1)
    found = explore(sizes, round(NEAREST * budget.factor))
    budget.covered(f"the nearest {found.states} states")
    assert not found.wrong, "\n".join((found.wrong, *found.trace))
    assert found.states > NEAREST


AGENTS = {
    "agents that fill each other": Sizes(ranks=3, workers=2, sources=1, agents=2, updates=1, crashes=1, reports=1),
    "agents under leases": replace(LEASED, ranks=3, sources=1, agents=2, crashes=1, ticks=1, reports=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_no_state_of_agents_that_come_and_go_is_wrong(name: str, budget: Budget) -> None:
    found = explore(AGENTS[name], round(NEAREST * budget.factor))
    budget.covered(f"the nearest {found.states} states")
    assert not found.wrong, "\n".join((found.wrong, *found.trace))
    assert found.states > NEAREST


def test_a_worker_whose_agent_is_gone_is_missed_where_nothing_looks_for_members(
    monkeypatch: pytest.MonkeyPatch, budget: Budget
) -> None:
    monkeypatch.setattr(attempt.Attempt, "_refuse_set", lambda self, record, leases: None)
    found = explore(AGENTS["agents that fill each other"])
    budget.covered(f"{found.wrong}, {len(found.trace)} steps, {found.states} states")
    assert found.wrong.startswith("committed: worker")


NEAREST = 6000

FAULTS = {
    "fewer ranks than workers": ("members", Sizes(updates=1, crashes=0, mistakes=1), "committed: worker 1"),
    "a replaced worker serves on": ("slots", Sizes(updates=1, crashes=0, replacements=1), "committed: worker"),
    "ranks keep their connection": ("slots", Sizes(updates=0, crashes=0, replacements=1, recoveries=2), "told right"),
    "another run's log": ("log ids", Sizes(updates=0, crashes=0, mistakes=1), "told right: recover"),
    "two logs, the same workers": ("log ids", Sizes(updates=1, crashes=0, mistakes=1, recoveries=0), ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_where_the_rule_is_left_out(name: str, budget: Budget) -> None:
    rule, sizes, wrong = FAULTS[name]
    found = explore(replace(sizes, rules=RULES - {rule}))
    budget.covered(f"{found.wrong}, {len(found.trace)} steps, {found.states} states")
    assert found.wrong
    assert found.wrong.startswith(wrong)
    assert found.trace
    assert not explore(sizes).wrong


def goes_back_though_it_voted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose rank is gone."""
    release = worker_decisions.release

    def eager(state: WorkerState, *, can_restore: bool) -> worker_decisions.Moves:
        voted = state.state == "staged"
        return release(replace(state, state="loading") if voted else state, can_restore=can_restore)

    monkeypatch.setattr(worker_decisions, "release", eager)


def aborts_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not know the decision."""
    farewell = rank.farewell

    def eager(state: rank.RankState) -> Grant | None:
        unheard = state.ending in ("unknown", "lost")
        return farewell(replace(state, ending="stopped") if unheard else state)

    monkeypatch.setattr(rank, "farewell", eager)


def decides_by_a_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that does not wait for the last vote."""
    complete = coordinator_decisions.CoordinatorState.is_complete

    def eager(self: coordinator_decisions.CoordinatorState) -> bool:
        num = self.num_spoken
        return bool(complete.fget(self)) or (self.attempt.phase == "finish" and num > 0)  # type: ignore[attr-defined]

    monkeypatch.setattr(coordinator_decisions.CoordinatorState, "is_complete", property(eager))


def forgets_that_it_was_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes half-loaded weights for the old version."""
    load = worker_decisions.load

    def careless(state: WorkerState, epoch: int) -> worker_decisions.Moves:
        moves, _ = load(state, epoch)
        return moves, state

    monkeypatch.setattr(worker_decisions, "load", careless)


PLANTED: list[Callable[[Any], None]] = [
    goes_back_though_it_voted,
    aborts_in_doubt,
    decides_by_a_majority,
    forgets_that_it_was_touched,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_found(plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = explore(Sizes(updates=1, crashes=1, recoveries=0))
    assert found.wrong


def waits_for_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a coordinator that writes the commit while a worker that is cut off may serve."""
    monkeypatch.setattr(coordinator_decisions.CoordinatorState, "waits_ns", property(lambda state: 0))


def trusts_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a coordinator that takes a lease for over when it is by its own clock."""
    monkeypatch.setattr(leases, "MARGIN", 10 * LEASE_NS)


def forgets_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a coordinator that starts, and takes the leases of the one before for over."""
    monkeypatch.setattr(world, "leases_of", lambda record, lease_ns, least, now_ns: leases.Leases(lease_ns, least))


def takes_votes_of_the_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a coordinator that counts a rank that goes on without its worker."""
    ends_ns = leases.Leases.ends_ns
    monkeypatch.setattr(leases.Leases, "ends_ns", lambda self, voted: ends_ns(self, {*voted, *self.out}))


def grants_what_it_has_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: a coordinator that grants a version to those that have staged it, before all have."""
    reported = coordinator_decisions.reported

    def eager(
        state: coordinator_decisions.CoordinatorState, rank: int, status: Status, record: Record, now_ns: int
    ) -> coordinator_decisions.Step:
        under_way = state.attempt
        if under_way.phase != "finish" or status.state != "staged":
            return reported(state, rank, status, record, now_ns)
        new = committed(record, under_way.asked.version, under_way.epoch, record.members)
        state, actions = reported(coordinator_decisions.over(state), rank, status, new, now_ns)
        return replace(state, attempt=under_way), actions

    monkeypatch.setattr(coordinator_decisions, "reported", eager)


def writes_over_a_later_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that lost the lock of its log, and goes on."""
    monkeypatch.setattr(world, "is_led_by_another", lambda world, number: False)


LEFT_OUT: dict[Callable[[Any], None], Sizes] = {
    waits_for_no_lease: SMALL["leases, a worker is cut off"],
    trusts_clocks: SMALL["leases, a worker is cut off"],
    forgets_leases: SMALL["leases, fewer ranks"],
    takes_votes_of_the_cut_off: SMALL["leases, a worker is cut off"],
    grants_what_it_has_not_written: SMALL["leases, a worker is cut off"],
    writes_over_a_later_term: replace(SMALL["leases, two coordinators"], reports=1),
}


@pytest.mark.parametrize("plant", LEFT_OUT)
def test_an_invariant_of_leases_is_broken_where_its_rule_is_left_out(
    plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, budget: Budget
) -> None:
    plant(monkeypatch)
    found = explore(LEFT_OUT[plant])
    budget.covered(f"{found.wrong}, {len(found.trace)} steps, {found.states} states")
    assert found.wrong.startswith("committed: worker")


def test_an_older_copy_of_the_log_serves_a_version_twice_where_nothing_refuses_it(
    monkeypatch: pytest.MonkeyPatch, budget: Budget
) -> None:
    """Version 2 is committed and served; then the log of before is put back, and other weights become version 2."""
    sizes = Sizes(updates=2, crashes=0, recoveries=0, restores=1)
    assert not explore(sizes).wrong
    monkeypatch.setattr(attempt, "is_outdated", lambda record, status: False)
    found = explore(sizes)
    budget.covered(f"{found.wrong}, {len(found.trace)} steps, {found.states} states")
    assert found.wrong.startswith("once: worker")
    assert any("put back from a backup" in step for step in found.trace)
