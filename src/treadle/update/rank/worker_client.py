"""An update rank's connection to its worker."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from treadle.host.errors import TreadleError
from treadle.host.sockets import place_of
from treadle.update.errors import UpdateError, failure
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.protocol.catalogue import check_layout, layout_digest
from treadle.update.protocol.control import Fault, Phase
from treadle.update.protocol.update_messages import (
    PROTOCOL,
    Describe,
    FromWorker,
    Hello,
    Map,
    Refused,
    Status,
    TakePlan,
    WeightLayout,
)
from treadle.update.rank.inbox import Inbox, read_into
from treadle.update.worker.endpoint import worker_path
from treadle.update.worker.worker import BUSY_S
from treadle.wire.errors import PeerGoneError, WireError
from treadle.wire.link import Link
from treadle.wire.listeners import PAUSE_S, call_path

M = TypeVar("M", bound=FromWorker)

NO_LAYOUT = layout_digest(WeightLayout((), ()))
"""The digest of a layout without tensors."""


class WorkerClient:
    """Sends messages to one worker, and reconnects where the connection was lost.

    `lost(name, text)` hears of its end, in the thread that reads it and before another connection is made.
    """

    def __init__(self, directory: Path, worker: int, inbox: Inbox, lost: Callable[[str, str], None]) -> None:
        self.path, self.worker, self.inbox = worker_path(directory, worker), worker, inbox
        self._lost = lost
        self._losing = threading.Lock()
        self._link: Link[FromWorker] | None = None
        self._end = ""
        self._owed = 0
        """Messages that the worker has not answered yet. It answers each, in their order."""
        self._place: tuple[int, int] | None = None
        self._plans: tuple[str, ...] = ()
        self._mapped: tuple[Buffer, ...] = ()
        self._layout: WeightLayout | None = None
        self._layout_digest = NO_LAYOUT
        self._layout_number = 0

    @property
    def name(self) -> str:
        """The worker's name for error messages."""
        link = self._link  # another thread may drop it
        return f"worker {self.worker}" + (f" (process {link.pid})" if link is not None else "")

    def connect(self, rank: int, deadline_s: float) -> None:
        """Connect, unless the connection stands and no other process has taken the worker's place.

        A connection on which an answer is outstanding is not used again: that would be taken for the next one.
        """
        there = place_of(self.path)
        if self._link is not None and there in (None, self._place) and not self._owed:
            return
        self.drop()
        until, turned_away = time.monotonic() + deadline_s, 0
        while True:
            try:
                self._place = place_of(self.path)  # before the call: a later socket is another process's
                link, status = self._call(rank, until)
                break
            except PeerGoneError as error:  # it may be restarting, or have too many connections
                turned_away += 1
                if time.monotonic() + PAUSE_S > until:
                    raise self._missed(f"no welcome at {self.path}: {error} ({turned_away} times)") from error
                time.sleep(PAUSE_S)
        self._link, self._plans = link, status.plans
        self._mapped, self._layout, self._layout_digest, self._owed = (), None, NO_LAYOUT, 0
        read_into(self.inbox, "worker", link, _heed_end, lambda text: self._gone(link, text))

    def _call(self, rank: int, until: float) -> tuple[Link[FromWorker], Status]:
        """One try to connect. Raises PeerGoneError where another may help, else UpdateError."""
        try:
            link: Link[FromWorker] = call_path(self.path, FromWorker, max(0.1, until - time.monotonic()))
        except OSError as error:
            raise self._missed(str(error)) from error
        link.trust()
        try:
            link.send(Hello(PROTOCOL, "update", rank))
            status = link.receive(max(0.1, until - time.monotonic()))
        except (OSError, WireError) as error:
            link.close()
            if isinstance(error, PeerGoneError):
                raise
            raise self._missed(f"no welcome at {self.path}: {error}") from error
        if isinstance(status, Status):
            return link, status
        link.close()
        raise self._missed(f"speaks another protocol at {self.path}: {status}")

    def _missed(self, text: str) -> UpdateError:
        return failure(0, f"worker {self.worker}", "enter", text)

    def _gone(self, link: Link[FromWorker], text: str) -> None:
        with self._losing:
            if self._link is link:
                name, self._link, self._end = self.name, None, f": {text}"
                self._lost(name, text)

    @property
    def is_answering(self) -> bool:
        """True while an answer of the worker is outstanding."""
        return self._owed > 0

    def drop(self) -> None:
        """Close the connection; a worker that has not voted goes back then."""
        with self._losing:  # whoever connects next does so after the loss of this connection was told
            link, self._link = self._link, None
        if link is not None:
            link.shut()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message. Raises PeerGoneError."""
        link = self._link
        if link is None:
            raise PeerGoneError(f"worker {self.worker} is not connected{self._end}")
        self._owed += 1  # before it is sent: whoever breaks in here does not know how far it came
        link.send(message, fds=fds, timeout_s=5.0)

    def ask(self, message: Any, kind: type[M], deadline_s: float, *, heed: bool = True) -> M:
        """Send and wait for the answer. Raises WorkerRefusedError, PeerGoneError, TimeoutError, or the bad news.

        A worker that is busy, as with the end of an attempt before, is asked again until the deadline.
        """
        until = time.monotonic() + deadline_s
        while True:
            self.send(message)
            try:
                left_s = max(0.1, until - time.monotonic())
                return self.expect(kind, left_s, getattr(message, "epoch", 0), heed=heed)
            except WorkerRefusedError as error:
                if error.refused.code != "busy" or time.monotonic() + BUSY_S > until:
                    raise

    def expect(self, kind: type[M], deadline_s: float, epoch: int = 0, *, heed: bool = True) -> M:
        """Return the next answer. Raises WireError where it is of another kind, or of another attempt than `epoch`.

        An `epoch` of 0 is that of questions beside attempts.
        """
        answer = self._take(deadline_s, heed=heed)
        if isinstance(answer, Refused):
            if epoch and answer.epoch:  # 0 where the connection as a whole is refused
                _compare(answer, epoch)
            raise WorkerRefusedError(answer)
        if not isinstance(answer, kind):
            raise WireError(f"{type(answer).__name__} came where {kind.__name__} was expected")
        if epoch:
            _compare(answer, epoch)
        return answer

    def _take(self, deadline_s: float, *, heed: bool) -> Any:
        answer = self.inbox.wait("worker", deadline_s, heed=heed)
        self._owed -= 1
        return answer

    def settled_in(self, deadline_s: float) -> Status:
        """The worker's status, once it holds its slot: an earlier process in its place may still have to close."""
        until = time.monotonic() + deadline_s
        while True:
            status = self.ask(Describe(), Status, deadline_s)
            if status.holds_slot or time.monotonic() > until:
                return status
            time.sleep(PAUSE_S)

    def await_answers(self, deadline_s: float) -> None:
        """Read all answers that are outstanding, the last of them to a farewell; drop a worker that sends none."""
        until = time.monotonic() + deadline_s
        try:
            while self._owed:
                self._take(max(0.0, until - time.monotonic()), heed=False)
        except (PeerGoneError, TimeoutError):
            self.drop()

    def layout(self, number: int, deadline_s: float) -> WeightLayout:
        """The worker's layout of that number, asked once for each connection. Raises WireError for an invalid one."""
        if self._layout is None or number != self._layout_number:
            wants = self.ask(Describe(wants=True), WeightLayout, deadline_s)
            check_layout(wants)
            self._layout, self._layout_digest, self._layout_number = wants, layout_digest(wants), number
        return self._layout

    @property
    def layout_digest(self) -> str:
        """The digest of that layout; of an empty one before it was asked."""
        return self._layout_digest

    def map(self, buffers: Sequence[Buffer], device_type: str, deadline_s: float) -> None:
        """Send the buffers, unless the worker has mapped these already. Each mapping gets handles of its own."""
        if len(self._mapped) == len(buffers) and all(map(operator.is_, self._mapped, buffers)):
            return
        self._mapped = ()
        sizes = tuple(buffer.size_bytes for buffer in buffers)
        shared = [buffer.share() for buffer in buffers]
        handles, fds = tuple(handle for handle, _ in shared if handle), [fd for _, fd in shared if fd is not None]
        self.send(Map(sizes, handles, device_type), fds)
        self.expect(Status, deadline_s)
        self._mapped = tuple(buffers)

    def take_plan(self, name: str, make: Callable[[], TakePlan], deadline_s: float) -> None:
        """Make and send the plan of that name, unless the worker has it."""
        if name not in self._plans:
            self._plans = self.ask(make(), Status, deadline_s).plans


def _compare(answer: Any, epoch: int) -> None:
    if answer.epoch != epoch:
        raise WireError(f"{type(answer).__name__} of attempt {answer.epoch} came in attempt {epoch}")


def _heed_end(message: FromWorker) -> bool:
    """Raise a worker's last message, that another rank has taken it over, as the reason why the connection ends."""
    if isinstance(message, Refused) and message.code == "taken":
        raise PeerGoneError(message.text)
    return False


class WorkerRefusedError(TreadleError):
    """A worker refused a message."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.text)
        self.refused = refused


def blame(error: Exception, epoch: int, who: str, phase: Phase, bucket: int) -> UpdateError:
    """Return the error of a failed wait for a worker, as all ranks will raise it."""
    if isinstance(error, UpdateError):
        return error
    corrupt = isinstance(error, WorkerRefusedError) and error.refused.code == "corrupt"
    text = f"lost: {error}" if isinstance(error, PeerGoneError) else str(error)
    return UpdateError(Fault(epoch, who, phase, bucket, text, corrupt))
