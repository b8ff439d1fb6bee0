"""A replica: one vLLM engine behind a gate, which is open while all of the engine's workers serve one version.

Workers ask over a socket of their own: let nobody in (Shut), reset caches (Forget), open (Serve). The first Shut drains
requests for all workers; the last Serve opens the gate (`gate_phases.py`), which serves while the leases of all workers
last (LeaseEnd). A worker that ends takes the engine with it, and the gate is closed from that moment, long before vLLM
would notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from treadle.update.adapters.vllm.engine_messages import Attach, Forget, FromVllm, LeaseEnd, Serve, Shut
from treadle.update.adapters.vllm.engines import Engine, within
from treadle.update.adapters.vllm.gate_phases import GateEvent, GatePhase, after
from treadle.update.adapters.vllm.leftovers import Leftovers
from treadle.update.adapters.vllm.line import replica_path
from treadle.update.adapters.vllm.listening import Listening
from treadle.update.adapters.vllm.scheduler import Scheduler
from treadle.update.worker.gate import ClosedError, Gate

ENGINE_S = 20.0
"""Seconds for a call to vLLM. Update ranks give up earlier where their own deadline is shorter."""

AGAIN_S = 0.05
"""Seconds after which requests are broken off again while one of them still runs."""


@dataclass(frozen=True)
class Canary:
    """A fixed prompt, and a function from a version to the tokens that the version must make of it.

    The function returns None for a version that is not to be asked.
    """

    prompt: Sequence[int]
    tokens: Callable[[int], Sequence[int] | None]


class Replica:
    """A gate in front of one engine. Requests go through `serving()`.

    Workers of the engine get numbers from `first` on, and endpoints in `directory`. `checkpoint` is a directory of
    safetensors files whose names and shapes updates will have; by default the model's own. `transfer`: the engine was
    configured with Treadle as its weight transfer engine, not as a worker extension.
    A replica starts closed: nobody knows which version the engine's first weights are.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        *,
        first: int = 0,
        checkpoint: Path | None = None,
        canary: Canary | None = None,
        transfer: bool = False,
    ) -> None:
        self.engine, self.canary = engine, canary
        self._gate = Gate()
        self._scheduler = Scheduler(engine)
        self._changed = threading.Condition()
        self._phase = GatePhase.OPEN
        self._ready: dict[int, int] = {}  # the version that each worker is ready for
        self._leases: dict[int, int | None] = {}  # until when each worker may serve; none: without end
        self._drained: Future[str | None] = Future()  # of the drain that is under way or was the last
        self._start = 0  # the number of the last start: an earlier one opens nothing any more
        self._failed: str | None = None
        self._num = -1
        self._leftovers = Leftovers(directory / f"replica-{first}.left")
        self._listening = Listening(replica_path(directory, first), self._answer, self._lose)
        try:
            self._scheduler.pause()
            place = {"directory": str(directory), "first": first}
            place |= {"checkpoint": str(checkpoint)} if checkpoint is not None else {}
            answers = engine.rpc("init_weight_transfer_engine" if transfer else "treadle_open", place)
            errors = [f"worker {first + i}: {error}" for i, error in enumerate(answers) if error is not None]
            if errors:
                raise ValueError(f"vLLM's workers take no updates: {'; '.join(errors)}")
        except BaseException:
            self._listening.close()
            raise
        self._num = len(answers)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def version(self) -> int | None:
        """The version served; None while the gate is closed."""
        return self._gate.version if self._failed is None else None

    @property
    def phase(self) -> GatePhase:
        """Where the replica is between two openings of its gate."""
        return self._phase

    @property
    def failed(self) -> str | None:
        """Why the replica will never serve again; None while it may."""
        return self._failed

    @contextmanager
    def serving(self, wait_s: float = 0.0) -> Iterator[int]:
        """Pass the gate with a request; yields its version. Raises ClosedError after `wait_s` seconds at a closed gate.

        Without `wait_s` nothing here blocks, so it may be used in an event loop.
        """
        until = time.monotonic() + wait_s
        with ExitStack() as stack:
            while True:
                with self._changed:
                    if self._failed is not None:
                        raise ClosedError(self._failed)
                    try:
                        version = stack.enter_context(self._gate.serving())
                        break
                    except ClosedError:
                        left = until - time.monotonic()
                        if left <= 0:
                            raise
                        self._changed.wait(left)
            yield version

    def close(self) -> None:
        """Shut the engine down, and remove the shared memory that its processes leave behind."""
        self._fail("the replica was closed")
        self._listening.close()
        self._bury()

    # ---- requests of workers -----------------------------------------------------------------------------------------

    def _answer(self, worker: int, pid: int, message: FromVllm) -> str | None:
        """Do what a worker asks; None, or what went wrong."""
        try:
            if isinstance(message, Attach):
                self._leftovers.add(pid, message.parent_pid)
            elif isinstance(message, Shut):
                return self._shut(worker, message)
            elif isinstance(message, Forget):
                within(ENGINE_S, "reset its caches", self.engine.forget)
            elif isinstance(message, LeaseEnd):
                self._hold(worker, message)
            else:
                self._serve(worker, message)
        except Exception as error:  # vLLM's code may raise anything
            return f"{type(error).__name__}: {error}"
        return None

    def _hold(self, worker: int, message: LeaseEnd) -> None:
        """Keep the gate to the first end of its workers' leases."""
        with self._changed:
            self._leases[worker] = message.until_ns
            self._gate.lease(min((until for until in self._leases.values() if until is not None), default=None))
            self._changed.notify_all()

    def _move(self, event: GateEvent) -> None:
        """Go to the next phase; `_changed` is held."""
        self._phase = after(self._phase, event)

    # ---- Shut: drain and pause ---------------------------------------------------------------------------------------

    def _shut(self, worker: int, message: Shut) -> str | None:
        with self._changed:
            before = self._phase
            self._move(GateEvent.SHUT)
            mine = self._phase is GatePhase.DRAINING and before is not GatePhase.DRAINING
            if mine:
                self._drained = Future()
            version, drained = self._ready.pop(worker, None), self._drained
        if mine:
            error = self._drain(message)
            with self._changed:
                if self._phase is GatePhase.DRAINING and self._drained is drained:
                    self._move(GateEvent.DRAINED if error is None else GateEvent.NOT_DRAINED)
                self._changed.notify_all()  # a gate that could not be closed is open again
            drained.set_result(error)
        error = drained.result()
        if error is not None and version is not None:
            with self._changed:
                self._ready[worker] = version
        return error

    def _drain(self, message: Shut) -> str | None:
        """Close the gate and pause the scheduler. Never raises: other workers wait for the result."""
        try:
            error = self._close_gate(message)
            if error is None and not self._scheduler.is_free_within(ENGINE_S):
                return (
                    f"vLLM has not ended an earlier start within {ENGINE_S:g} s; try again, or start the engine again"
                )
            if error is None:
                within(ENGINE_S, "pause", self._scheduler.pause)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            self._fail(f"vLLM could not be paused ({error}); start the engine again")
        return error

    def _close_gate(self, message: Shut) -> str | None:
        """Wait until requests are through; with `abort` break them off, and resume the engine if that failed."""
        version = self._gate.version
        if message.how != "abort" or version is None:
            return self._gate.close(message.how, message.deadline_s)
        over = threading.Event()
        hurry = threading.Thread(target=self._hurry, args=(over,), name="treadle hurry", daemon=True)
        hurry.start()
        error = self._gate.close(message.how, message.deadline_s)
        over.set()
        hurry.join(ENGINE_S)
        if hurry.is_alive():
            raise TimeoutError(f"vLLM did not break requests off within {ENGINE_S:g} s")
        if error is not None:
            within(ENGINE_S, "start again", lambda: self.engine.resume(version))
        return error

    def _hurry(self, over: threading.Event) -> None:
        """Break requests off once no new ones can come, until `over`.

        More than once: a request that passed the gate before it closed may reach vLLM after the others were broken off,
        and would be queued there until the next start.
        """
        while self._gate.version is not None and self._failed is None:
            if over.wait(0.001):
                return
        while not over.is_set():
            with suppress(Exception):  # requests that are not broken off are waited for
                self.engine.break_off()
            over.wait(AGAIN_S)

    # ---- Serve: start and open ---------------------------------------------------------------------------------------

    def _serve(self, worker: int, message: Serve) -> None:
        with self._changed:
            self._ready[worker] = message.version
            if len(self._ready) < self._num or set(self._ready.values()) != {message.version}:
                return
            self._move(GateEvent.READY)
            self._start += 1
            number = self._start
        try:
            within(2 * ENGINE_S, "start again", lambda: self._open(message.version, number))
        except BaseException:
            with self._changed:
                self._ready.pop(worker, None)
                if self._is_wanted(number):
                    self._move(GateEvent.GAVE_UP)
            raise

    def _open(self, version: int, number: int) -> None:
        """Start the engine and open the gate. A start that is no longer wanted by then leaves the engine paused."""
        with self._scheduler.starting():
            self._check_wanted(number)
            self._scheduler.resume(version)
            try:
                self._ask_canary(version)
                with self._changed:
                    self._check_wanted(number)
                    self._move(GateEvent.OPENED)
                    self._gate.open(version)
                    self._changed.notify_all()
            except BaseException:
                if self._failed is None:
                    self._scheduler.pause_again()
                raise

    def _is_wanted(self, number: int) -> bool:
        return self._phase is GatePhase.STARTING and self._start == number

    def _check_wanted(self, number: int) -> None:
        if self._failed is not None:
            raise ClosedError(self._failed)
        if not self._is_wanted(number):
            raise ClosedError("the engine started too late: the gate stays closed until the next update")

    def _ask_canary(self, version: int) -> None:
        if self.canary is not None and (expected := self.canary.tokens(version)) is not None:
            made = self.engine.greedy(self.canary.prompt, len(expected))
            if made != list(expected):
                raise ValueError(f"version {version} makes {made} of the canary, its source {list(expected)}")

    # ---- the end of a worker -----------------------------------------------------------------------------------------

    def _lose(self, worker: int, why: str) -> None:
        if self._fail(f"worker {worker} is lost: {why}; start the engine again"):
            threading.Thread(target=self._bury, name="treadle bury", daemon=True).start()

    def _fail(self, why: str) -> bool:
        """Close the gate for good; True for the first failure, whose reason counts."""
        with self._changed:
            first = self._failed is None
            self._failed = self._failed if self._failed is not None else why
            self._changed.notify_all()
        return first

    def _bury(self) -> None:
        with suppress(Exception):  # whatever vLLM raises at its end, its processes are waited for
            within(ENGINE_S, "shut down", self.engine.shutdown)
        self._leftovers.sweep(ENGINE_S)
