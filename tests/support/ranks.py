"""Runs a function on N real processes that share a process group: gloo, or the backend of the device that tests run on.

    def ring(rank: int, num_rounds: int) -> float: ...      # importable: at the top of a test module

    values = check(run_ranks(4, ring, 3))

`run_ranks` waits for every rank and tells what became of each: a value, an exception, a signal, no end in time. No
process outlives the call, nor the forkserver the test session, whatever happens to either.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.support import devices
from tests.support.paths import ROOT
from tests.support.patience import HUNG_S
from treadle.dist.nccl_settings import NEEDED

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.fx.experimental.symbolic_shapes",
    "pytest",
    "hypothesis",
    "treadle.runtime",
    "treadle.update.updater",
    "treadle.update.rank.source",
]
"""Imported once, in the forkserver: four ranks then start in 0.2 s, where `spawn` takes 25."""

MOST_ATTRIBUTE_BYTES = 64 * 1024
"""An attribute of an exception that is larger than this, pickled, stays behind."""

SHOW_STACKS = signal.SIGURG  # ignored by default, so it does no harm to a rank that does not listen yet


@dataclass(frozen=True)
class Failure:
    """The exception that ended a rank's function: `type` by name, and those of its attributes that can be sent."""

    type: str
    message: str
    attributes: dict[str, Any]
    traceback: str


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of a rank.

    `exitcode` is negative for a signal. `ended_s` is when its process was seen to end, on the clock of
    `time.monotonic`, which all processes of a machine share. A rank that timed out has the stacks of its threads at
    that moment in `stderr`.
    """

    rank: int
    returned: bool
    value: T | None
    error: Failure | None
    exitcode: int
    ended_s: float
    timed_out: bool
    stderr: str = field(repr=False)

    @property
    def ok(self) -> bool:
        """Did its function return and its process end well."""
        return self.returned and self.exitcode == 0 and not self.timed_out

    def __str__(self) -> str:
        if self.ok:
            return f"rank {self.rank} returned {self.value!r}"
        if self.timed_out:
            what = f"did not end in time{' after its function returned' if self.returned else ''}"
        elif self.error is not None:
            return f"rank {self.rank} raised\n{self.error.traceback}"
        elif self.exitcode < 0:
            what = f"was ended by {signal.Signals(-self.exitcode).name}"
        else:
            what = f"exited with {self.exitcode}{'' if self.returned else ' before its function returned'}"
        return f"rank {self.rank} {what}\n{self.stderr}"


@dataclass(frozen=True)
class _Place:
    """Where a rank stands, and where it puts what it leaves."""

    rank: int
    world: int
    port: int
    group_timeout_s: float
    directory: Path

    @property
    def stderr(self) -> Path:
        return self.directory / f"rank{self.rank}.stderr"

    @property
    def result(self) -> Path:
        return self.directory / f"rank{self.rank}.pickle"

    def leave(self, value: Any, error: Failure | None) -> None:
        """All or nothing: a rank may be killed at any time."""
        part = self.result.with_suffix(".part")
        part.write_bytes(pickle.dumps((value, error)))
        part.rename(self.result)


def run_ranks(
    world: int,
    fn: Callable[[int, *Ts], T],
    *args: *Ts,
    stuck: Collection[int] = (),
    timeout_s: float = HUNG_S,
    group_timeout_s: float | None = None,
) -> list[Outcome[T]]:
    """`fn(rank, *args)` on each of `world` processes, with a process group of them all as the default group.

    Ranks still alive after `timeout_s` are killed; those in `stuck`, which a test stops for good, as soon as all others
    have ended. `group_timeout_s` is the group's own, `timeout_s` if not given.
    The store is in this process, so that no rank takes it away with it.
    """
    devices.skip_beyond_devices(world)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group_timeout_s = group_timeout_s if group_timeout_s is not None else timeout_s
    context = server()
    task = pickle.dumps((fn, args))  # by multiprocessing's own pickler, all ranks would share the memory of tensors
    processes: list[ForkServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        places = [_Place(rank, world, store.port, group_timeout_s, Path(directory)) for rank in range(world)]
        try:
            for place in places:
                place.stderr.touch()
                process = context.Process(target=_rank_main, args=(place, task), name=f"rank {place.rank}")
                processes.append(process)
                process.start()  # returns when the rank was forked: what the forkserver preloads is not counted
            ended_s = _wait_all(processes, stuck, time.monotonic() + timeout_s)
            late = [end_s is None for end_s in ended_s]
            if any(late):
                _show_stacks([process for process, is_late in zip(processes, late, strict=True) if is_late])
        finally:
            _kill_all(processes)
        return [
            _outcome(place, process, end_s) for place, process, end_s in zip(places, processes, ended_s, strict=True)
        ]


_starting = threading.Lock()


def server() -> ForkServerContext:
    """The forkserver, started if it was not yet. It finds what lies beside this file as tests do."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with _starting:  # tests run ranks from several threads
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([given] if given else [])])
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if given is not None:
                os.environ["PYTHONPATH"] = given
    return context


