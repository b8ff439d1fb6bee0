"""Communicators of the device of threads, with the manners of NCCL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tests.support.patience import HUNG_S
from tests.support.ranks import check, run_ranks
from treadle import sim_device
from treadle.dist.communicators import NEVER

pytestmark = pytest.mark.slow


def on_sim(rank: int, nonblocking: bool, test: Callable[[int], None]) -> None:
    sim_device.load(delay_us=200, seed=5, nonblocking=nonblocking)
    torch.accelerator.set_device_index(rank)
    torch.set_default_device(torch.device("sim", rank))
    test(rank)


def make(name: str, rank: int) -> Any:
    store = PrefixStore(name, _get_default_store())
    return dist.Backend._plugins["SIMCCL"].creator_fn(store, rank, dist.get_world_size(), NEVER)


def event_here() -> torch.Event:
    event = torch.Event(torch.device("sim", torch.accelerator.current_device_index()))
    event.record()
    return event


def await_fact(fact: Callable[[], bool]) -> None:
    until = time.monotonic() + HUNG_S
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.001)


def ready_only_by_use(rank: int) -> None:
    group = make("use", rank)
    assert not group._is_initialized()
    group.eager_connect_single_device(torch.device("sim", rank))
    for _ in range(50):  # asking does not make it ready
        assert not group._is_initialized()
        time.sleep(0.01)
    group.allreduce([torch.ones(3)]).wait()
    assert group._is_initialized()
    group.shutdown()


def ready_when_connected(rank: int) -> None:
    group = make("connect", rank)
    assert not group._is_initialized()
    group.eager_connect_single_device(torch.device("sim", rank))
    assert group._is_initialized()
    group.shutdown()


def waits_with_the_stream(rank: int) -> None:
    group = make("streams", rank)
    group.eager_connect_single_device(torch.device("sim", rank))
    x = torch.full((4,), float(rank + 1))
    if rank == 1:
        sim_device.sleep(500)
    group.allreduce([x]).wait()
    event = event_here()
    assert not event.query()  # the host ran ahead
    assert x.tolist() == [3.0] * 4
    for number in range(8):  # half of them end with their receive
        sent, came = torch.full((3,), float(number)), torch.empty(3)
        launches = [partial(group.send, [sent]), partial(group.recv, [came])]
        works = [launch(1 - rank, 0) for launch in (launches if rank == 0 else launches[::-1])]
        del sent
        for work in works:
            work.wait()
        assert came.tolist() == [float(number)] * 3
    group.shutdown()


@pytest.mark.parametrize(
    ("test", "nonblocking"),
    [(ready_only_by_use, True), (ready_when_connected, False), (waits_with_the_stream, False)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_communicator(test: Callable[[int], None], nonblocking: bool) -> None:
    check(run_ranks(2, on_sim, nonblocking, test, new=True))


def one_is_lost(rank: int) -> None:
    sim_device.load(delay_us=200, seed=5)
    torch.accelerator.set_device_index(rank)
    torch.set_default_device(torch.device("sim", rank))
    groups = [make(name, rank) for name in ("first", "second")]
    for group in groups:
        group.eager_connect_single_device(torch.device("sim", rank))
    if rank == 1:
        os._exit(0)
    for group in groups:
        group.allreduce([torch.ones(3)]).wait()
    end = event_here()
    await_fact(lambda: groups[0].get_error().name == "REMOTE_ERROR")
    assert not end.query()
    groups[0]._group_start()
    for group in groups:
        group.abort()
    assert not end.query()
    groups[0]._group_end()
    await_fact(end.query)
    with pytest.raises(RuntimeError, match="was aborted"):
        groups[0].allreduce([torch.ones(3)])
    os._exit(7)  # all of the above held; the group of the world has lost its rank


def test_a_lost_peer_leaves_the_kernel_spinning_until_all_are_aborted() -> None:
    first, _ = run_ranks(2, one_is_lost, new=True)
    assert first.exitcode == 7, str(first)
