"""A process that is not as it was is found out, by each thing that a test may leave behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.clean_state import ProcessState
from tests.support.rank_pool import POOL
from tests.support.ranks import check, run_ranks
from treadle.dist import channel
from treadle.runtime.run.handlers import HANDLERS

KEPT: list[object] = []


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), name="forgotten", daemon=True).start()


def leave_other_code() -> None:
    channel.Channel.post.__code__ = (lambda self: None).__code__


LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "thread": (leave_a_thread, "thread 'forgotten'"),
    "child": (lambda: KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)), "child "),
    "descriptor": (lambda: KEPT.append(socket.socket()), "descriptor "),
    "directory": (lambda: os.chdir("/"), "directory is /"),
    "signal": (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "signals is "),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "default dtype is torch.float64"),
    "function": (lambda: setattr(channel, "keep", None), "treadle.dist.channel.keep is another"),
    "method": (lambda: setattr(channel.Channel, "post", None), "treadle.dist.channel.post is another"),
    "code": (leave_other_code, "treadle.dist.channel.Channel.post is another"),
    "registry": (HANDLERS.popitem, "is another"),
    "module of others": (lambda: setattr(os, "fsync", None), "os.fsync is another"),
}


def pid(rank: int, what: str | None) -> int:
    if what is not None:
        LEFT[what][0]()
    return os.getpid()


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_behind_is_found_and_the_next_rank_has_another_process(what: str) -> None:
    POOL.left.clear()
    (first,) = check(run_ranks(1, pid, what))
    assert any(LEFT[what][1] in told for told in POOL.left), POOL.left
    assert check(run_ranks(1, pid, None)) != [first]


def test_a_process_that_is_as_it_was_runs_the_next_rank() -> None:
    first = check(run_ranks(2, pid, None))
    assert set(check(run_ranks(2, pid, None))) == set(first)
    assert not set(check(run_ranks(2, pid, None, new=True))) & set(first)


def draw(rank: int) -> float:
    return float(torch.rand(()))


def test_ranks_draw_the_same_in_every_call() -> None:
    assert len({*check(run_ranks(2, draw)), *check(run_ranks(2, draw)), *check(run_ranks(2, draw, new=True))}) == 1


def test_nothing_is_said_of_a_process_that_did_nothing() -> None:
    assert ProcessState().changes() == []
