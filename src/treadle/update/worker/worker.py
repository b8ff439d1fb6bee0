"""A worker's side of an update: it takes messages, and has its engine do what `protocol/worker.py` decides.

Until it has voted (`staged`), a worker may go back to the old version by itself: no version is committed without the
vote of every worker. From then on it stays closed until it learns the decision.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.host.boot_clock import boot_ns
from treadle.update.memory.copying import finish_copies, on_host
from treadle.update.memory.ipc_buffers import Buffer, memory_of, name_of
from treadle.update.protocol import worker_decisions as deciding
from treadle.update.protocol.leases import Lease, extends, is_served, leased
from treadle.update.protocol.update_messages import (
    MOST_PLANS,
    Begin,
    Describe,
    Finish,
    FromWorker,
    Grant,
    Map,
    Move,
    Moved,
    Refused,
    Share,
    State,
    Status,
    TakePlan,
    WeightLayout,
)
from treadle.update.protocol.worker_decisions import Act, Content, MessageRefusedError, Moves, WorkerState
from treadle.update.worker.adapter import Adapter
from treadle.update.worker.arrived_boxes import Arrival, Assembly, StagedArrivals
from treadle.update.worker.delta_buckets import DeltaBuckets
from treadle.update.worker.rollback import RollbackCopy
from treadle.update.worker.staging import arrivals_of, assembled, export_bucket
from treadle.update.worker.worker_plan import WorkerPlan, boxes_by_name
from treadle.weights.tensor_boxes import Box
from treadle.wire.codec import sendable

BUSY_S = 2.0
"""How long a message waits for the one before it. Update ranks ask again until their own deadline."""


class Worker:
    """One engine and its state. `handle` takes a message and returns the answer; it never raises. Thread-safe."""

    def __init__(self, adapter: Adapter, worker: int, spill: Path | None = None, replica: int | None = None) -> None:
        self.adapter, self.worker = adapter, worker
        self.replica = replica if replica is not None else worker
        self.now = WorkerState(worker)
        self.lease = Lease()
        self._leasing = threading.Lock()
        self.incarnation = secrets.token_hex(8)
        self.slot = ""
        self.before: Callable[[], int] = lambda: 0
        """The pid of the process that holds the slot, where this one does not."""
        self.rollbacks = 0
        self.plans: dict[str, WorkerPlan] = {}
        self._loaded: set[int] = set()
        self._assembly = Assembly()
        self._wanted: dict[str, list[Box]] = {}
        """By tensor the boxes that an engine needs whole."""
        self._layout = WeightLayout((), ())
        self._num_layouts = 0
        """How often the engine has changed the layout that it wants, which it does when it finishes a load."""
        self._wanted_before: dict[str, list[Box]] = {}
        """The same of the version that is served: an engine may want other boxes of the next one."""
        self._rollback = RollbackCopy(adapter, spill)
        self._buffers: list[Buffer] = []
        self._one = threading.Lock()
        self._doing = ""
        self._acts: dict[Act, Callable[[WorkerState], str | None]] = {
            "begin": lambda _: self.adapter.begin(),
            "finish": lambda _: self.adapter.finish(),
            "invalidate": lambda _: self.adapter.invalidate(),
            "open": self._open_new,
            "reopen": self._open,
            "abort": lambda _: self.adapter.abort(),
            "restore": lambda _: self._restore(),
        }
        self._steps: dict[type[Any], Callable[[Any], FromWorker]] = {
            Describe: lambda asked: self.adapter.layout() if asked.wants else self.status,
            Grant: self._grant,
            TakePlan: self._take_plan,
            Begin: self._begin,
            Move: self._move,
            Finish: self._finish,
        }

    @property
    def state(self) -> State:
        """One of lapsed, loading, staged and serving."""
        return self.now.state

    @property
    def status(self) -> Status:
        """The worker's state as a message."""
        now, stamp_ns = self.now, boot_ns()
        lapsed = now.state == "serving" and not is_served(now, self.lease, stamp_ns)
        return Status(
            self.worker,
            os.getpid(),
            "lapsed" if lapsed else now.state,
            now.version,
            now.epoch,
            self.rollbacks,
            log=now.bound,
            origin=now.held.log if now.held is not None else "",
            content=now.held.epoch if now.held is not None else 0,
            incarnation=self.incarnation,
            slot=self.slot,
            holds_slot=now.holds_slot,
            before=0 if now.holds_slot else self.before(),
            host=socket.gethostname(),
            replica=self.replica,
            staged=now.epoch if now.state == "staged" else 0,
            stamp_ns=stamp_ns,
            term=self.lease.term if self.lease.log == now.bound else 0,
            base=self._rollback.base,
            can_export=self.adapter.can_export,
            plans=tuple(self.plans),
            rollback_bytes=self._rollback.size_bytes,
            layout=self._num_layouts,
            device=name_of(self.adapter.device),
        )

    def handle(self, message: Any) -> FromWorker:
        """Do what a message asks, if the worker's state allows it; the answer."""
        step = self._steps.get(type(message))
        if step is None:
            return Refused("order", f"{type(message).__name__} has no place here")
        answer = self._alone(type(message).__name__, lambda: step(message))
        if isinstance(answer, Refused):
            return Refused(answer.code, answer.text, getattr(message, "epoch", 0))
        return answer

    def renew(self, message: Grant) -> FromWorker:
        """Take a grant beside an attempt: extend the lease on what is served, whatever else is under way."""
        with self._leasing:
            if extends(self.now, message):
                try:
                    self._take_lease(self.now.held, message)
                except MessageRefusedError as refusal:
                    return Refused(refusal.code, str(refusal), message.epoch)
                return self.status
        return self.handle(message)

    def _take_lease(self, held: Content | None, message: Grant) -> None:
        """Take the lease on what is held after a grant; `_leasing` is held."""
        self.lease = leased(self.lease, held, message)
        self._do(self.adapter.lease(self.lease.until(held)))

    def map(self, message: Map, fds: list[int]) -> FromWorker:
        """Map the buffers; takes ownership of the file descriptors."""
        return self._alone("Map", lambda: self._map(message, fds))

    def release(self, taken_over: Callable[[], bool] = lambda: False) -> None:
        """The update rank is gone: go back to the old version, unless this worker has voted, and unmap its buffers.

        Does nothing where another rank has taken over: that one settles, and maps its own buffers.
        """
        with self._one:
            if not taken_over():
                self._go_back()

    def _go_back(self) -> None:
        with suppress(Exception):  # an engine that raises stays closed
            self._make(deciding.release(self.now, can_restore=self._rollback.can_restore))
        self._unmap()

    def place(self, *, holds_slot: bool) -> None:
        """Set whether this process holds the worker's slot; without it the worker is neither settled nor loaded."""
        with self._one:
            self.now = replace(self.now, holds_slot=holds_slot)

    def retire(self, drain_s: float) -> bool:
        """Another process has taken this worker's place: close for good. False where the engine did not close."""
        with self._one:
            try:
                self._make(deciding.retire(self.now), lambda: self.adapter.close("abort", drain_s))
            except Exception:  # the engine's code may raise anything
                return False
            return True

    def depart(self, deadline_s: float) -> bool:
        """The endpoint is closed: go back as in `release`. True where the engine serves nothing, and never will again.

        False also where it is not done with a message by the deadline: it may serve after that.
        """
        if not self._one.acquire(timeout=deadline_s):
            return False
        try:
            self._go_back()
            if self.state == "serving":
                return False
            self._make(deciding.retire(self.now))  # a message that came before the end is refused from now on
            return True
        finally:
            self._one.release()

    def _alone(self, doing: str, step: Callable[[], FromWorker]) -> FromWorker:
        if not self._one.acquire(timeout=BUSY_S):
            return Refused("busy", f"worker {self.worker} is still busy with {self._doing} of attempt {self.now.epoch}")
        try:
            self._doing = doing
            return step()
        except MessageRefusedError as refusal:
            return Refused(refusal.code, str(refusal))
        except Exception as error:  # the engine's code may raise anything
            return Refused("failed", sendable(f"{type(error).__name__}: {error}"))
        finally:
            self._one.release()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _grant(self, message: Grant) -> FromWorker:
        leased(self.lease, None, message)  # before anything is done: an old coordinator is refused
        moves = deciding.grant(self.now, message, can_restore=self._rollback.can_restore)
        if moves[1].state == "serving":
            with self._leasing:
                self._take_lease(moves[1].held, message)
        else:  # requests inside may end, then nothing is served
            self.lease = leased(self.lease, None, message)
        self._make(moves, lambda: self.adapter.close(message.close, message.drain_s))
        if self.state not in ("loading", "staged") and not all(on_host(buffer.tensor) for buffer in self._buffers):
            self._unmap()  # the update rank frees a device's buffers after each update
        return self.status

    def _map(self, message: Map, fds: list[int]) -> FromWorker:
        self._unmap()
        self._buffers = list(memory_of(message.device).map(message.handles, fds, message.sizes_bytes))
        return self.status

    def _unmap(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _take_plan(self, message: TakePlan) -> FromWorker:
        plan = WorkerPlan(message)
        self.plans.pop(message.digest, None)
        self.plans[message.digest] = plan
        while len(self.plans) > MOST_PLANS:
            del self.plans[next(iter(self.plans))]
        return self.status

    def _begin(self, message: Begin) -> FromWorker:
        moves, loading = deciding.begin(self.now, message)
        if moves:
            plan = self._plan(message.plan)
            layout = self.adapter.layout()
            wrong = [] if message.partial else plan.shortfall(layout)
            if wrong:
                raise MessageRefusedError(
                    "order", f"the plan does not bring what worker {self.worker} wants of {', '.join(wrong[:8])}"
                )
            refusal = self._rollback.prepare(plan, message, has_version=loading.served)
            if refusal is not None:
                raise MessageRefusedError("memory", refusal)
            self._loaded, self._assembly = set(), Assembly()
            self._layout = layout
            self._wanted = boxes_by_name(layout.pieces) if self.adapter.whole else {}
            # The engine serves until here: closing comes last.
            self._make((moves, loading), lambda: self.adapter.close(message.close, message.drain_s))
        return self.status

    def _move(self, message: Move) -> FromWorker:
        start_ns = time.perf_counter_ns()
        if message.out:
            self._export(message)
        else:
            self._load(message)
        return Moved(message.epoch, message.bucket, start_ns, time.perf_counter_ns())

    def _load(self, message: Move) -> None:
        moves = deciding.load(self.now, message.epoch)
        begun = self.now.begun
        assert begun is not None
        if message.plan != begun.plan:
            raise MessageRefusedError("order", f"the attempt began with plan {begun.plan}, not {message.plan}")
        if message.bucket not in self._loaded:
            plan = self.plans[begun.plan]
            share = self._share(plan.share(message.bucket), message.bucket)
            buffer = self._buffer(message.buffer)
            if (self._rollback.deltas is None) != (message.delta_bytes == 0):
                raise MessageRefusedError(
                    "order", f"bucket {share.bucket} is not of the kind that the attempt began with"
                )
            if self._rollback.deltas is not None:
                self._load_delta(moves, self._rollback.deltas, share, buffer, message)
            else:
                arrivals = arrivals_of(plan, share, buffer, checked=message.checked)
                self._make(moves, load=lambda: self._take_in(plan.first_kept[share.bucket], arrivals))
                finish_copies(buffer.tensor.device, self.adapter.device)
                self._refuse_wrong(arrivals)
            self._loaded.add(message.bucket)

    def _load_delta(self, moves: Moves, deltas: DeltaBuckets, share: Share, buffer: Buffer, message: Move) -> None:
        """Load changed elements. Digests are compared before anything is overwritten."""
        decoded = deltas.decode(share, buffer, message.delta_bytes, checked=message.checked)
        self._refuse_wrong(decoded.arrivals)
        deltas.keep(decoded)
        first = deltas.plan.first_kept[share.bucket]
        self._make(moves, load=lambda: self._take_in(first, deltas.arrivals(decoded)))
        finish_copies(buffer.tensor.device, self.adapter.device)

    def _refuse_wrong(self, arrivals: StagedArrivals) -> None:
        wrong = arrivals.wrong()
        if wrong is not None:
            raise MessageRefusedError("corrupt", f"bytes of {wrong} differ from their source's")

    def _take_in(self, first: int, arrivals: Sequence[Arrival]) -> str | None:
        self._rollback.stash(first, arrivals)
        return self._take(arrivals)

    def _take(self, parts: Sequence[Arrival]) -> str | None:
        if self.adapter.whole:
            parts = assembled(self._assembly, parts, self._wanted)
        return self.adapter.load(parts) if parts else None

    def _export(self, message: Move) -> None:
        if message.epoch < self.now.epoch:
            raise MessageRefusedError(
                "stale", f"attempt {message.epoch} is over, worker {self.worker} is at {self.now.epoch}"
            )
        if self.state != "serving":
            raise MessageRefusedError("order", f"worker {self.worker} is {self.state}, it has nothing to give")
        plan = self._plan(message.plan)
        share, buffer = self._share(plan.export(message.bucket), message.bucket), self._buffer(message.buffer)
        self._do(export_bucket(self.adapter, plan, share, buffer, checked=message.checked))
        finish_copies(buffer.tensor.device, self.adapter.device)

    def _finish(self, message: Finish) -> FromWorker:
        moves, staged = deciding.finish(self.now, message)
        begun = self.now.begun
        assert begun is not None
        if moves:
            missing = self.plans[begun.plan].buckets - self._loaded
            if missing or self._assembly.missing:
                raise MessageRefusedError(
                    "order", f"buckets {sorted(missing)} and parts of {self._assembly.missing} did not come"
                )
            self._finish_load()
            self.now = staged
        return self.status

    # ---- moves of the engine -----------------------------------------------------------------------------------------

    def _make(
        self,
        moves: Moves,
        close: Callable[[], str | None] = lambda: None,
        load: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Make the moves in turn. A move that fails leads to its `failed` state, and later ones are not made."""
        for move in moves[0]:
            self.now = move.failed  # unless it succeeds, whatever the engine raises
            if move.act == "close":
                self._do(close())
            elif move.act == "load":
                self._do(load())
            else:
                self._do(self._acts[move.act](move.ok))
            self.now = move.ok
        self.now = moves[1]

    def _open_new(self, serving: WorkerState) -> str | None:
        self._rollback.commit()
        self._wanted_before = self._wanted
        return self._open(serving)

    def _open(self, serving: WorkerState) -> str | None:
        assert serving.version is not None
        return self.adapter.open(serving.version)

    def _restore(self) -> str | None:
        self._do(self.adapter.abort())
        self._do(self.adapter.begin())
        self._assembly, self._wanted = Assembly(), self._wanted_before
        for arrivals in self._rollback.arrivals():
            self._do(self._take(arrivals))
        self._finish_load()
        self._do(self.adapter.invalidate())
        self.rollbacks += 1
        return None

    def _finish_load(self) -> None:
        error, layout = self.adapter.finish(), self.adapter.layout()
        finish_copies(self.adapter.device)  # the engine computes on streams of its own, which wait for nothing here
        if layout != self._layout:
            self._layout, self._num_layouts = layout, self._num_layouts + 1
        self._do(error)

    def _do(self, error: str | None) -> None:
        if error is not None:
            raise MessageRefusedError("failed", sendable(error))

    def _plan(self, digest: str) -> WorkerPlan:
        plan = self.plans.get(digest)
        if plan is None:
            raise MessageRefusedError("order", f"worker {self.worker} does not have plan {digest}")
        return plan

    def _share(self, share: Share | None, bucket: int) -> Share:
        if share is None:
            raise MessageRefusedError("order", f"bucket {bucket} is not in the plan of worker {self.worker}")
        return share

    def _buffer(self, buffer: int) -> Buffer:
        if not 0 <= buffer < len(self._buffers):
            raise MessageRefusedError("order", f"buffer {buffer} is not mapped, {len(self._buffers)} are")
        return self._buffers[buffer]
