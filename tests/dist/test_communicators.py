"""Communicators of a device are connected when they are made, aborted together, and report their errors.

There is no NCCL here: a double of torch's backend for it has ranks that are threads.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.support.nccl_double import ErrorType, Nccl, Options
from tests.support.patience import PATIENT_S
from treadle.dist import rank_groups
from treadle.dist.channel import Channel
from treadle.dist.communicators import CLOSED, JointAbort, close_communicator, error_of, make_communicator
from treadle.dist.device import Host
from treadle.dist.rank_groups import Groups

DEADLINE = timedelta(seconds=PATIENT_S)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(Nccl, "calls", [])
    return Nccl.calls


def alone(name: str) -> Any:
    """A communicator of one rank."""
    options = Options()
    options.group_name = name
    return Nccl(HashStore(), 0, 1, options)


def make_between(name: str, rank: int, store: HashStore) -> Any:
    device = torch.device("cuda", rank)
    return make_communicator(name, [0, 1], rank, DEADLINE, device, backend="nccl", store=store)


def make_both(name: str = "a") -> list[Any]:
    store = HashStore()
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(lambda rank: make_between(name, rank, store), range(2)))


def test_a_communicator_is_connected_when_it_is_made() -> None:
    for made in make_both():
        assert made._is_initialized()
        assert made.options.global_ranks_in_group == [0, 1]
        assert made.options.group_name == "a"
        made.abort()


def test_a_communicator_is_connected_whatever_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    for made in make_both():
        assert made._is_initialized()
        made.abort()


def test_making_waits_for_the_peer() -> None:
    store, made = HashStore(), list[Any]()
    first = threading.Thread(target=lambda: made.append(make_between("a", 0, store)))
    first.start()
    first.join(0.05)
    assert first.is_alive()
    made.append(make_between("a", 1, store))
    first.join(PATIENT_S)
    assert all(each._is_initialized() for each in made)
    for each in made:
        each.abort()


def test_a_rank_can_name_a_lost_peer_under_the_settings_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    before = dict(os.environ)
    for made in make_both():
        assert set(made.settings.values()) == {"0"}
        made.abort()
    assert dict(os.environ) == before


def test_communicators_are_aborted_together(calls: list[str]) -> None:
    assert JointAbort([CLOSED, alone("a"), alone("b")]).ended(PATIENT_S)
    assert calls == ["start", "abort a", "abort b", "end"]


def test_nothing_is_aborted_where_no_communicator_is_a_devices() -> None:
    abort = JointAbort([CLOSED])
    assert abort.ended(0)


class Hanging(Nccl):
    """Its abort waits for the device, until `go_on`."""

    go_on: threading.Event

    def abort(self) -> None:
        self.go_on.wait()
        super().abort()


@pytest.fixture
def hanging() -> Any:
    options = Options()
    options.group_name = "a"
    made = Hanging(HashStore(), 0, 1, options)
    made.go_on = threading.Event()
    return made


def test_an_abort_that_hangs_holds_nobody_up(hanging: Any, calls: list[str]) -> None:
    abort = JointAbort([hanging])
    assert not abort.ended(0.01)
    hanging.go_on.set()
    assert abort.ended(PATIENT_S)
    assert calls == ["start", "abort a", "end"]


def test_groups_whose_abort_hangs_are_left_as_they_are(
    hanging: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = mock.Mock(communicator=hanging)
    groups = Groups("one", mock.Mock(), DEADLINE, group, None)
    groups.break_off()
    groups.break_off()
    monkeypatch.setattr(rank_groups, "ABORT_S", 0.01)
    groups.close()
    assert calls == ["start"]
    group.close.assert_not_called()
    hanging.go_on.set()
    monkeypatch.setattr(rank_groups, "ABORT_S", PATIENT_S)
    groups.close()
    assert calls == ["start", "abort a", "end"]
    group.close.assert_called_once()


def test_both_ends_of_channels_close_them_in_one_order() -> None:
    """A shutdown waits for the peer's: two ranks that began with another channel each would wait for ever."""
    made = {name: make_both(name) for name in ("0>1", "1>0")}

    def groups_of(rank: int) -> Groups:
        def channel(name: str) -> Channel:
            return Channel(made[name][rank], 1 - rank, torch.device("cpu"), Host(DEADLINE).wait, mock.Mock())

        out, into = ("0>1", "1>0") if rank == 0 else ("1>0", "0>1")
        groups = Groups("one", mock.Mock(pp_rank=rank), DEADLINE, mock.Mock(communicator=CLOSED), None)
        groups.outgoing, groups.incoming = {1 - rank: channel(out)}, {1 - rank: channel(into)}
        return groups

    closing = [threading.Thread(target=groups_of(rank).close, daemon=True) for rank in range(2)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(5)
    late = [thread.is_alive() for thread in closing]
    for each in (end for ends in made.values() for end in ends):
        each.released.set()
    assert late == [False, False]


def test_a_communicator_reports_its_error() -> None:
    well, broken = alone("well"), alone("broken")
    broken.error = ErrorType.COMM_ERROR
    assert error_of(well) is None
    assert error_of(broken) == "COMM_ERROR"
    assert error_of(CLOSED) is None

    def unsupported() -> ErrorType:
        raise RuntimeError("Backend xccl does not support getError")

    broken.get_error = unsupported
    assert error_of(broken) is None


def test_a_closed_communicator_is_shut_down_once(calls: list[str]) -> None:
    made = alone("a")
    close_communicator(made)
    close_communicator(CLOSED)
    assert calls == ["shutdown a"]
    del made
    assert calls == ["shutdown a"], "its destructor has nothing to abort"
