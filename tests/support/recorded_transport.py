"""A step on gloo with NCCL's queues, whose ranks write what torch's Flight Recorder would: for dumps of real hangs.

Each rank has a thread a communicator, which does its messages in order of issue, each waiting for its partner; a thread
for cells; and one for the host, which issues. Entries are recorded when they are created, and kept up to date.

That nothing moves any more is seen by counting, never by time: all threads of all ranks wait, and every message that
was sent and has a receive was received, in two looks at the same numbers. Then each rank writes its dump and ends.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from treadle.ir import Schedule
from treadle.ir.ops import LaneKind
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder, issue_order
from treadle.verifier.communicator_queues import Communicators

_LOOK_S = 0.01
_ACKNOWLEDGED = 2**20
"""Added to the tag of a message for what says that it has come."""
_SENT, _POSTED, _RECEIVED = 0, 1, 2


@dataclass(frozen=True)
class RecordedRun:
    """A run, and what goes wrong in it."""

    directory: Path
    schedules: tuple[Schedule, ...]
    """The schedule of each rank."""

    steps: int = 2
    communicators: Communicators = "pair"
    at_use: bool = False
    eager: bool = False
    timing: bool = False
    """Entries say when they have started, as with TORCH_NCCL_ENABLE_TIMING."""

    blocking: bool = False
    """A host waits for each cell, as on gloo; else it runs ahead of its device."""

    buffer_size: int = 2000
    form: Literal["pickle", "json"] = "pickle"
    stalled: tuple[int, str] | None = None
    """The rank whose host stops before a cell of the last step."""

    killed: bool = False
    """The rank that has stalled is killed, and leaves no dump but one that it has written before, if any."""

    early_dump: bool = False
    """Each rank writes a dump after its first step too."""


def record(run: RecordedRun) -> None:
    """Run it on processes until nothing moves, or it has ended."""
    run.directory.mkdir(parents=True, exist_ok=True)
    world = len(run.schedules)
    board = _board(run.directory, world, "w+")
    board[:, 0] = 1
    board.flush()
    outcomes = run_ranks(world, _rank, run, new=True)
    for outcome in outcomes:
        lost = run.killed and run.stalled is not None and outcome.rank == run.stalled[0]
        assert outcome.exitcode == (-signal.SIGKILL if lost else 0), str(outcome)
    (run.directory / "board").unlink()


def _board(directory: Path, world: int, mode: Literal["r+", "w+"]) -> np.memmap[Any, np.dtype[np.int64]]:
    """For each rank: threads that do not wait, and a number of changes; messages sent to each, receives from each that
    were posted and that have ended, and the same of what says that a message has come.
    """
    return np.memmap(directory / "board", np.int64, mode, shape=(world, 2 + 6 * world))


def _rank(rank: int, run: RecordedRun) -> None:
    _RecordedRank(rank, run).run()
    os._exit(0)  # threads that hang do not end


class _Event:
    """Something that is done at some time."""

    def __init__(self) -> None:
        self.done = False


class _RecordedRank:
    def __init__(self, rank: int, run: RecordedRun) -> None:
        self.rank, self.config = rank, run
        self.world = len(run.schedules)
        self.board = _board(run.directory, self.world, "r+")
        self.changed = threading.Condition()
        self.waiting: list[tuple[Callable[[], bool], _Event]] = []
        self.queues: dict[Hashable, queue.SimpleQueue[Callable[[], None]]] = {}
        self.pending: dict[Hashable, int] = defaultdict(int)
        self.entries: deque[dict[str, Any]] = deque(maxlen=run.buffer_size)
        self.recorded = {"record": 0, "p2p": 0, "op": 0, "collective": 0}
        self.alive: list[Any] = []
        self.schedule = run.schedules[rank]
        self.program = lower_cells(self.schedule)
        order = issue_order(self.schedule, self.program, receives="use" if run.at_use else "sender")
        assert order is not None
        self.order: IssueOrder = order

    def run(self) -> None:
        threading.Thread(target=self._host, daemon=True).start()
        before = None
        while True:
            now = np.array(self.board)
            if before is not None and (now == before).all() and self._still(now):
                break
            before = now
            time.sleep(_LOOK_S)
        if self.config.killed and self.config.stalled is not None and self.config.stalled[0] == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self._write()

    def _still(self, board: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
        if board[:, 0].any():
            return False
        counts = board[:, 2:].reshape(self.world, 2, 3, self.world)
        sent, posted, received = counts[:, :, _SENT], counts[:, :, _POSTED], counts[:, :, _RECEIVED]
        due = np.minimum(sent, posted.transpose(2, 1, 0))
        return bool((received.transpose(2, 1, 0) == due).all())

    # -- threads that wait -------------------------------------------------------------------------------------------

    def _note(self, active: int = 0, counted: tuple[int, int, int] | None = None) -> None:
        """Count threads that wait no more, or a message: (is it of the second kind, what of it, which peer)."""
        with self.changed:
            row = self.board[self.rank]
            row[1] += 1
            row[0] += active
            if counted is not None:
                row[2:].reshape(2, 3, self.world)[counted] += 1

    def _set(self, event: _Event) -> None:
        """An event is done: whoever waits for nothing else is active from now on, and not only when it wakes."""
        with self.changed:
            event.done = True
            for waiter in [each for each in self.waiting if each[0]()]:
                self.waiting.remove(waiter)
                waiter[1].done = True
                self._note(active=1)
            self.changed.notify_all()

    def _wait(self, events: Sequence[_Event]) -> None:
        with self.changed:
            if all(event.done for event in events):
                return
            woken = _Event()
            self.waiting.append((lambda: all(event.done for event in events), woken))
            self._note(active=-1)
            while not woken.done:
                self.changed.wait()

    def _on(self, key: Hashable, job: Callable[[], None]) -> None:
        """Put a job on a queue, whose thread is active as long as it has one."""
        with self.changed:
            if key not in self.queues:
                self.queues[key] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(key,), daemon=True).start()
            self.pending[key] += 1
            if self.pending[key] == 1:
                self._note(active=1)
            self.queues[key].put(job)

    def _work(self, key: Hashable) -> None:
        while True:
            self.queues[key].get()()
            with self.changed:
                self.pending[key] -= 1
                if not self.pending[key]:
                    self._note(active=-1)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, value: int, peer: int, tag: int) -> None:
        self._note(counted=(int(tag >= _ACKNOWLEDGED), _SENT, peer))
        tensor = torch.tensor([value])
        self.alive.append((dist.isend(tensor, peer, tag=tag), tensor))

    def _receive(self, peer: int, tag: int) -> int:
        tensor = torch.zeros(1, dtype=torch.int64)
        self._note(active=-1, counted=(int(tag >= _ACKNOWLEDGED), _POSTED, peer))
        try:
            dist.recv(tensor, peer, tag=tag)
        except RuntimeError:  # the other end was killed, or has written its dump: NCCL would go on waiting
            threading.Event().wait()
        self._note(active=1, counted=(int(tag >= _ACKNOWLEDGED), _RECEIVED, peer))
        return int(tensor)

    def _compute(self, needs: Sequence[_Event], done: _Event) -> None:
        self._wait(needs)
        self._set(done)

    def _talk(self, is_send: bool, peer: int, tag: int, done: _Event) -> None:
        if is_send:
            self._send(tag, peer, tag)
            if not self.config.eager:
                self._receive(peer, tag + _ACKNOWLEDGED)
        else:
            assert self._receive(peer, tag) == tag
            if not self.config.eager:
                self._send(1, peer, tag + _ACKNOWLEDGED)
        self._set(done)

    # -- the host ----------------------------------------------------------------------------------------------------

    def _host(self) -> None:
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for step in range(self.config.steps):
            events: dict[int, _Event] = {}
            if not self._issue(events, counts, last=step == self.config.steps - 1):
                break
            self._wait(list(events.values()))
            self._collective()
            if self.config.early_dump and step == 0:
                self._write()
        self._note(active=-1)

    def _issue(self, events: dict[int, _Event], counts: dict[tuple[int, int], int], *, last: bool) -> bool:
        """Issue a step; False if the host stops in it."""
        program, order = self.program, self.order
        items = range(int(order.ptr[self.rank]), int(order.ptr[self.rank + 1]))
        cell: _Event | None = None
        place = 0
        while place < len(items):
            op = int(order.op[items[place]])
            lane = program.lane(int(program.lane_of[op]))
            if lane.kind is LaneKind.COMPUTE:
                if last and self.config.stalled == (self.rank, str(program.op(op))):
                    return False
                needs = [events[need] for need in program.deps(op) if need in events]
                cell = events[op] = _Event()
                self._on("compute", partial(self._compute, needs, cell))
                if self.config.blocking:
                    self._wait([cell])
                place += 1
                continue
            batch = [op]
            while place + len(batch) < len(items) and order.joined[items[place + len(batch)]]:
                batch.append(int(order.op[items[place + len(batch)]]))
            self._launch(batch, [cell] if cell is not None else [], events, counts)
            place += len(batch)
        return True

    def _launch(
        self, ops: Sequence[int], after: list[_Event], events: dict[int, _Event], counts: dict[tuple[int, int], int]
    ) -> None:
        messages = []
        for op in ops:
            lane = self.program.lane(int(self.program.lane_of[op]))
            is_send = lane.kind is LaneKind.SEND
            src, dst = (self.rank, lane.peer) if is_send else (lane.peer, self.rank)
            tag = (src * self.world + dst) * 4096 + counts[src, dst]
            counts[src, dst] += 1
            events[op] = _Event()
            messages.append((is_send, int(lane.peer), tag, events[op]))
        entries = self._entries([(is_send, peer) for is_send, peer, *_ in messages])
        keys: dict[Communicators, Hashable] = {
            "pair": (min(src, dst), max(src, dst)), "group": "group", "channel": (src, dst, "channel"),
        }  # fmt: skip

        def job() -> None:
            self._wait(after)
            if self.config.timing:
                entries[-1].update(state="started", time_discovered_started_ns=time.time_ns())
            for is_send, peer, tag, event in messages[:-1]:
                self._on(("batch", event), partial(self._talk, is_send, peer, tag, event))
            is_send, peer, tag, event = messages[-1]
            self._talk(is_send, peer, tag, _Event())
            self._wait([event for *_, event in messages[:-1]])
            entries[-1].update(state="completed", retired=True, time_discovered_completed_ns=time.time_ns())
            self._set(event)

        self._on(keys[self.config.communicators], job)

    # -- the recorder ------------------------------------------------------------------------------------------------

    def _entries(self, messages: Sequence[tuple[bool, int]]) -> list[dict[str, Any]]:
        """Record messages; a batch has one number, and an entry of its own whose state is the batch's."""
        self.recorded["p2p"] += 1
        made = []
        for is_send, peer in messages:
            self.recorded["op"] += 1
            name = f"nccl:send {self.rank}->{peer}" if is_send else f"nccl:recv {self.rank}<-{peer}"
            made.append(self._entry(name, "1", "pp", sizes=[[2, 16]], dtypes=["BFloat16"]))
        if len(made) > 1:
            made.append(self._entry("nccl:coalesced", "1", "pp"))
        return made

    def _collective(self) -> None:
        """What another group does between two steps."""
        self.recorded["collective"] += 1
        entry = self._entry("nccl:all_reduce", "0", "default_pg", sizes=[[64]], dtypes=["Float"], is_p2p=False)
        entry.update(state="completed", retired=True, time_discovered_completed_ns=time.time_ns())

    def _entry(
        self,
        name: str,
        group: str,
        about: str,
        *,
        sizes: Sequence[list[int]] = (),
        dtypes: Sequence[str] = (),
        is_p2p: bool = True,
    ) -> dict[str, Any]:
        entry = {
            "frames": [{"name": "step", "filename": "train.py", "line": 1}],
            "record_id": self.recorded["record"],
            "pg_id": int(group),
            "process_group": (group, about),
            "thread_name": "python",
            "thread_id": "1",
            "collective_seq_id": self.recorded["collective"],
            "p2p_seq_id": self.recorded["p2p"] if is_p2p else 0,
            "op_id": self.recorded["op"] if is_p2p else self.recorded["collective"],
            "profiling_name": name,
            "time_created_ns": time.time_ns(),
            "input_sizes": list(sizes),
            "input_dtypes": list(dtypes),
            "output_sizes": list(sizes),
            "output_dtypes": list(dtypes),
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": 600000,
            "is_p2p": is_p2p,
        }
        self.recorded["record"] += 1
        self.entries.append(entry)
        return entry

    def _write(self) -> None:
        ranks = str(list(range(self.world)))
        config = {
            name: {"name": name, "desc": desc, "ranks": ranks} for name, desc in (("0", "default_pg"), ("1", "pp"))
        }
        whole = {
            "version": "2.10",
            "pg_config": config,
            "comm_lib_version": "",
            "pg_status": {},
            "entries": [dict(entry) for entry in self.entries],
        }
        path = self.config.directory / f"trace_{self.rank}"
        if self.config.form == "json":
            path.write_text(json.dumps(whole))
        else:
            path.write_bytes(pickle.dumps(whole, protocol=2))


def same_on_all(schedule: Schedule, directory: Path, **more: Any) -> RecordedRun:
    """Return a run in which every rank has one schedule."""
    return replace(RecordedRun(directory, (schedule,) * schedule.pp), **more)
