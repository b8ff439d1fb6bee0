"""Updates of changed elements between real processes: what arrives, what it takes, and what is left after faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.changing import CompareElements, Mute, changing_source, right_elements
from tests.support.update.crashes import Crash, arm
from tests.support.update.faults import Watcher, mixtures
from tests.support.update.models import SMALL, model, served, trained
from tests.support.update.workers import Asker, Trouble, Troubled, Workers
from tests.update.test_separate_sets import CASES, Sets
from tests.update.test_sources import Wrong, replicas
from tests.update.test_targeted import beside
from treadle.update import UpdateError, UpdateOptions, Updater
from treadle.weights.chosen_plan import Transfer
from treadle.weights.layouts import Parallel, sharded

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1, changed="elements")
TENSORS = model(4, 64)
LAYOUTS = {
    "PP2 x EP2 into TP4": beside(trained(TENSORS, 4), served(TENSORS)),
    "FSDP2 into 2 x TP2": beside(
        sharded(TENSORS, 4), Parallel(tp=2, replicas=2, dim=lambda name: 0 if "norm" in name else 1).holding(TENSORS)
    ),
    "two trainers, three workers": CASES["two trainers, three workers"],
    "one trainer, two replicas": CASES["one trainer, two replicas"],
}


@dataclass(frozen=True)
class Told:
    """What became of an attempt: the version that is committed now, the bytes that moved, the rollback copy's."""

    committed: int
    moved_bytes: int = 0
    rollback_bytes: int = 0
    notes: str = ""
    error: str = ""


def bring(updater: Updater, sets: Sets, rank: int, version: int, committed: int, rate: float = 0.01) -> Told:
    at = sets.sources[rank]
    try:
        done = updater.update(changing_source(sets.have, at, version, rate) if at is not None else None, version)
    except UpdateError as error:
        return Told(version if error.committed else committed, error=str(error))
    return Told(version, done.size_bytes, done.rollback_bytes, " ".join(done.notes))


def series(
    rank: int, places: tuple[Path, Path], sets: Sets, options: UpdateOptions, versions: Sequence[int], rate: float
) -> list[Told]:
    with Updater(places[0], ledger=places[1], worker=sets.speaks[rank], options=options) as updater:
        return [bring(updater, sets, rank, version, 0, rate) for version in versions]


