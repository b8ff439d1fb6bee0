"""A waker may be used by one thread while another closes it: no error, and no byte in a file of somebody else."""

from __future__ import annotations

import os
import selectors
import threading
from contextlib import closing

import pytest

from tests.support.patience import PATIENT_S
from treadle.host.waker import Waker


def is_ready(waker: Waker) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(waker, selectors.EVENT_READ)
        return bool(selector.select(0))


def test_a_wait_ends_until_the_calls_are_cleared() -> None:
    with closing(Waker()) as waker:
        assert not is_ready(waker)
        waker.wake()
        waker.wake()
        assert is_ready(waker)
        waker.clear()
        assert not is_ready(waker)
        waker.clear()


def test_a_closed_waker_writes_into_no_other_file() -> None:
    waker = Waker()
    fd = waker.fileno()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    waker.close()
    os.dup2(writing, fd)  # the next file that is opened has the number of the one that was closed
    waker.wake()
    waker.clear()
    waker.close()
    with pytest.raises(BlockingIOError):
        os.read(reading, 8)
    for end in (fd, reading, writing):  # raises where the waker has closed another's file
        os.close(end)


def test_a_close_waits_for_a_call_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    waker, begun, closed = Waker(), threading.Event(), threading.Event()
    write, was_open = os.eventfd_write, []

    def slowly(fd: int, value: int) -> None:
        begun.set()
        closed.wait(0.3)  # a close that does not wait is over by now
        write(fd, value)
        was_open.append(not closed.is_set())

    def close() -> None:
        assert begun.wait(PATIENT_S)
        waker.close()
        closed.set()

    monkeypatch.setattr(os, "eventfd_write", slowly)
    closer = threading.Thread(target=close)
    closer.start()
    waker.wake()
    closer.join(PATIENT_S)
    assert closed.is_set()
    assert was_open == [True]
