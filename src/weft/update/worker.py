"""A worker's side of an update: what it holds, what it serves, and which messages may change that.

    closed ──begin──> loading ──finish──> prepared ──commit──> serving
       ^                 │                    │                   │
       └── nothing to ───┴── abort, settle ───┘                begin
           go back to

Until it has voted (`prepared`), a worker may go back by itself: no version is committed without every worker of the
set. From then on it stays closed until it learns what was decided.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.update.adapters.interface import Adapter
from weft.update.arrivals import Arrival, Assembly
from weft.update.buffers import Buffer, HostBuffer
from weft.update.keeping import Keeping
from weft.update.staging import arrivals_of, assembled, check_plan, give, shortfall
from weft.update.wire.errors import WireError
from weft.update.wire.messages import (
    MOST_PLANS,
    Abort,
    Begin,
    Begun,
    Commit,
    Finish,
    FromWorker,
    GetWants,
    Give,
    Given,
    Load,
    Loaded,
    Map,
    Mapped,
    Planned,
    Prepared,
    Refused,
    Settle,
    Share,
    State,
    Status,
    TakePlan,
)

BUSY_S = 2.0


class _RefusalError(Exception):
    """Carries a refusal out of a step."""

    def __init__(self, code: Any, text: str) -> None:
        super().__init__(text)
        self.refused = Refused(code, text)


class Worker:
    """One engine and its state. `handle` takes a message and returns the answer; it never raises."""

    def __init__(self, adapter: Adapter, worker: int, spill: Path | None = None) -> None:
        self.adapter, self.worker = adapter, worker
        self.state: State = "closed"
        self.version: int | None = None
        self.epoch = 0
        self.rollbacks = 0
        self.plans: dict[str, TakePlan] = {}
        self._held = ""
        self._content = 0  # the epoch by which the version held was committed
        self._begun: Begin | None = None
        self._loaded: set[int] = set()
        self._touched = False
        self._assembly = Assembly()
        self._keeping = Keeping(adapter, spill)
        self._buffers: list[Buffer] = []
        self._one = threading.Lock()
        self._doing = ""
        self._steps: dict[type[Any], Callable[[Any], FromWorker]] = {
            GetWants: lambda _: self.adapter.wants(),
            Settle: self._settle,
            TakePlan: self._take_plan,
            Begin: self._begin,
            Load: self._load,
            Give: self._give,
            Finish: self._finish,
            Commit: self._commit,
            Abort: self._abort,
        }

    @property
    def status(self) -> Status:
        """How it stands."""
        return Status(self.worker, os.getpid(), self.state, self.version, self.epoch, self.rollbacks)

    def handle(self, message: Any) -> FromWorker:
        """Does what a message says if it is its time."""
        step = self._steps.get(type(message))
        if step is None:
            return Refused("order", f"{type(message).__name__} has no place here")
        return self._alone(type(message).__name__, lambda: step(message))

    def map(self, message: Map, fds: list[int]) -> FromWorker:
        """Maps the buffers; takes the descriptors."""
        return self._alone("Map", lambda: self._map(message, fds))

    def release(self, taken_over: Callable[[], bool] = lambda: False) -> None:
        """The update rank is gone, and its buffers with it; one that took over settles and maps its own.

        A worker that has voted stays as it is.
        """
        with self._one:
            if taken_over():
                return
            if self.state == "loading":
                with suppress(Exception):  # what an engine raises leaves it closed
                    self._back()
            self._unmap()

    def _alone(self, doing: str, step: Callable[[], FromWorker]) -> FromWorker:
        if not self._one.acquire(timeout=BUSY_S):
            return Refused("busy", f"worker {self.worker} is still busy with {self._doing} of attempt {self.epoch}")
        try:
            self._doing = doing
            return step()
        except _RefusalError as refusal:
            return refusal.refused
        except Exception as error:  # an engine's code: whatever it raises is its answer
            return Refused("failed", f"{type(error).__name__}: {error}")
        finally:
            self._one.release()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _fresh(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise _RefusalError("stale", f"attempt {epoch} is over, worker {self.worker} is at {self.epoch}")

    def _during(self, epoch: int, *states: State) -> Begin:
        self._fresh(epoch)
        if epoch != self.epoch or self.state not in states or self._begun is None:
            raise _RefusalError(
                "order", f"worker {self.worker} is {self.state} at attempt {self.epoch}, not in {epoch}"
            )
        return self._begun

    def _settle(self, message: Settle) -> FromWorker:
        self._fresh(message.epoch)
        if self.state == "prepared" and self.epoch in message.epochs and self._begun is not None:
            self._open_new(self._begun)
        elif self.state in ("loading", "prepared"):
            self._back()
        held = self.version == message.version and self._content in message.epochs
        if self.state != "serving" or not held:  # an engine may be open though nothing is known of what it serves
            self._do(self.adapter.close(message.close, message.drain_s))
            self.state, self.version = "closed", None
        self.epoch = message.epoch
        return self.status

    def _map(self, message: Map, fds: list[int]) -> FromWorker:
        self._unmap()
        if message.device >= 0:
            from weft.update.cuda import CudaBuffer  # only where there is a GPU

            sizes = zip(message.handles, message.sizes_bytes, strict=True)
            self._buffers = [CudaBuffer.map(handle, size) for handle, size in sizes]
            return Mapped()
        if len(fds) != len(message.sizes_bytes):
            raise WireError(f"{len(message.sizes_bytes)} buffers are named, {len(fds)} descriptors came")
        for size in message.sizes_bytes:
            self._buffers.append(HostBuffer.map(fds.pop(0), size))
        return Mapped()

    def _unmap(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _take_plan(self, message: TakePlan) -> FromWorker:
        check_plan(message)
        self.plans.pop(message.digest, None)
        self.plans[message.digest] = message
        while len(self.plans) > MOST_PLANS:
            del self.plans[next(iter(self.plans))]
        return Planned(message.digest)

    def _begin(self, message: Begin) -> FromWorker:
        self._fresh(message.epoch)
        if self.state == "loading" and message == self._begun and not self._touched:
            return Begun(message.epoch, self._keeping.size_bytes)
        if self.state not in ("serving", "closed"):
            raise _RefusalError("order", f"worker {self.worker} is {self.state} at attempt {self.epoch}; settle first")
        plan = self._plan(message.plan)
        if message.partial and self.version is None:
            raise _RefusalError("order", f"worker {self.worker} holds no version that a part could be added to")
        wrong = [] if message.partial else shortfall(plan, self.adapter.wants().pieces)
        if wrong:
            raise _RefusalError(
                "order", f"the plan does not bring what worker {self.worker} wants of {', '.join(wrong[:8])}"
            )
        refusal = self._keeping.prepare(plan, message, has_version=self.version is not None)
        if refusal is not None:
            raise _RefusalError("memory", refusal)
        self._do(self.adapter.close(message.close, message.drain_s))  # last: until here requests are served
        self.state, self.epoch, self._begun = "loading", message.epoch, message
        self._loaded, self._touched, self._assembly = set(), False, Assembly()
        self._do(self.adapter.begin())
        return Begun(message.epoch, self._keeping.size_bytes)

    def _load(self, message: Load) -> FromWorker:
        start_ns = time.perf_counter_ns()
        begun = self._during(message.epoch, "loading")
        if message.bucket not in self._loaded:
            plan = self.plans[begun.plan]
            share = self._share(plan.shares, message.bucket)
            arrivals = arrivals_of(plan, share, self._raw(message.buffer), checked=begun.checked)
            self._touched = True
            self._keeping.stash(arrivals)
            self._do(self._take(arrivals))
            for arrival in arrivals:
                if arrival.wrong:
                    raise _RefusalError("corrupt", f"bytes of {arrival.name} {arrival.box} differ from their source's")
            self._loaded.add(message.bucket)
        return Loaded(message.epoch, message.bucket, start_ns, time.perf_counter_ns())

    def _take(self, parts: list[Arrival]) -> str | None:
        if self.adapter.whole:
            parts = assembled(self._assembly, parts, self.adapter.wants().pieces)
        return self.adapter.load(parts) if parts else None

    def _give(self, message: Give) -> FromWorker:
        self._fresh(message.epoch)
        if self.state != "serving":
            raise _RefusalError("order", f"worker {self.worker} is {self.state}, it has nothing to give")
        plan = self._plan(message.plan)
        share, raw = self._share(plan.gives, message.bucket), self._raw(message.buffer)
        self._do(give(self.adapter, plan, share, raw, checked=message.checked))
        return Given(message.epoch, message.bucket)

    def _finish(self, message: Finish) -> FromWorker:
        begun = self._during(message.epoch, "loading", "prepared")
        if self.state == "loading":
            missing = {share.bucket for share in self.plans[begun.plan].shares} - self._loaded
            if missing or self._assembly.missing:
                raise _RefusalError(
                    "order", f"buckets {sorted(missing)} and parts of {self._assembly.missing} did not come"
                )
            self._do(self.adapter.finish())
            self._held = self.adapter.digest() if begun.checked else ""
            self.state = "prepared"
        return Prepared(message.epoch, begun.version, self._held)

    def _commit(self, message: Commit) -> FromWorker:
        self._fresh(message.epoch)
        if self.state == "serving" and (self._content, self.version) == (message.epoch, message.version):
            return self.status
        begun = self._during(message.epoch, "prepared")
        if begun.version != message.version:
            raise _RefusalError("order", f"version {begun.version} is prepared, not {message.version}")
        self._open_new(begun)
        return self.status

    def _abort(self, message: Abort) -> FromWorker:
        self._fresh(message.epoch)
        if message.epoch == self.epoch and self.state in ("loading", "prepared"):
            self._back()
        return self.status

    # ---- what they come to -------------------------------------------------------------------------------------------

    def _open_new(self, begun: Begin) -> None:
        self._do(self.adapter.invalidate())
        self.version, self._content = begun.version, begun.epoch
        self._keeping.commit()
        self._open(begun.version)

    def _open(self, version: int) -> None:
        self._begun = None
        self.state = "serving"
        try:
            self._do(self.adapter.open(version))
        except BaseException:
            self.state, self.version = "closed", None
            raise

    def _back(self) -> None:
        """To the version before, if it is still there; else nothing is held that could be served."""
        version, self.version, self.state, self._begun = self.version, None, "closed", None
        self._do(self.adapter.abort())
        if version is None:
            return
        if self._touched:
            if not self._keeping.can_restore:
                return
            self._do(self.adapter.begin())
            self._assembly = Assembly()
            self._do(self._take(self._keeping.arrivals()))
            self._do(self.adapter.finish())
            self._do(self.adapter.invalidate())
            self.rollbacks += 1
        self.version = version
        self._open(version)

    def _do(self, error: str | None) -> None:
        if error is not None:
            raise _RefusalError("failed", error)

    def _plan(self, digest: str) -> TakePlan:
        plan = self.plans.get(digest)
        if plan is None:
            raise _RefusalError("order", f"worker {self.worker} does not have plan {digest}")
        return plan

    def _share(self, shares: tuple[Share, ...], bucket: int) -> Share:
        for share in shares:
            if share.bucket == bucket:
                return share
        raise _RefusalError("order", f"bucket {bucket} is not in the plan of worker {self.worker}")

    def _raw(self, buffer: int) -> Any:
        if not 0 <= buffer < len(self._buffers):
            raise _RefusalError("order", f"buffer {buffer} is not mapped, {len(self._buffers)} are")
        return self._buffers[buffer].raw
