"""Ranks that hold weights and ranks that speak for workers are two sets of any sizes, or overlap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import SMALL, Compare, model, source_of
from tests.support.update.workers import Trouble, Workers, ask_once
from treadle.update import UpdateError, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Answer
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)
TENSORS = model(2, 32)


@dataclass(frozen=True)
class Sets:
    """`sources[rank]` and `speaks[rank]`: the place in `have` whose weights a rank holds, the worker it speaks for."""

    have: Holding
    want: Holding
    sources: tuple[int | None, ...]
    speaks: tuple[int | None, ...]


def stages(num: int) -> Holding:
    owner = lambda name: 0 if name == "embed" else int(name.split(".")[1]) % num  # noqa: E731
    return Parallel(pp=num, stage=owner).holding(TENSORS)


def columns(num: int, replicas: int = 1) -> Holding:
    return Parallel(tp=num, replicas=replicas, dim=lambda name: 0).holding(TENSORS)


TWO_TO_THREE = Sets(stages(2), columns(3), (0, 1, None, None, None), (None, None, 0, 1, 2))
CASES = {
    "two trainers, three workers": TWO_TO_THREE,
    "workers first": Sets(stages(2), columns(2), (None, None, 0, 1), (0, 1, None, None)),
    "one of the trainers beside the worker": Sets(stages(2), columns(1), (0, 1), (None, 0)),
    "one trainer, two replicas": Sets(stages(1), columns(1, 2), (0, None, None), (None, 1, 0)),
}


def run(rank: int, places: tuple[Path, Path], sets: Sets, versions: list[int], takeover: bool = False) -> list[str]:
    """The errors of these updates; "" where they succeed."""
    told = []
    with Updater(places[0], ledger=places[1], worker=sets.speaks[rank], options=OPTIONS, takeover=takeover) as updater:
        at = sets.sources[rank]
        for version in versions:
            source = source_of(sets.have, at, version) if at is not None else None
            try:
                told.append("" if updater.update(source, version).version == version else "another version")
            except UpdateError as error:
                told.append(str(error))
    return told


def ranks_of(workers: Workers, sets: Sets, versions: list[int], takeover: bool = False) -> list[list[str]]:
    places = workers.sockets, workers.ledger
    return check(run_ranks(len(sets.speaks), run, places, sets, versions, takeover))


@pytest.mark.parametrize("name", CASES)
def test_every_byte_arrives(name: str) -> None:
    sets = CASES[name]
    with Workers(sets.want) as workers:
        assert ranks_of(workers, sets, [1, 2]) == [["", ""]] * len(sets.speaks)
        for worker in range(len(sets.want.pieces)):
            assert workers.tell(worker, Compare(2)) == []


def test_a_worker_that_fails_is_named_by_its_own_number_and_all_go_back() -> None:
    with Workers(TWO_TO_THREE.want) as workers:
        ranks_of(workers, TWO_TO_THREE, [1])
        workers.tell(2, Trouble("raise", "load", 1))
        for first, second in ranks_of(workers, TWO_TO_THREE, [2, 3]):
            assert first.startswith("worker 2 ")
            assert second == ""
        for worker in range(3):
            answer = ask_once(workers.sockets, worker)
            assert isinstance(answer, Answer)
            assert answer.version == 3
            assert workers.tell(worker, Compare(3)) == []


def test_a_worker_without_a_rank_is_named_and_serves_on() -> None:
    with Workers(TWO_TO_THREE.want) as workers:
        ranks_of(workers, TWO_TO_THREE, [1])
        fewer = Sets(TWO_TO_THREE.have, TWO_TO_THREE.want, (0, 1, None, None), (None, None, 0, 2))
        for (told,) in ranks_of(workers, fewer, [2]):
            assert told.startswith("worker 1 (process")
            assert "none speaks for this one" in told
        for worker in range(3):
            answer = ask_once(workers.sockets, worker)
            assert isinstance(answer, Answer)
            assert answer.version == 1


@pytest.mark.parametrize(
    ("speaks", "words"),
    [((None, None), "none of them speaks for a worker"), ((0, 0), "update ranks 0 and 1, in phase enter")],
)
def test_ranks_without_a_worker_and_two_for_one_are_refused(speaks: tuple[int | None, ...], words: str) -> None:
    sets = Sets(stages(2), columns(1), (0, 1), speaks)
    with Workers(sets.want) as workers:
        for (told,) in ranks_of(workers, sets, [1]):  # the second to connect may have taken the worker over by then
            assert words in told or "has taken worker 0 over" in told or "closed the connection" in told, told


def test_what_nobody_has_names_the_workers_that_want_it() -> None:
    sets = Sets(stages(2), columns(2), (0, None, None), (None, 0, 1))
    with Workers(sets.want) as workers:
        assert all("workers 0, 1 want" in told for (told,) in ranks_of(workers, sets, [1]))


def recovers(rank: int, places: tuple[Path, Path], sets: Sets) -> int:
    with Updater(places[0], ledger=places[1], worker=sets.speaks[rank], options=OPTIONS) as updater:
        return updater.recover().version


def test_a_worker_that_started_again_is_filled_by_its_peer() -> None:
    sets = CASES["one trainer, two replicas"]
    with Workers(sets.want) as workers:
        ranks_of(workers, sets, [1])
        workers.restart(0)
        assert check(run_ranks(3, recovers, (workers.sockets, workers.ledger), sets)) == [1] * 3
        assert workers.tell(0, Compare(1)) == []
