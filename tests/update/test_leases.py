"""Leases: replicas that are lost lapse, the others go on; whoever comes back is filled, and serves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import SourceMaker, expected, model
from tests.support.update.workers import Asker, Workers, ask_once
from treadle.update import Updater, UpdateOptions
from treadle.update.protocol.update_messages import Answer, Refused
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel

pytestmark = pytest.mark.slow

SMALL = Memory(1 << 18, target_bytes=1 << 14, least_bytes=1 << 12)
LEASE_S = 3.0
OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1, lease_s=LEASE_S, policy=2)
TENSORS = model(1, 32)
HAVE, WANT = Parallel(replicas=3).holding(TENSORS), Parallel(replicas=3).holding(TENSORS)
MAKE = SourceMaker(HAVE)


def loses_one(rank: int, places: tuple[Path, Path], kill: Path) -> list[object]:
    said: list[object] = []
    with Updater(places[0], ledger=places[1], options=OPTIONS) as updater:
        said.append(updater.update(MAKE(rank, 1), 1).version)
        if rank == 0:
            kill.touch()
        while not kill.with_suffix(".done").exists():
            time.sleep(0.02)
        dist.barrier()
        began = time.monotonic()
        done = updater.update(MAKE(rank, 2), 2)
        said += [done.version, time.monotonic() - began, done.notes]
    return said


def test_small(place: Path) -> None:
    import threading
    with Workers(WANT) as workers:
        def killer() -> None:
            flag = workers.directory / "kill"
            while not flag.exists():
                time.sleep(0.02)
            workers.kill(2)
            flag.with_suffix(".done").touch()
        threading.Thread(target=killer, daemon=True).start()
        out = check(run_ranks(3, loses_one, (workers.sockets, workers.ledger), workers.directory / "kill"))
        print(out)
        for worker in (0, 1):
            print(ask_once(workers.sockets, worker))
        time.sleep(4)
        for worker in (0, 1):
            print(ask_once(workers.sockets, worker))
        workers.start(2); workers.await_up(2)
