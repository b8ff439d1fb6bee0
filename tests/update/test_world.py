"""Update ranks that meet in a world of their own: a trainer keeps its process group, a rank sits beside each worker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import SMALL, Compare, model, source_of
from tests.support.update.workers import Trouble, Workers
from treadle.dist.rank_world import RankWorld
from treadle.update import UpdateError, UpdateOptions, Updater
from treadle.update.beside import Orders, Seat, UpdateSetup, start_beside, stop_beside
from treadle.weights.layouts import Parallel, spread

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)
TRAINERS, WORKERS = 2, 2


def train(rank: int, sockets: Path, ledger: Path) -> list[str]:
    """Update three times, of which the first fails; the errors, and sums over the trainer's own group in between."""
    size, told = TRAINERS + WORKERS, []
    beside: list[subprocess.Popen[bytes]] = []
    world = RankWorld.host(size) if rank == 0 else None
    port = [world.port if world is not None else 0]
    dist.broadcast_object_list(port)
    if world is not None:
        Orders(world).set_up(UpdateSetup(OPTIONS))
        seats = [Seat("127.0.0.1", port[0], TRAINERS + worker, size) for worker in range(WORKERS)]
        beside = [start_beside(seat, sockets, worker, None) for worker, seat in enumerate(seats)]
    else:
        world = RankWorld.join("127.0.0.1", port[0], rank, size)
    orders = Orders(world)
    have = spread(model(1, 32), TRAINERS)
    with Updater(sockets, ledger=ledger, worker=None, options=OPTIONS, world=world) as updater:
        for version in (1, 1, 2):
            if rank == 0:
                orders.announce(version)
            else:
                assert orders.next() == version
            try:
                updater.update(source_of(have, rank, version), version)
                told.append("")
            except UpdateError as error:
                told.append(str(error))
            total = torch.tensor(rank + 1)
            dist.all_reduce(total)
            assert total == 3
    for process in beside:
        stop_beside(process)
    return told


def test_a_trainer_keeps_its_group_and_a_failure_is_not_the_end() -> None:
    with Workers(Parallel(tp=WORKERS, dim=lambda name: 0).holding(model(1, 32))) as workers:
        workers.tell(1, Trouble("raise", "finish"))
        told = check(run_ranks(TRAINERS, train, workers.sockets, workers.ledger))
        for first, *rest in told:
            assert "worker 1" in first
            assert "trouble in finish" in first
            assert rest == ["", ""]
        assert [workers.tell(worker, Compare(2)) for worker in range(WORKERS)] == [[], []]


def test_no_store_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"rank 1 of 2 has not reached rank 0.s store at 127\.0\.0\.1:9"):
        RankWorld.join("127.0.0.1", 9, 1, 2, deadline_s=1)