@pytest.mark.parametrize("transfer", ["broadcast", "targeted"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_changed_elements_move_and_no_others(name: str, transfer: Transfer) -> None:
    sets = LAYOUTS[name]
    with Workers(sets.want) as workers:
        options = replace(OPTIONS, transfer=transfer)
        args = (workers.sockets, workers.ledger), sets, options, [1, 2, 3], 0.01
        for first, *others in check(run_ranks(len(sets.speaks), series, *args)):
            assert "all elements move: update ranks" in first.notes
            for told in others:
                assert not told.error
                assert "all elements move" not in told.notes
                assert 0 < told.moved_bytes < 0.06 * first.moved_bytes
                assert told.rollback_bytes < 0.06 * first.moved_bytes
        for worker in workers.processes:
            assert workers.tell(worker, CompareElements(3)) == []


@pytest.mark.parametrize(("rate", "most"), [(0.0, 0.02), (0.1, 0.2), (1.0, 1.02)])
def test_whatever_part_has_changed(rate: float, most: float) -> None:
    sets = LAYOUTS["PP2 x EP2 into TP4"]
    with Workers(sets.want) as workers:
        args = (workers.sockets, workers.ledger), sets, replace(OPTIONS, rollback="disk"), [1, 2, 3], rate
        for first, *others in check(run_ranks(4, series, *args)):
            assert all(told.moved_bytes < most * first.moved_bytes for told in others)
        for worker in workers.processes:
            assert workers.tell(worker, CompareElements(3, rate)) == []


# ---- faults between deltas -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """An attempt, and the fault of a worker in it. `recovers`: that one is started again, and filled by its peers."""

    trouble: Trouble | None = None
    worker: int = 1
    recovers: bool = False
    whole: bool = False
    """All elements are expected to move."""
    closes: bool = False
    """Workers that have overwritten something have no way back."""


GOOD = Turn()
TURNS = [
    Turn(whole=True),
    GOOD,
    Turn(Trouble("tear", "load", 2)),
    GOOD,
    Turn(Trouble("raise", "finish"), worker=2),
    Turn(Trouble("raise", "finish"), worker=0),
    GOOD,
    Turn(Trouble("kill", "load", 1), recovers=True),
    GOOD,
    Turn(Trouble("kill", "finish"), worker=3, recovers=True),
    GOOD,
    Turn(Trouble("raise", "open"), worker=2, recovers=True),
    GOOD,
]


def turns(rank: int, places: tuple[Path, Path, Path], sets: Sets, options: UpdateOptions, told: list[Turn]) -> None:
    """One version a turn. Between turns ranks wait for a word, while workers are looked at and armed."""
    flags, committed = places[2], 0
    with Updater(places[0], ledger=places[1], options=options) as updater:
        for number, turn in enumerate(told):
            _await(flags / f"go {number}")
            done = bring(updater, sets, rank, number + 1, committed)
            assert bool(done.error) == (turn.trouble is not None), done
            committed = done.committed
            if not done.error:
                assert ("all elements move" in done.notes) == turn.whole, done
            _note(flags / f"done {number} {rank}", done)
            if turn.recovers:
                _await(flags / f"restarted {number}")
                assert updater.recover().version == committed
                _note(flags / f"recovered {number} {rank}", done)


def _note(path: Path, told: Told) -> None:
    made = path.with_suffix(".made")
    made.write_text(json.dumps([told.committed, told.error]))
    made.rename(path)


def _await(path: Path) -> None:
    until = time.monotonic() + PATIENT_S
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.01)


def _all_told(flags: Path, what: str) -> list[Any]:
    paths = [flags / f"{what} {rank}" for rank in range(4)]
    for path in paths:
        _await(path)
    return [json.loads(path.read_text()) for path in paths]


def lead(workers: Workers, told: list[Turn], wrong: list[str]) -> None:
    """Arm a worker before each turn, and look at all of them after each answer."""
    flags = workers.directory
    for number, turn in enumerate(told):
        if turn.trouble is not None:
            workers.tell(turn.worker, turn.trouble)
        (flags / f"go {number}").touch()
        answers = _all_told(flags, f"done {number}")
        committed = {version for version, _ in answers}
        wrong += [] if len(committed) == 1 else [f"turn {number}: ranks say {answers}"]
        gone = turn.worker if turn.recovers else -1
        wrong += looked_at(workers, number, max(committed), gone=gone, closes=turn.closes)
        if turn.recovers:
            workers.restart(turn.worker)
            (flags / f"restarted {number}").touch()
            _all_told(flags, f"recovered {number}")
            wrong += looked_at(workers, number, max(committed), gone=-1)


def looked_at(workers: Workers, number: int, committed: int, *, gone: int, closes: bool = False) -> list[str]:
    """What is wrong with the workers: each that serves must serve the committed version, bit for bit."""
    wrong = []
    for worker in workers.processes:
        if worker == gone:
            continue
        asker = Asker(workers.sockets, worker)
        status = asker.status()
        asker.close()
        if closes and status.state == "lapsed":
            continue
        if (status.state, status.version) != ("serving", committed):
            wrong.append(f"turn {number}: worker {worker} is {status.state} with {status.version}, not {committed}")
        different = workers.tell(worker, CompareElements(committed))
        wrong += [f"turn {number}: worker {worker} differs in {different}"] if different else []
    return wrong


@pytest.mark.parametrize("transfer", ["broadcast", "targeted"])
def test_after_each_fault_workers_hold_the_committed_version(transfer: Transfer) -> None:
    sets = LAYOUTS["FSDP2 into 2 x TP2"]  # a worker that started again has a peer
    play(sets, TURNS, replace(OPTIONS, transfer=transfer), Troubled)


def play(sets: Sets, told: list[Turn], options: UpdateOptions, kind: type[Troubled]) -> None:
    with Workers(sets.want, kind) as workers:
        wrong: list[str] = []
        leading = threading.Thread(target=lead, args=(workers, told, wrong), daemon=True)
        leading.start()
        places = workers.sockets, workers.ledger, workers.directory
        check(run_ranks(4, turns, places, sets, options, told))
        leading.join(PATIENT_S)
        assert not leading.is_alive()
        assert wrong == []


def test_without_a_rollback_copy_workers_close_and_get_all() -> None:
    torn = Turn(Trouble("tear", "load", 2), closes=True)
    sets, told = LAYOUTS["FSDP2 into 2 x TP2"], [Turn(whole=True), GOOD, torn, Turn(whole=True), GOOD]
    play(sets, told, replace(OPTIONS, rollback="none"), Troubled)


MUTE_TURNS = [
    Turn(whole=True),
    GOOD,
    Turn(Trouble("tear", "load", 2)),
    GOOD,
    Turn(Trouble("raise", "finish"), worker=2),
    GOOD,
    GOOD,
]


def test_an_engine_that_cannot_export_reloads_from_the_copy_of_what_it_serves() -> None:
    play(LAYOUTS["PP2 x EP2 into TP4"], MUTE_TURNS, OPTIONS, Mute)


# ---- ranks that are lost, copies that are wrong ----------------------------------------------------------------------


def crashing(
    rank: int, places: tuple[Path, Path], sets: Sets, options: UpdateOptions, crash: Crash, marks: Path
) -> list[Told]:
    """Two good versions, and a third one in which a rank is killed."""
    with Updater(places[0], ledger=places[1], options=options) as updater:
        told = [bring(updater, sets, rank, version, 0) for version in (1, 2)]
        arm(updater, crash, None, marks)
        return [*told, bring(updater, sets, rank, 3, 2)]


@pytest.mark.parametrize(
    "crash",
    [
        Crash(2, "after", "settle"),
        Crash(1, "bucket", bucket=1),
        Crash(3, "after", "finish"),
        Crash(0, "before commit"),
        Crash(0, "after commit"),
    ],
    ids=str,
)
def test_a_rank_is_killed_amid_a_delta(crash: Crash) -> None:
    sets, transfer = LAYOUTS["FSDP2 into 2 x TP2"], "targeted" if crash.rank % 2 else "broadcast"
    options = replace(OPTIONS, transfer=transfer)  # type: ignore[arg-type]

    @cache
    def right(worker: int, version: int) -> str:
        return right_elements(sets.want, worker, version)

    with Workers(sets.want) as workers:
        places = workers.sockets, workers.ledger
        with Watcher(workers) as watcher:
            marks = workers.directory / "mark"
            outcomes = run_ranks(4, crashing, places, sets, options, crash, marks)
            assert [outcome.rank for outcome in outcomes if not outcome.ok] == [crash.rank], outcomes
            assert all(outcome.value[-1].error for outcome in outcomes if outcome.value), outcomes
            for first, second in check(run_ranks(4, series, places, sets, options, [5, 6], 0.01)):
                assert "all elements move" in first.notes
                assert "all elements move" not in second.notes
        assert not mixtures(watcher.seen, right)
        for worker in workers.processes:
            assert workers.tell(worker, CompareElements(6)) == []


def spoil(adapter: Troubled) -> None:
    """Change an element of an engine without an update."""
    adapter.held["embed"].view(torch.int16).view(-1)[3] ^= 1


def spoiled(rank: int, places: tuple[Path, Path, Path], sets: Sets, options: UpdateOptions) -> list[Told]:
    with Updater(places[0], ledger=places[1], options=options) as updater:
        told = [bring(updater, sets, rank, 1, 0)]
        (places[2] / f"brought {rank}").touch()
        _await(places[2] / "spoiled")
        return told + [bring(updater, sets, rank, version, 1) for version in (2, 3, 4)]


def test_a_worker_that_holds_something_else_is_found_and_gets_all() -> None:
    sets = LAYOUTS["FSDP2 into 2 x TP2"]
    with Workers(sets.want) as workers:

        def spoil_one() -> None:
            for rank in range(4):
                _await(workers.directory / f"brought {rank}")
            workers.tell(2, spoil)
            (workers.directory / "spoiled").touch()

        threading.Thread(target=spoil_one, daemon=True).start()
        places = workers.sockets, workers.ledger, workers.directory
        for _, second, third, fourth in check(run_ranks(4, spoiled, places, sets, OPTIONS)):
            assert "worker 2" in second.error
            assert "differ from their source's" in second.error
            assert "all elements move: update ranks 0, 1, 2, 3 have no copy" in third.notes
            assert not fourth.error
            assert "all elements move" not in fourth.notes
        for worker in workers.processes:
            assert workers.tell(worker, CompareElements(4)) == []


def disagreeing(rank: int, places: tuple[Path, Path], sets: Sets, options: UpdateOptions) -> list[Told]:
    """Replicas that differ in version 2."""
    with Updater(places[0], ledger=places[1], options=options) as updater:
        told = [bring(updater, sets, rank, 1, 0)]
        try:
            version = updater.update(Wrong(1, "large", whole=True).source(sets.have, rank, 2), 2).version
            told.append(Told(version))
        except UpdateError as error:
            told.append(Told(1, error=str(error)))
        dist.barrier()
        return [*told, bring(updater, sets, rank, 3, 1)]


def test_sources_are_compared_though_no_rank_sees_the_others_elements() -> None:
    have, want = replicas(2)
    sets = beside(have, want)
    with Workers(want) as workers:
        places = workers.sockets, workers.ledger
        for _, second, third in check(run_ranks(2, disagreeing, places, sets, OPTIONS)):
            assert "they hold different weights, all as version 2, in one or more of" in second.error
            assert "all elements move" not in third.notes
        for worker in workers.processes:
            assert workers.tell(worker, CompareElements(3)) == []
