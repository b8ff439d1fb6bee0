"""Which rank is named: the pure verdict, and whole meshes of ranks that reach it on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from treadle.runtime.faults.watch.contacts import beside
from treadle.runtime.faults.watch.diagnosis import culprit, first
from treadle.runtime.faults.watch.incident import Incident
from treadle.runtime.faults.watch.loss_messages import (
    UNKNOWN,
    Condition,
    Flooded,
    LossKind,
    Lost,
    Observation,
    WaitFailure,
    WaitState,
)


def sight(
    rank: int, *waits: int, condition: Condition = Condition.ANSWERS, op: int = 5, still_ms: int = 9000
) -> Observation:
    return Observation(rank, condition, op, 7, still_ms, exact=True, waits=waits)


def seen(*sights: Observation) -> dict[int, Observation]:
    return {each.rank: each for each in sights}


# What is concluded.


def test_waits_are_followed_to_the_rank_that_computes() -> None:
    states = seen(sight(0, 1), sight(1, 2), sight(2), sight(3, 2))
    for asker in (0, 1, 3):
        assert culprit(asker, WaitFailure.TIMED_OUT, states) == (LossKind.HUNG, states[2], "")


def test_a_rank_that_does_not_answer_is_hung_where_its_neighbour_saw_it() -> None:
    states = seen(sight(0, 1), sight(1, 2), sight(2, condition=Condition.SILENT, op=4))
    assert culprit(0, WaitFailure.TIMED_OUT, states) == (LossKind.HUNG, states[2], "")
    del states[2]
    found = culprit(0, WaitFailure.TIMED_OUT, states)
    assert found is not None
    assert (found.observation.rank, found.observation.op) == (2, UNKNOWN)


def test_a_rank_that_left_is_named_though_its_peer_closed() -> None:
    states = seen(sight(0, 1), sight(1, 2), sight(2, condition=Condition.LEFT))
    assert culprit(0, WaitFailure.CLOSED, states) == (LossKind.LEFT, states[2], "")


def test_a_connection_that_broke_between_living_ranks() -> None:
    states = seen(sight(0, 1), sight(1, 2), sight(2))
    assert culprit(0, WaitFailure.CLOSED, states) == (LossKind.CUT, states[1], "")


def test_a_circle_of_waits_is_named_as_such() -> None:
    states = seen(sight(0, 3), sight(1, 2), sight(2, 3), sight(3, 1))
    found = culprit(0, WaitFailure.TIMED_OUT, states)
    assert found == (LossKind.HUNG, states[1], "1, 2, 3")


def test_in_a_collective_the_one_that_is_not_there_longest_is_named() -> None:
    """Ranks 0 and 1 are in an all-reduce of 0..3; 2 is about to join; 3 waits for 4, which hangs."""
    states = seen(sight(0, 1, 2, 3), sight(1, 0, 2, 3), sight(2, still_ms=20), sight(3, 4), sight(4, still_ms=5000))
    assert culprit(0, WaitFailure.TIMED_OUT, states) == (LossKind.HUNG, states[4], "")


def test_an_asker_that_waits_for_nobody_blames_only_who_is_gone() -> None:
    states = seen(sight(0), sight(1), sight(2, 1))
    assert culprit(0, WaitFailure.TIMED_OUT, states) is None
    states[2] = sight(2, condition=Condition.SILENT)
    assert culprit(0, WaitFailure.TIMED_OUT, states) == (LossKind.HUNG, states[2], "")


def test_an_asker_that_is_stuck_names_itself_or_who_stood_still_before_it() -> None:
    states = seen(sight(0, still_ms=4000), sight(1, still_ms=30), sight(2, 0))
    assert culprit(0, WaitFailure.STUCK, states) == (LossKind.HUNG, states[0], "")
    states[1] = sight(1, still_ms=9000)  # it computes, and may do so for long
    assert culprit(0, WaitFailure.STUCK, states) == (LossKind.HUNG, states[0], "")
    states[1] = replace(states[1], wait=WaitState.OVERDUE)
    assert culprit(0, WaitFailure.STUCK, states) == (LossKind.HUNG, states[1], "")
    states[2] = sight(2, condition=Condition.SILENT)
    assert culprit(0, WaitFailure.STUCK, states) == (LossKind.HUNG, states[2], "")


@pytest.mark.slow
@given(st.data(), st.integers(2, 12))
def test_every_asker_names_the_same_rank(data: st.DataObject, world: int) -> None:
    """Whoever waits for whom, if one rank hangs and all waits lead to it, it is named whoever asks."""
    order = data.draw(st.permutations(range(world)))
    states = seen(sight(order[0]))
    for at in range(1, world):
        upstream = data.draw(st.lists(st.sampled_from(order[:at]), min_size=1, max_size=3, unique=True))
        states[order[at]] = sight(order[at], *upstream)
    for asker in order[1:]:
        found = culprit(asker, WaitFailure.TIMED_OUT, states)
        assert found is not None
        assert found.observation.rank == order[0]


def test_the_first_of_several_losses() -> None:
    killed = Lost(1, 1, 2, LossKind.KILLED, 5, 7, at_ns=1000, still_ms=0)
    echo = Lost(3, 1, 3, LossKind.RAISED, 5, 7, at_ns=900, still_ms=0, secondhand=True)
    hung = Lost(0, 1, 1, LossKind.HUNG, 5, 7, at_ns=800, still_ms=0)
    error = Lost(4, 1, 4, LossKind.RAISED, 5, 7, at_ns=990, still_ms=0)
    assert first([killed, echo, hung]) == killed
    assert first([hung, killed, error, echo]) == error
    assert first([echo, hung]) == echo
    vague = replace(killed, origin=5, at_ns=950, exact=False)
    assert first([vague, killed]) == killed, "the report that read the op itself"


# What a whole ring or torus of ranks concludes, on a clock and a network of the test's own.


@dataclass
class Rank:
    sight: Observation
    beside: list[int]
    incident: Incident = field(init=False)
    silent: bool = False


class World:
    """Ranks with simulated links: each message takes as long as `delays` says. Those that are silent do nothing."""

    def __init__(self, sights: list[Observation], rings: list[list[int]], delays: Iterator[float]) -> None:
        self.now, self._delays = 0.0, delays
        self._mail: list[tuple[float, int, int, Flooded]] = []
        self.ranks = {
            each.rank: Rank(each, sorted({n for ring in rings if each.rank in ring for n in beside(ring, each.rank)}))
            for each in sights
        }
        for number, rank in self.ranks.items():
            rank.incident = Incident(number, View(self, number), partial(self.spread, number))

    def spread(self, source: int, message: Flooded, but: int | None = None) -> None:
        for target in self.ranks[source].beside:
            if target != but:
                self._mail.append((self.now + next(self._delays), source, target, message))

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += 0.01
            due = sorted((mail for mail in self._mail if mail[0] <= self.now), key=lambda mail: mail[0])
            self._mail = [mail for mail in self._mail if mail[0] > self.now]
            for _, source, target, message in due:
                rank = self.ranks[target]
                if not rank.silent and rank.incident.hear(message, self.now):
                    self.spread(target, message, but=source)
            for rank in self.ranks.values():
                if not rank.silent:
                    rank.incident.turn(self.now)


@dataclass
class View:
    world: World
    rank: int

    def own(self) -> Observation:
        return self.world.ranks[self.rank].sight

    def neighbours(self) -> list[Observation]:
        ranks = self.world.ranks
        return [replace(ranks[n].sight, condition=Condition.SILENT, waits=()) for n in ranks[self.rank].beside]


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data(), st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_all_ranks_reach_the_verdict(data: st.DataObject, dp: int, pp: int, is_silent: bool) -> None:
    """A rank of one pipeline hangs, its peers wait in a line; some of them time out; all pipelines must name it."""
    ranks = range(dp * pp)
    rings = [[d * pp + p for p in range(pp)] for d in range(dp)] + [[d * pp + p for d in range(dp)] for p in range(pp)]
    lost = data.draw(st.sampled_from(ranks))
    line = rings[lost // pp]
    toward = {rank: line[line.index(rank) + (1 if rank < lost else -1)] for rank in line if rank != lost}
    sights = [sight(rank, *([toward[rank]] if rank in toward else []), op=100 + rank) for rank in ranks]
    delays = st.floats(0.0, 0.03)
    world = World(sights, rings, iter(lambda: data.draw(delays), None))
    world.ranks[lost].silent = is_silent
    for asker in data.draw(st.lists(st.sampled_from(sorted(toward)), min_size=1, max_size=2, unique=True)):
        world.ranks[asker].incident.ask(WaitFailure.TIMED_OUT, world.now)
    world.run(until=1.6)
    for rank in world.ranks.values():
        if not rank.silent:
            named = rank.incident.first_loss
            assert named is not None
            assert (named.rank, named.kind, named.op) == (lost, LossKind.HUNG, 100 + lost)
            assert named.silent == is_silent
