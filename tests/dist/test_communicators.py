"""Communicators of a device are connected when they are made, aborted together, and tell of their errors.

There is no NCCL here: doubles have the methods of torch's backend for it.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from enum import Enum
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.patience import PATIENT_S
from treadle.dist import rank_groups
from treadle.dist.communicators import CLOSED, JointAbort, close_communicator, connect, error_of
from treadle.dist.rank_groups import Groups

DEVICE = torch.device("cuda", 0)


class ErrorType(Enum):
    """As torch's."""

    SUCCESS = 0
    COMM_ERROR = 2


class Double:
    """A communicator that notes its calls in `calls`."""

    def __init__(self, name: str, calls: list[str], ready_after: int = 0, error: ErrorType = ErrorType.SUCCESS) -> None:
        self.name, self.calls, self.ready_after, self.error = name, calls, ready_after, error

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")

    def abort(self) -> None:
        self.calls.append(f"abort {self.name}")

    def shutdown(self) -> None:
        self.calls.append(f"shutdown {self.name}")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connect {self.name} to {device}")

    def _is_initialized(self) -> bool:
        self.ready_after -= 1
        return self.ready_after < 0

    def get_error(self) -> ErrorType:
        return self.error


def doubles(*names: str, **more: Any) -> tuple[list[Any], list[str]]:
    calls: list[str] = []
    return [Double(name, calls, **more) for name in names], calls


def test_communicators_are_aborted_together() -> None:
    made, calls = doubles("a", "b")
    assert JointAbort([CLOSED, *made]).ended(PATIENT_S)
    assert calls == ["start", "abort a", "abort b", "end"]


def test_nothing_is_aborted_where_no_communicator_is_a_devices() -> None:
    abort = JointAbort([CLOSED])
    assert abort.ended(0)


def test_an_abort_that_hangs_holds_nobody_up() -> None:
    made, calls = doubles("a")
    go_on = threading.Event()
    made[0].abort = go_on.wait
    abort = JointAbort(made)
    assert not abort.ended(0.01)
    go_on.set()
    assert abort.ended(PATIENT_S)
    assert calls == ["start", "end"]


def test_groups_whose_abort_hangs_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = doubles("a")
    go_on, group = threading.Event(), mock.Mock(communicator=made[0])
    made[0].abort = go_on.wait
    groups = Groups("one", mock.Mock(), timedelta(seconds=PATIENT_S), group, None)
    groups.break_off()
    groups.break_off()
    monkeypatch.setattr(rank_groups, "ABORT_S", 0.01)
    groups.close()
    assert calls == ["start"]
    group.close.assert_not_called()
    go_on.set()
    monkeypatch.setattr(rank_groups, "ABORT_S", PATIENT_S)
    groups.close()
    assert calls == ["start", "end"]
    group.close.assert_called_once()


def test_a_communicator_is_connected_when_it_is_made() -> None:
    made, calls = doubles("a", ready_after=3)
    connect(made[0], DEVICE, timedelta(seconds=PATIENT_S))
    assert calls == ["connect a to cuda:0"]
    assert made[0].ready_after < 0, "it was waited for"


def test_a_communicator_that_does_not_connect_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = doubles("a", ready_after=1 << 60)
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(RuntimeError, match="Timed out: a communicator was not connected within 20 s"):
        connect(made[0], DEVICE, timedelta(seconds=20))


def test_a_communicator_tells_of_its_error() -> None:
    (well, broken), _ = doubles("well")[0] + doubles("broken", error=ErrorType.COMM_ERROR)[0], None
    assert error_of(well) is None
    assert error_of(broken) == "COMM_ERROR"
    assert error_of(CLOSED) is None

    def unsupported() -> None:
        raise RuntimeError("Backend xccl does not support getError")

    broken.get_error = unsupported
    assert error_of(broken) is None


def test_a_closed_communicator_is_shut_down_once() -> None:
    made, calls = doubles("a")
    close_communicator(made[0])
    close_communicator(CLOSED)
    assert calls == ["shutdown a"]
