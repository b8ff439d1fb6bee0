"""A connection for typed messages, with a deadline on every wait.

The end of the other process is noticed at once: by the end of the stream, and by its pidfd, as a child that it forked
may hold the stream open.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from treadle.host.processes import no_descriptor_left, stopped
from treadle.host.sockets import close_in_children, peer_of
from treadle.wire.codec import MessageDecoder, encode, sendable
from treadle.wire.errors import PeerGoneError, RefusedError, WireError
from treadle.wire.frames import FIRST_BYTES, MOST_BYTES, Frames, framed
from treadle.wire.seal import Seal

M = TypeVar("M")

MOST_FDS = 8
_CHUNK = 256 << 10


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    """The last message of a connection: why this end closes it. `again`: another call may be taken."""

    text: str
    again: bool


class Link(Generic[M]):
    """One end of a connection; `takes` is the union of messages that may come. Any thread may send, one receives.

    With a `seal` the other end is on another host; errors call it `peer`.
    """

    def __init__(self, connection: socket.socket, takes: Any, *, seal: Seal | None = None, peer: str = "") -> None:
        connection.setblocking(False)
        close_in_children(connection)
        self.connection = connection
        self.pid = peer_of(connection).pid if seal is None else 0
        self.peer = peer if peer else f"process {self.pid}"
        self.fds: list[int] = []
        """Descriptors that came with messages and were not taken yet."""
        self._decode: MessageDecoder[M | Refusal] = MessageDecoder(takes | Refusal)
        self._frames = Frames(FIRST_BYTES)
        self._sending = threading.Lock()
        self._shutting = threading.Lock()
        self._queueing = threading.Lock()
        self._queue: deque[tuple[bytes, float]] = deque()
        self._is_queue_sent = False
        self._pidfd, self._ended = _watched(self.pid)
        self._seal = seal
        if seal is not None:
            connection.send(framed(seal.nonce))  # the first bytes: the send buffer has room

    def meet(self, timeout_s: float) -> None:
        """Wait for the other end's nonce, without which nothing can be sent to it."""
        assert self._seal is not None
        self._seal.meet(self._frame(time.monotonic() + timeout_s))

    def trust(self, most_bytes: int = MOST_BYTES) -> None:
        """Allow messages of up to `most_bytes` from now on."""
        self._frames.most_bytes = most_bytes

    def send(self, message: Any, *, fds: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """Hands the whole message to the kernel, or raises PeerGoneError or TimeoutError.

        A message of which only a part could be sent ends the connection.
        """
        self.send_encoded(encode(message), fds=fds, timeout_s=timeout_s)

    def send_encoded(self, body: bytes, *, fds: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """Send a message that is encoded already, as one that goes to many is."""
        deque(self._sent(body, fds, time.monotonic() + timeout_s), maxlen=0)

    def send_soon(self, body: bytes, *, timeout_s: float = 10.0) -> None:
        """Send an encoded message after those before it. What the other end does not take at once, a thread sends.

        Whoever receives learns that the other end is gone; a message that it does not take in time is dropped.
        """
        with self._queueing:
            self._queue.append((body, time.monotonic() + timeout_s))
            if self._is_queue_sent:
                return
            self._is_queue_sent = True
        sent = self._sent_queue()
        for _ in sent:
            threading.Thread(target=deque, args=(sent, 0), name="treadle send", daemon=True).start()
            return

    def _sent_queue(self) -> Iterator[None]:
        """Send what is queued; yields before each wait."""
        while True:
            with self._queueing:
                if not self._queue:
                    self._is_queue_sent = False
                    return
                body, until = self._queue.popleft()
            with suppress(OSError):
                yield from self._sent(body, (), until)

    def _sent(self, body: bytes, fds: Sequence[int], until: float) -> Iterator[None]:
        """Send a message; yields before each wait."""
        if not self._sending.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError(f"{self.peer} did not take the message before this one in time")
        try:
            if self.connection.fileno() < 0:
                raise PeerGoneError(f"the connection to {self.peer} is closed")
            whole = data = memoryview(framed(body if self._seal is None else self._seal.close(body)))
            while data:
                try:
                    sent = self._send_some(data, fds)
                except BlockingIOError:
                    yield
                    try:
                        self._await(select.POLLOUT, until, "take a message")
                    except TimeoutError:
                        if self._seal is not None or len(data) < len(whole):
                            self.shut()  # the next message would be read as the rest of this one
                        raise
                    continue
                except OSError as error:
                    raise PeerGoneError(f"{self.peer} {_end(error)}") from error
                fds, data = (), data[sent:]
        finally:
            self._sending.release()

    def _send_some(self, data: memoryview, fds: Sequence[int]) -> int:
        if not fds:
            return self.connection.send(data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        return self.connection.sendmsg([data], rights)

    def refuse(self, error: Exception, *, timeout_s: float = 1.0) -> None:
        """Send the reason, if the other end listens, and end the connection. After an OSError it may call again."""
        if self._seal is None or self._seal.met:
            with suppress(OSError, WireError):
                self.send(Refusal(sendable(str(error)), isinstance(error, OSError)), timeout_s=timeout_s)
        self.shut()

    def receive(self, timeout_s: float | None) -> M:
        """Return the next message, or raise PeerGoneError, RefusedError, WireError or TimeoutError.

        A `timeout_s` of None waits as long as the other end lives.
        """
        until = time.monotonic() + timeout_s if timeout_s is not None else None
        if self._seal is not None and not self._seal.met:
            self._seal.meet(self._frame(until))
        frame = self._frame(until)
        if self._seal is not None:
            frame = self._seal.open(frame)
        message = self._decode(frame)
        if isinstance(message, Refusal):
            raise (PeerGoneError if message.again else RefusedError)(message.text)
        return message

    def _frame(self, until: float | None) -> bytes:
        while (frame := self._frames.next()) is None:
            self._await(select.POLLIN, until, "send a message")
            self._read_some()
        return frame

    def _read_some(self) -> None:
        try:
            data, ancillary, flags, _ = self.connection.recvmsg(_CHUNK, socket.CMSG_LEN(MOST_FDS * 4))
        except BlockingIOError:
            if self._ended:
                raise PeerGoneError(f"{self.peer} ended") from None
            return
        except OSError as error:
            raise PeerGoneError(f"{self.peer} {_end(error)}") from error
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = array.array("i")
                whole.frombytes(rights[: len(rights) - len(rights) % whole.itemsize])
                self.fds += whole
        came = len(self.fds)
        if came > MOST_FDS or flags & socket.MSG_CTRUNC:
            self.drop_fds()
            if came >= MOST_FDS:
                raise WireError(f"more than {MOST_FDS} descriptors came")
            raise WireError(f"descriptors that came with a message could not be taken: {no_descriptor_left()}")
        if not data:
            raise PeerGoneError(f"{self.peer} closed the connection")
        self._frames.feed(data)

    def _await(self, event: int, until: float | None, what: str) -> None:
        if self._ended:  # also seen by another thread, or with the message before
            self._raise_ended(event)
            return
        poll = select.poll()
        poll.register(self.connection, event)
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        left_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
        ready = poll.poll(left_ms)
        if not ready:
            why = stopped(self.pid) if left_ms else ""  # a caller that only polls is told nothing
            raise TimeoutError(f"{self.peer} did not {what} in time{why}")
        if any(fd == self._pidfd for fd, _ in ready):
            self._ended = True
            self._raise_ended(event)

    def _raise_ended(self, event: int) -> None:
        """Raise for whoever sends. Messages that the process sent before its end are read first."""
        if event == select.POLLOUT:
            raise PeerGoneError(f"{self.peer} ended")

    def drop_fds(self) -> None:
        """Close descriptors that were not taken."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def shut(self) -> None:
        """End the connection; a thread that waits in `receive` gets PeerGoneError."""
        with self._shutting, suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close its descriptors, once threads that `send` or `shut` are done with them.

        A thread that waits in `send` gets PeerGoneError. No other thread may be in `receive`.
        """
        self.shut()
        with self._sending, self._shutting:
            self.drop_fds()
            self.connection.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None


def _end(error: OSError) -> str:
    """Says whether the other end has closed the connection, or is only out of reach."""
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "closed the connection"
    return f"is out of reach: {error.strerror}"


def _watched(pid: int) -> tuple[int | None, bool]:
    """Return a pidfd, and whether the process has ended already.

    There is none for a process of another pid namespace, of another host, or this one: the stream tells its end.
    """
    if pid <= 0 or pid == os.getpid():
        return None, False
    try:
        return os.pidfd_open(pid), False
    except ProcessLookupError:
        return None, True
    except OSError:
        return None, False
