"""Processes that stay up for ranks: forked from a server that has torch imported, given out, checked, taken back.

A process that ran one rank's function runs the next one if it is as it was before (`clean_state.py`); one that raised,
was killed, hangs, or left something behind ends, and another is forked when it is needed. So a test meets what a new
process has, and pays for it only where it must.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tests.support.clean_state import ProcessState
from tests.support.paths import ROOT
from tests.support.patience import SOON_S

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.fx.experimental.symbolic_shapes",
    "numba",
    "numpy.ma",
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "treadle.runtime",
    "treadle.update.updater",
    "treadle.update.rank.source",
    "tests.support.warm",
]
"""Imported once, in the forkserver: four ranks then start in 0.2 s, where `spawn` takes 25."""

SHOW_STACKS = signal.SIGURG  # ignored by default, so it does no harm to a rank that does not listen yet

Task = Callable[[Callable[[], None]], bytes]
"""What a process runs: a function that calls the one it is given when it has imported what it needs."""


@dataclass(frozen=True)
class Done:
    """What a process answers: what its task returned, and what it left behind."""

    value: bytes
    left: list[str]


@dataclass(eq=False)
class PoolProcess:
    """A process and the pipe to it."""

    process: ForkServerProcess
    pipe: Connection

    def begin(self, stderr: Path, task: Task, *, last: bool) -> None:
        """Has it run a task; its answer is a `Done` in the pipe. It ends after the last one, or if it left anything."""
        self.pipe.send_bytes(pickle.dumps((stderr, task, last)))

    def has_ended(self) -> bool:
        """Did it end by itself after its last task, as a script does after its last line."""
        self.process.join(SOON_S)
        return not self.process.is_alive()

    def end(self) -> int:
        """Kills it, if it has not ended; returns its exit code."""
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        self.process.close()
        self.pipe.close()
        return code


class Pool:
    """The processes of this session: those at rest, and how many were ever started and given out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # tests run ranks from several threads
        self._resting: list[PoolProcess] = []
        self.num_started = self.num_taken = 0
        self.left: Counter[str] = Counter()
        """What processes left behind, which were then ended."""

    def take(self, num: int, *, new: bool) -> list[PoolProcess]:
        """So many processes, all of them new where a test says so."""
        with self._lock:
            taken = [] if new else [self._resting.pop() for _ in range(min(num, len(self._resting)))]
            self.num_taken += num
        alive = [member for member in taken if member.process.is_alive()]
        for member in set(taken) - set(alive):
            member.end()
        return alive + [self._start() for _ in range(num - len(alive))]

    def give_back(self, members: Sequence[PoolProcess]) -> None:
        """Takes processes in that are as they were."""
        with self._lock:
            self._resting += members

    def close(self) -> None:
        """Has those at rest end by themselves, and waits for them."""
        with self._lock:
            resting, self._resting = self._resting, []
        for member in resting:
            member.pipe.close()
        for member in resting:
            member.process.join()

    def _start(self) -> PoolProcess:
        context = server()
        ours, theirs = context.Pipe()
        process = context.Process(target=_stay_up, args=(theirs,), name="rank")
        process.start()  # returns when it was forked: what the forkserver preloads is not counted
        theirs.close()
        with self._lock:
            self.num_started += 1
        return PoolProcess(process, ours)


POOL = Pool()

_starting = threading.Lock()


def server() -> ForkServerContext:
    """The forkserver, started if it was not yet. It finds what lies beside this file as tests do."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with _starting:
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([given] if given else [])])
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if given is not None:
                os.environ["PYTHONPATH"] = given
    return context


# -- in the process ----------------------------------------------------------------------------------------------------


def _stay_up(pipe: Connection) -> None:
    """Runs one function after the other. What one raises goes on up: a traceback on stderr and exit code 1."""
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    torch.set_num_threads(1)
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gc.collect()
    gc.freeze()  # what is there now is not looked at again by each collection
    state = ProcessState()
    while True:
        try:
            stderr, task, last = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        _write_stderr_to(stderr)
        with warnings.catch_warnings():  # what warns once does so again
            value = task(state.see_modules)  # a test's modules as they are before it replaces parts of them
        del task
        gc.collect()
        left = [] if last else state.changes()
        pipe.send(Done(value, left))
        if last or left:
            return


def _write_stderr_to(path: Path) -> None:
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)


def _end_with_parent() -> None:
    """Its parent is the forkserver, so nothing else tells a process that the session was killed."""
    parent = mp.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _end_all() -> None:
    """Waits until all processes have ended; by themselves multiprocessing's own do so some time after this one."""
    POOL.close()
    cast(Any, forkserver)._forkserver._stop()
    cast(Any, resource_tracker)._resource_tracker._stop()


atexit.register(_end_all)
