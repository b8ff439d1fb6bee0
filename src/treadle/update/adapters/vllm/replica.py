"""One vLLM engine as seen by whoever sends it requests: a gate that is open while all of its workers serve one version.

Workers ask over a socket of their own: let nobody in (Shut), reset caches (Forget), open (Serve). The first that asks
to shut has requests drained for all; the last that is ready to serve has the gate opened. A worker that ends takes the
engine with it, and the gate stays closed from that moment, long before vLLM would notice.
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

from treadle.update.adapters.vllm.engines import Engine, within
from treadle.update.adapters.vllm.leftovers import Leftovers
from treadle.update.adapters.vllm.line import replica_path
from treadle.update.adapters.vllm.listening import Listening
from treadle.update.adapters.vllm.messages import Attach, Forget, FromVllm, Serve, Shut
from treadle.update.worker.gate import ClosedError, Gate

ENGINE_S = 20.0
"""For a call to vLLM; a deadline of the update that is shorter ends it earlier, for its ranks."""


@dataclass(frozen=True)
class Canary:
    """A prompt, and the tokens that a version must make of it, as its source says (None: it does not say)."""

    prompt: Sequence[int]
    tokens: Callable[[int], Sequence[int] | None]


class Replica:
    """The engine's workers get the numbers from `first` on, and endpoints in `directory`.

    `checkpoint` is a directory of safetensors whose names and shapes updates will have; the model's own where it is
    not given. `transfer`: the engine was configured with Treadle as its weight transfer engine, not as an extension.
    Weights that the engine started with are never served: which version they are, nobody knows.
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
        self._changed = threading.Condition()
        self._num = -1
        self._opened: dict[int, int] = {}
        self._draining: Future[str | None] | None = None
        self._starting: object | None = None  # the one start that may open the gate
        self._scheduling = threading.Lock()  # around a pause, and around a start until the gate is open
        self._paused = False
        self._failed: str | None = None
        self._leftovers = Leftovers(directory / f"replica-{first}.left")
        self._listening = Listening(replica_path(directory, first), self._answer, self._lose)
        try:
            self._pause()
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
        """What is served; None while closed."""
        return self._gate.version if self._failed is None else None

    @property
    def failed(self) -> str | None:
        """Why it will never serve again."""
        return self._failed

    @contextmanager
    def serving(self, wait_s: float = 0.0) -> Iterator[int]:
        """Around a request; gives its version. While the gate is closed it is held, and after `wait_s` raises Closed.

        Nothing else in it blocks, so it may be used in an event loop without `wait_s`.
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
                        if not self._changed.wait(max(0.0, until - time.monotonic())):
                            raise
            yield version

    def close(self) -> None:
        """Ends the engine, and removes what its processes leave in shared memory."""
        self._fail("the replica was closed")
        self._listening.close()
        with suppress(Exception):  # vLLM's own end: whatever it says, the processes are waited for
            within(ENGINE_S, "shut down", self.engine.shutdown)
        self._leftovers.sweep(ENGINE_S)

    # ---- what workers ask --------------------------------------------------------------------------------------------

    def _answer(self, worker: int, pid: int, message: FromVllm) -> str | None:
        try:
            if isinstance(message, Attach):
                self._leftovers.add(pid, message.parent_pid)
            elif isinstance(message, Shut):
                return self._shut(worker, message)
            elif isinstance(message, Forget):
                within(ENGINE_S, "reset its caches", self.engine.forget)
            else:
                self._serve(worker, message)
        except Exception as error:  # vLLM's code: whatever it raises is the answer
            return f"{type(error).__name__}: {error}"
        return None

    def _shut(self, worker: int, message: Shut) -> str | None:
        with self._changed:
            if self._starting is not None:  # a start that is under way, or was left behind, opens nothing any more
                self._starting = self._draining = None
            opened = self._opened.pop(worker, None)
            mine = self._draining is None
            draining = self._draining = self._draining if self._draining is not None else Future()
        if mine:
            draining.set_result(self._drain(message))
        error = draining.result()
        with self._changed:
            if error is not None and opened is not None:
                self._opened[worker] = opened
            if error is not None and self._draining is draining:
                self._draining = None
        return error

    def _drain(self, message: Shut) -> str | None:
        """Never raises: others wait for what it returns."""
        version, over = self._gate.version, threading.Event()
        hurry = threading.Thread(target=self._hurry, args=(over,), name="treadle hurry", daemon=True)
        hurries = message.how == "abort" and version is not None
        try:
            if hurries:
                hurry.start()
            error = self._gate.close(message.how, message.deadline_s)
            over.set()
            if hurries:
                hurry.join(ENGINE_S)
                if hurry.is_alive():
                    raise TimeoutError(f"vLLM did not break requests off within {ENGINE_S:g} s")
            if error is not None and version is not None and hurries:
                within(ENGINE_S, "start again", lambda: self.engine.resume(version))
            elif error is None and not self._scheduling.acquire(timeout=ENGINE_S):
                error = (
                    f"vLLM has not ended an earlier start within {ENGINE_S:g} s; try again, or start the engine again"
                )
            elif error is None:
                self._scheduling.release()
                within(ENGINE_S, "pause", self._pause)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            self._fail(f"vLLM could not be paused ({error}); start the engine again")
        return error

    def _pause(self) -> None:
        with self._scheduling:
            if not self._paused:
                self.engine.pause()
                self._paused = True

    def _hurry(self, over: threading.Event) -> None:
        """Breaks requests off once no new ones can come, unless it is over before."""
        while self._gate.version is not None and self._failed is None:
            if over.wait(0.001):
                return
        with suppress(Exception):  # those that are not broken off are waited for
            self.engine.break_off()

    def _serve(self, worker: int, message: Serve) -> None:
        with self._changed:
            self._opened[worker] = message.version
            if len(self._opened) < self._num or set(self._opened.values()) != {message.version}:
                return
            self._starting = wanted = object()
        try:
            within(2 * ENGINE_S, "start again", lambda: self._start(message.version, wanted))
        except BaseException:
            with self._changed:
                self._opened.pop(worker, None)
                if self._starting is wanted:  # left behind, it opens nothing any more; the next to shut pauses anew
                    self._starting = self._draining = None
            raise

    def _start(self, version: int, wanted: object) -> None:
        """Opens the gate if that is still wanted when the engine has started; else leaves it paused."""
        with self._scheduling:
            self._want(wanted)
            self._paused = False
            self.engine.resume(version)
            try:
                self._ask_canary(version)
                with self._changed:
                    self._want(wanted)
                    self._starting = self._draining = None
                    self._gate.open(version)
                    self._changed.notify_all()
            except BaseException:
                if self._failed is None:
                    self.engine.pause()
                    self._paused = True
                raise

    def _want(self, wanted: object) -> None:
        if self._failed is not None:
            raise ClosedError(self._failed)
        if self._starting is not wanted:
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
        with self._changed:
            first = self._failed is None
            self._failed = self._failed if self._failed is not None else why
            self._changed.notify_all()
        return first

    def _bury(self) -> None:
        with suppress(Exception):
            within(ENGINE_S, "shut down", self.engine.shutdown)
        self._leftovers.sweep(ENGINE_S)
