"""Runs a function on N real processes that share a process group: gloo, or the backend of the device that tests run on.

    def ring(rank: int, num_rounds: int) -> float: ...      # importable: at the top of a test module

    values = check(run_ranks(4, ring, 3))

`run_ranks` waits for every rank and returns what became of each: a value, an exception, a signal, no end in time. A
process stays up for the next call if it is as it was (`rank_pool.py`); none outlives the test session, whatever comes.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, cast

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.support import devices
from tests.support.patience import HUNG_S
from tests.support.rank_pool import POOL, SHOW_STACKS, Done, PoolProcess

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_ATTRIBUTE_BYTES = 64 * 1024
"""An attribute of an exception that is larger than this, pickled, stays behind."""


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
    def failure(self) -> Path:
        return self.directory / f"rank{self.rank}.failure"


def run_ranks(
    world: int,
    fn: Callable[[int, *Ts], T],
    *args: *Ts,
    stuck: Collection[int] = (),
    timeout_s: float = HUNG_S,
    group_timeout_s: float | None = None,
    new: bool = False,
) -> list[Outcome[T]]:
    """`fn(rank, *args)` on each of `world` processes, with a process group of them all as the default group.

    Ranks still alive after `timeout_s` are killed; those in `stuck`, which a test stops for good, as soon as all others
    have ended. `group_timeout_s` is the group's own, `timeout_s` if not given. `new`: on processes that nobody had
    before and nobody gets after. The store is in this process, so that no rank takes it away with it.
    """
    devices.skip_beyond_devices(world)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group_timeout_s = group_timeout_s if group_timeout_s is not None else timeout_s
    task = devices.pickled((fn, args))  # by multiprocessing's own pickler, all ranks would share the memory of tensors
    new = new or devices.DEVICE_TYPE != "cpu"  # a rank's device is set once
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        places = [_Place(rank, world, store.port, group_timeout_s, Path(directory)) for rank in range(world)]
        members = POOL.take(world, new=new)
        kept: list[PoolProcess] = []
        try:
            for place, member in zip(places, members, strict=True):
                place.stderr.touch()
                member.begin(place.stderr, partial(_run_rank, place, task), last=new)
            ends = _wait_all(members, stuck, time.monotonic() + timeout_s)
            for member, end in zip(members, ends, strict=True):
                if end.done is not None and (new or end.done.left) and not member.has_ended():
                    end.at_s = None
            _show_stacks([member.process for member, end in zip(members, ends, strict=True) if end.at_s is None])
            kept = [m for m, end in zip(members, ends, strict=True) if end.done and not (new or end.done.left)]
            POOL.left.update(what for end in ends if end.done for what in end.done.left)
            POOL.give_back(kept)
        finally:
            codes = [0 if member in kept else member.end() for member in members]
        return [_outcome(place, end, code) for place, end, code in zip(places, ends, codes, strict=True)]


class _Closes(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closes)

_open: list[_Closes] = []
"""Of this rank."""


def close_at_end(thing: C) -> C:
    """Has it closed when the rank's function has returned, as the end of a process would: the process may stay up."""
    _open.append(thing)
    return thing


def check(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """The values of all ranks, or an AssertionError that tells of every rank that has none."""
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        told = "\n".join(map(str, sorted(failed, key=lambda outcome: outcome.ended_s)))
        raise AssertionError(f"{len(failed)} of {len(outcomes)} ranks failed, the first to end first\n{told}")
    return [cast(T, outcome.value) for outcome in outcomes]


@dataclass
class _End:
    """When a rank was seen to have ended, if it was, and what it answered."""

    at_s: float | None = None
    done: Done | None = None


def _wait_all(members: Sequence[PoolProcess], stuck: Collection[int], deadline_s: float) -> list[_End]:
    """The end of each: its answer, or that of its process; none by the deadline, and of those that are stuck."""
    ends = {member: _End() for member in members}
    free = {member for rank, member in enumerate(members) if rank not in stuck}
    waited: dict[Any, PoolProcess] = {member.pipe: member for member in members} | {
        member.process.sentinel: member for member in members
    }
    while any(ends[member].at_s is None for member in free) and (left_s := deadline_s - time.monotonic()) > 0:
        for ready in connection.wait(waited, left_s):
            member = waited.pop(ready, None)
            if member is None:  # its answer and the end of its process came together
                continue
            end = ends[member]
            with suppress(EOFError, ConnectionResetError):  # it has ended, or is about to
                if member.pipe.poll():
                    end.done = cast(Done, member.pipe.recv())
            if end.done is not None or ready == member.process.sentinel:
                end.at_s = time.monotonic()
                for part in (member.pipe, member.process.sentinel):
                    waited.pop(part, None)
    return list(ends.values())


def _show_stacks(processes: Sequence[ForkServerProcess]) -> None:
    """Asks processes that hang for the stacks of their threads."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            with suppress(ProcessLookupError):  # it has just ended, and the forkserver has not said so yet
                os.kill(process.pid, SHOW_STACKS)
    connection.wait([process.sentinel for process in processes], 0.2 if processes else 0)


def _outcome(place: _Place, end: _End, exitcode: int) -> Outcome[Any]:
    error = pickle.loads(place.failure.read_bytes()) if place.failure.exists() else None
    return Outcome(
        rank=place.rank,
        returned=end.done is not None,
        value=pickle.loads(end.done.value) if end.done is not None else None,
        error=error,
        exitcode=exitcode,
        ended_s=end.at_s if end.at_s is not None else time.monotonic(),
        timed_out=end.at_s is None,
        stderr=place.stderr.read_text(errors="replace"),
    )


def _run_rank(place: _Place, task: bytes, imported: Callable[[], None]) -> bytes:
    """What a rank does. What is raised here ends its process, with a traceback on stderr, as it would end a script."""
    given, excepthook = dict(os.environ), sys.excepthook
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks for the address of the machine's name
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # else a rank that ends at once fails those that still connect to it
    try:
        devices.enter(place.rank)
        fn, args = pickle.loads(task)
        imported()
        store = TCPStore("127.0.0.1", place.port, is_master=False)
        timeout = timedelta(seconds=place.group_timeout_s)
        dist.init_process_group(
            devices.backend(), store=store, rank=place.rank, world_size=place.world, timeout=timeout
        )
        answer = devices.pickled(fn(place.rank, *args))
        while _open:
            _open.pop().close()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        part = place.failure.with_suffix(".part")
        part.write_bytes(pickle.dumps(_failure(error)))
        part.rename(place.failure)  # all or nothing: a rank may be killed at any time
        raise
    for name in os.environ.keys() - given.keys():
        del os.environ[name]
    os.environ.update(given)
    sys.excepthook = excepthook  # torch's, which names the rank, stays after its group
    return answer


def _failure(error: BaseException) -> Failure:
    attributes = {}
    for name, value in vars(error).items():
        try:
            if len(pickle.dumps(value)) <= MOST_ATTRIBUTE_BYTES:
                attributes[name] = value
        except Exception:  # whatever pickling someone's object does: the failure itself must get through
            continue
    return Failure(type(error).__name__, str(error), attributes, "".join(traceback.format_exception(error)))
