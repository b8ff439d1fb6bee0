"""News of an attempt or a connection that is over come late: they do no harm to the next one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import treadle.update.rank.coordinator_client as client_module
from tests.support.patience import PATIENT_S
from tests.support.update.engines import OPTIONS
from treadle.update import Endpoint, Plain, UpdateError
from treadle.update.protocol.control import Fault, FromCoordinator, Go, Proceed, ToCoordinator
from treadle.update.protocol.update_messages import Describe, Grant, Status
from treadle.update.rank.coordinator_client import CoordinatorClient
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.worker_client import WorkerClient
from treadle.wire.link import Link
from treadle.wire.listeners import call_path, listen_at_path


class Coordinating:
    """The other end of a client, and its rendezvous."""

    def __init__(self, path: Path) -> None:
        self.path, self._listener = path, listen_at_path(path, ToCoordinator)

    def call(self, deadline_s: float) -> tuple[Link[FromCoordinator], str]:
        link = call_path(self.path, FromCoordinator, deadline_s)
        there: Link[ToCoordinator] | None = self._listener.accept()
        assert there is not None
        self.link = there
        self.link.send(Proceed(0, "enter"))
        return link, "the coordinator"

    def start_failure(self) -> None:
        """All ranks have started."""

    def stop(self, epoch: int) -> None:
        self.link.send(Fault(epoch, "worker 0", "load", 0, "trouble"))

    def close(self) -> None:
        self.link.close()
        self._listener.close()


def test_a_stop_that_comes_late_does_not_end_the_next_attempt(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, inbox = Coordinating(place / "c.sock"), Inbox()
    client = CoordinatorClient(there, 0, 1, inbox, OPTIONS)  # type: ignore[arg-type]
    client.begin()
    there.link.send(Go((0,), Grant(7, None, ())))
    assert client.hear((Go,), "enter") == Go((0,), Grant(7, None, ()))
    taking = threading.Event()

    def late(*args: Any, **more: Any) -> UpdateError:
        taking.set()
        time.sleep(0.3)  # an attempt that does not wait has begun by now
        return UpdateError(*args, **more)

    monkeypatch.setattr(client_module, "UpdateError", late)
    there.stop(7)
    assert taking.wait(PATIENT_S)
    client.begin()
    there.stop(7)  # told twice, as the coordinator never does
    there.link.send(Go((0,), Grant(8, None, ())))
    assert client.hear((Go,), "enter") == Go((0,), Grant(8, None, ()))
    assert (inbox.bad, client.told) == (None, None)
    there.stop(8)
    assert inbox.wait_bad(PATIENT_S) is not None
    client.begin(call=5)
    there.link.send(Fault(0, "the caller", "enter", -1, "the attempt of this call is over", call=4))
    there.link.send(Go((0,), Grant(9, None, ())))
    assert client.hear((Go,), "enter") == Go((0,), Grant(9, None, ()))
    assert inbox.bad is None
    client.close()
    there.close()


def test_a_connection_whose_end_is_told_late_is_not_taken_for_the_next(place: Path) -> None:
    losing, told = threading.Event(), list[tuple[str, bool]]()

    def lost(name: str, text: str) -> None:
        losing.set()
        time.sleep(0.3)  # a rank that does not wait has connected by now
        told.append((name, rank._link is None))

    rank = WorkerClient(place, 0, Inbox(), lost)
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        rank.connect(0, PATIENT_S)
    assert losing.wait(PATIENT_S)
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        rank.connect(0, PATIENT_S)
        assert told == [(f"worker 0 (process {os.getpid()})", True)]
        assert rank.ask(Describe(), Status, PATIENT_S).state == "lapsed"
        rank.drop()
    assert len(told) == 1
