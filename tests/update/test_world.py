"""Update ranks that meet in a world of their own: a trainer keeps its process group, an agent is beside each worker."""

from __future__ import annotations

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
from treadle.update.agent import Meeting, start_agent, stop_agent
from treadle.weights.layouts import Parallel, spread

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)
TRAINERS, WORKERS = 2, 2


def train(rank: int, sockets: Path, ledger: Path) -> list[str]:
    """Update three times, of which the first fails; the errors, and sums over the trainer's own group in between."""
    told = []
    world = RankWorld.host(TRAINERS) if rank == 0 else None
    port = [world.port if world is not None else 0]
    dist.broadcast_object_list(port)
    meeting = Meeting("127.0.0.1", port[0])
    agents = [start_agent(meeting, sockets, worker) for worker in range(WORKERS)] if rank == 0 else []
    if world is None:
        world = RankWorld.join("127.0.0.1", port[0], rank, TRAINERS)
    have = spread(model(1, 32), TRAINERS)
    with Updater(sockets, ledger=ledger, worker=None, options=OPTIONS, world=world, agents=WORKERS) as updater:
        for version in (1, 1, 2):
            try:
                updater.update(source_of(have, rank, version), version)
                told.append("")
            except UpdateError as error:
                told.append(str(error))
            total = torch.tensor(rank + 1)
            dist.all_reduce(total)
            assert total == 3
    for process in agents:
        stop_agent(process)
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