def check(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """The values of all ranks, or an AssertionError that tells of every rank that has none."""
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        told = "\n".join(map(str, sorted(failed, key=lambda outcome: outcome.ended_s)))
        raise AssertionError(f"{len(failed)} of {len(outcomes)} ranks failed, the first to end first\n{told}")
    return [cast(T, outcome.value) for outcome in outcomes]


def _wait_all(processes: Sequence[ForkServerProcess], stuck: Collection[int], deadline_s: float) -> list[float | None]:
    """When each process ended, or None for those that did not by the deadline or are stuck."""
    ended_s: dict[int, float] = {}
    free = {process.sentinel for rank, process in enumerate(processes) if rank not in stuck}
    while free - ended_s.keys() and (left_s := deadline_s - time.monotonic()) > 0:
        alive = [process.sentinel for process in processes if process.sentinel not in ended_s]
        ready = connection.wait(alive, left_s)
        ended_s |= {cast(int, sentinel): time.monotonic() for sentinel in ready}
    return [ended_s.get(process.sentinel) for process in processes]


def _show_stacks(processes: Sequence[ForkServerProcess]) -> None:
    """Asks processes that hang for the stacks of their threads."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            with suppress(ProcessLookupError):  # it has just ended, and the forkserver has not said so yet
                os.kill(process.pid, SHOW_STACKS)
    connection.wait([process.sentinel for process in processes], 0.2)


def _kill_all(processes: Sequence[ForkServerProcess]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()


def _outcome(place: _Place, process: ForkServerProcess, ended_s: float | None) -> Outcome[Any]:
    left = pickle.loads(place.result.read_bytes()) if place.result.exists() else None
    value, error = left if left is not None else (None, None)
    assert process.exitcode is not None
    outcome: Outcome[Any] = Outcome(
        rank=place.rank,
        returned=left is not None and error is None,
        value=value,
        error=error,
        exitcode=process.exitcode,
        ended_s=ended_s if ended_s is not None else time.monotonic(),
        timed_out=ended_s is None,
        stderr=place.stderr.read_text(errors="replace"),
    )
    process.close()
    return outcome


def _rank_main(place: _Place, task: bytes) -> None:
    """What a rank does. What is raised here goes on up: its traceback on stderr and exit code 1, as in a script."""
    with place.stderr.open("ab") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks for the address of the machine's name
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # else a rank that ends at once fails those that still connect to it
    try:
        fn, args = pickle.loads(task)
        store = TCPStore("127.0.0.1", place.port, is_master=False)
        timeout = timedelta(seconds=place.group_timeout_s)
        os.environ.update(NEEDED if devices.backend() == "nccl" else {})
        devices.enter(place.rank)
        dist.init_process_group(
            devices.backend(), store=store, rank=place.rank, world_size=place.world, timeout=timeout
        )
        value = fn(place.rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        place.leave(value, None)
    except BaseException as error:
        place.leave(None, _failure(error))
        raise


def _failure(error: BaseException) -> Failure:
    attributes = {}
    for name, value in vars(error).items():
        try:
            if len(pickle.dumps(value)) <= MOST_ATTRIBUTE_BYTES:
                attributes[name] = value
        except Exception:  # whatever pickling someone's object does: the failure itself must get through
            continue
    return Failure(type(error).__name__, str(error), attributes, "".join(traceback.format_exception(error)))


def _end_with_parent() -> None:
    """A rank's parent is the forkserver, so nothing else tells it that the test process was killed."""
    parent = mp.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _stop_servers() -> None:
    """Waits until multiprocessing's own processes have ended; by themselves they do so some time after this one."""
    cast(Any, forkserver)._forkserver._stop()
    cast(Any, resource_tracker)._resource_tracker._stop()


atexit.register(_stop_servers)
