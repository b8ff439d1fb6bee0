"""Time that passes when a test says so: deadlines of updates run out without anyone having to wait for them.

All ranks then have deadlines that they keep on a busy machine, and those that are to run out do so at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support.patience import SOON_S
from treadle.update import Updater
from treadle.update.coordinator.coordinator_thread import GRACE_S
from treadle.update.rank import inbox


class Jumping:
    """A clock in place of the module `time`: hours pass from one look to the next."""

    def __init__(self) -> None:
        self._seconds = itertools.count(0, 10_000)

    def monotonic(self) -> float:
        return float(next(self._seconds))


@contextmanager
def in_vain() -> Iterator[None]:
    """What this rank waits for by now, an answer of its worker or of the coordinator, does not come in time."""
    with patch.object(inbox, "time", Jumping()):
        yield


def expire(updater: Updater, num: int, also: Callable[[], bool] = lambda: True) -> threading.Thread | None:
    """Let the deadline of the coordinator's phase pass when so many ranks have spoken in it, on the rank that has it.

    The thread that does is to be joined: it ends with the coordinator's wait.
    """
    coordinator = updater.coordinator
    if coordinator is None:
        return None

    def run() -> None:
        until = time.monotonic() + SOON_S
        while coordinator._state.num_spoken != num or coordinator._since is None or not also():
            assert time.monotonic() < until, coordinator._state
            time.sleep(0.005)
        coordinator._since -= coordinator.deadline_s + GRACE_S
        coordinator.links.wake()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def await_stopped(pid: int) -> None:
    """Wait until a process has stopped itself by SIGSTOP."""
    until = time.monotonic() + SOON_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T" and time.monotonic() < until:
        time.sleep(0.005)


def go_on(pid: int) -> None:
    """Have a process that has stopped itself, or is about to, go on."""
    await_stopped(pid)
    os.kill(pid, signal.SIGCONT)
