"""Targeted updates between real processes: each device receives what it takes and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.crashes import Crash, arm
from tests.support.update.faults import Watcher, mixtures
from tests.support.update.models import SMALL, Compare, expected, model, served, source_of, trained
from tests.support.update.workers import Trouble, Workers
from tests.update.test_separate_sets import CASES, Sets
from tests.update.test_sources import Wrong, replicas, three_updates
from treadle.ir.ops import OpKind
from treadle.update import UpdateError, UpdateOptions, Updater
from treadle.update.update_options import CompareSources
from treadle.weights.buffer_sizes import Memory
from treadle.weights.chosen_plan import plan_transfer
from treadle.weights.layouts import Parallel, replicated, sharded
from treadle.weights.tensor_boxes import Holding
from treadle.weights.update_checks import verify_update

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1, transfer="targeted")
TENSORS = model(4, 64)


def beside(have: Holding, want: Holding) -> Sets:
    """Each rank has weights and a worker."""
    every = tuple(range(len(want.pieces)))
    return Sets(have, want, every, every)


LAYOUTS = {
    "PP2 x EP2 into TP4": beside(trained(TENSORS, 4), served(TENSORS)),
    "FSDP2 into 2 x TP2": beside(
        sharded(TENSORS, 4), Parallel(tp=2, replicas=2, dim=lambda name: 0 if "norm" in name else 1).holding(TENSORS)
    ),
    "two trainers, three workers": CASES["two trainers, three workers"],
    "one trainer, two replicas": CASES["one trainer, two replicas"],
    "two trainers, three replicas of TP2": Sets(
        sharded(TENSORS, 2),
        Parallel(tp=2, replicas=3, dim=lambda name: 0).holding(TENSORS),
        (0, 1, *[None] * 6),
        (None, None, *range(6)),
    ),
}


def update(
    rank: int, places: tuple[Path, Path], sets: Sets, options: UpdateOptions, versions: list[int]
) -> list[tuple[bool, int, int]]:
    """Of each update: whether it was targeted, and the bytes that this rank received and was to receive."""
    found = []
    with Updater(places[0], ledger=places[1], worker=sets.speaks[rank], options=options) as updater:
        at = sets.sources[rank]
        for version in versions:
            done = updater.update(source_of(sets.have, at, version) if at is not None else None, version)
            assert done.shares is not None
            assert done.times is not None
            plan = done.shares.plan
            trace = updater.trace(done)
            assert verify_update(trace.program).clean
            assert (trace.end >= trace.start).all()
            kinds = trace.program.kind
            moved = sum(len(bucket.dests) for bucket in plan.buckets if bucket.source not in bucket.dests)
            assert (kinds == OpKind.RECV_BUCKET).sum() == (kinds == OpKind.SEND_BUCKET).sum() == moved
            sources = [bucket for bucket in plan.buckets if rank == bucket.source and rank not in bucket.dests]
            sends_on = [bucket for bucket in plan.buckets if rank in bucket.dests[:-1]]
            assert len(done.times.send) == len(sources) + len(sends_on)
            came = sum(plan.buckets[number].size_bytes for number in done.times.recv)
            wanted = sum(b.size_bytes for b in plan.buckets if rank in b.dests and b.source != rank)
            found.append((plan.is_targeted, came, wanted))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_arrives_and_each_device_receives_only_its_own(name: str) -> None:
    sets = LAYOUTS[name]
    with Workers(sets.want) as workers:
        places = workers.sockets, workers.ledger
        for told in check(run_ranks(len(sets.speaks), update, places, sets, OPTIONS, [1, 2])):
            for targeted, came, wanted in told:
                assert targeted
                assert came == wanted
        for worker in workers.processes:
            assert workers.tell(worker, Compare(2)) == []


@pytest.mark.parametrize("num_h2d", [1, 2])
def test_buckets_that_stay_on_a_device_need_no_more_buffers_than_there_are(num_h2d: int) -> None:
    """Both ranks have all of it: nothing moves over a link, and many buckets go through one buffer or two."""
    have, want = replicas(2)
    memory = replace(SMALL, free_bytes=(2 + num_h2d) << 14, share=1.0, target_bytes=1 << 14)
    sets = beside(have, want)
    with Workers(want) as workers:
        places = workers.sockets, workers.ledger
        check(run_ranks(2, update, places, sets, replace(OPTIONS, memory=memory), [1]))
        assert [workers.tell(worker, Compare(1)) for worker in range(2)] == [[], []]


# ---- faults amid a chain ---------------------------------------------------------------------------------------------

CHAIN = Sets(
    sharded(TENSORS, 1), replicated(TENSORS, 3), sources=(0, None, None, None), speaks=(None, 0, 1, 2)
)  # rank 2 and its worker, 1, are in the middle


def breaks(rank: int, places: tuple[Path, Path], crash: Crash | None, marks: Path) -> str:
    """Return the error of version 2."""
    with Updater(places[0], ledger=places[1], worker=CHAIN.speaks[rank], options=OPTIONS) as updater:
        arm(updater, crash, None, marks)
        try:
            updater.update(source_of(CHAIN.have, 0, 2) if rank == 0 else None, 2)
        except UpdateError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("fault", [Crash(2, "bucket", bucket=4), Trouble("kill", "load", 3)], ids=["rank", "worker"])
def test_all_stay_on_the_old_version_if_one_is_killed_amid_a_chain(fault: Crash | Trouble) -> None:
    @cache
    def right(worker: int, version: int) -> str:
        return expected(CHAIN.want, worker, version)

    with Workers(CHAIN.want) as workers:
        places = workers.sockets, workers.ledger
        check(run_ranks(4, update, places, CHAIN, OPTIONS, [1]))
        crash = fault if isinstance(fault, Crash) else None
        if isinstance(fault, Trouble):
            workers.tell(1, fault)
        with Watcher(workers) as watcher:
            outcomes = run_ranks(4, breaks, places, crash, workers.directory / "mark")
            assert [outcome.rank for outcome in outcomes if not outcome.ok] == ([2] if crash else [])
            assert all(outcome.value for outcome in outcomes if outcome.ok), outcomes
            check(run_ranks(4, update, places, CHAIN, OPTIONS, [3]))
        assert {seen.version for seen in watcher.seen} <= {1, 3}
        assert not mixtures(watcher.seen, right)
        assert [workers.tell(worker, Compare(3)) for worker in range(3)] == [[]] * 3


def auto(rank: int, places: tuple[Path, Path], sets: Sets, memories: list[Memory]) -> list[bool]:
    found = []
    for version, memory in enumerate(memories, 1):
        options = replace(OPTIONS, memory=memory, transfer="auto")
        with Updater(places[0], ledger=places[1], options=options) as updater:
            done = updater.update(source_of(sets.have, rank, version), version)
            assert done.shares is not None
            found.append(done.shares.plan.is_targeted)
    return found


def test_the_plan_takes_the_faster_way() -> None:
    """Where all buckets are small, it is the one with fewer; where broadcasts need as many, it is the targeted one."""
    sets = LAYOUTS["FSDP2 into 2 x TP2"]
    memories = [replace(SMALL, free_bytes=1 << 21, target_bytes=1 << 18), replace(SMALL, target_bytes=1 << 14)]
    wanted = [plan_transfer(sets.have, sets.want, memory).is_targeted for memory in memories]
    assert wanted == [False, True]
    with Workers(sets.want) as workers:
        assert check(run_ranks(4, auto, (workers.sockets, workers.ledger), sets, memories)) == [wanted] * 4
        assert workers.tell(3, Compare(2)) == []


# ---- sources that differ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "compare", "wrong", "words"),
    [
        (
            2,
            "all",
            Wrong(1, "large", whole=False),
            "update ranks 0, 1, in phase finish of attempt 2: they hold different",
        ),
        (
            2,
            "sample",
            Wrong(1, "layers.0.down", whole=True),
            "update ranks 0, 1, in phase finish of attempt 2: they hold",
        ),
        (
            3,
            "sample",
            Wrong(2, "embed", whole=True),
            "update ranks 2, in phase finish of attempt 2: they hold different",
        ),
        (2, "sample", None, ""),
    ],
)
def test_sources_that_differ_are_refused_before_the_decision(
    num: int, compare: CompareSources, wrong: Wrong | None, words: str
) -> None:
    have, want = replicas(num)
    with Workers(want) as workers:
        places, options = (workers.sockets, workers.ledger), replace(OPTIONS, compare_sources=compare)
        for second, third in check(run_ranks(num, three_updates, places, have, options, wrong)):
            assert third == 3
            if wrong is None:
                assert second == 2
            else:
                assert second.startswith(words), second
                assert "all as version 2, in one or more of embed" in second
        for worker in range(num):
            assert workers.tell(worker, Compare(3)) == []


def test_without_a_comparison_a_mixture_passes() -> None:
    """So the comparison above is what finds it. Workers take the halves that their own rank does not have."""
    have, want = replicas(2)
    with Workers(want) as workers:
        places, options = (workers.sockets, workers.ledger), replace(OPTIONS, compare_sources="off")
        told = check(run_ranks(2, three_updates, places, have, options, Wrong(1, "large", whole=True)))
        assert [second for second, _ in told] == [2, 2]


# ---- peers -----------------------------------------------------------------------------------------------------------


def recovers(rank: int, places: tuple[Path, Path], sets: Sets) -> tuple[bool, int]:
    with Updater(places[0], ledger=places[1], worker=sets.speaks[rank], options=OPTIONS) as updater:
        done = updater.recover()
        assert done.shares is not None
        return done.shares.plan.is_targeted, done.version


@pytest.mark.parametrize("name", ["FSDP2 into 2 x TP2", "one trainer, two replicas"])
def test_a_worker_that_started_again_is_filled_by_its_peers(name: str) -> None:
    sets = LAYOUTS[name]
    ranks = len(sets.speaks)
    with Workers(sets.want) as workers:
        places = workers.sockets, workers.ledger
        check(run_ranks(ranks, update, places, sets, OPTIONS, [1]))
        workers.restart(1)
        assert check(run_ranks(ranks, recovers, places, sets)) == [(True, 1)] * ranks
        assert workers.tell(1, Compare(1)) == []


def changes(rank: int, places: tuple[Path, Path], sets: Sets) -> int:
    with Updater(places[0], ledger=places[1], options=OPTIONS) as updater:
        first = updater.update(source_of(sets.have, rank, 1), 1).size_bytes
        source = source_of(sets.have, rank, 1)
        for piece, local in source.held.items():
            if piece.tensor == "embed":
                local.copy_(next(t for p, t in source_of(sets.have, rank, 2).held.items() if p == piece))
        second = updater.update(source, 2, changed=["embed"], base=1).size_bytes
        assert 0 < second < first / 2
        return second


def test_a_part_of_the_tensors_moves_alone() -> None:
    sets = LAYOUTS["FSDP2 into 2 x TP2"]
    with Workers(sets.want) as workers:
        check(run_ranks(4, changes, (workers.sockets, workers.ledger), sets))
        wrong = [workers.tell(worker, Compare(1)) for worker in range(4)]
        assert wrong == [["embed"]] * 4


def test_a_worker_gets_the_part_of_the_rank_that_speaks_for_it_now() -> None:
    """Ranks are started again, each beside the other's worker: the plan is the same, and its parts change places."""
    have = want = Parallel(replicas=2).holding(TENSORS)
    with Workers(want) as workers:
        for version, speaks in ((1, (0, 1)), (2, (1, 0))):
            places = workers.sockets, workers.ledger
            check(run_ranks(2, update, places, Sets(have, want, (0, 1), speaks), OPTIONS, [version]))
            assert [workers.tell(worker, Compare(version)) for worker in range(2)] == [[], []]
