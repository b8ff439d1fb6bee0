"""A connection over which typed messages go, with a deadline on every wait.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from treadle.host.processes import stopped
from treadle.host.sockets import peer_of, refuse_strangers
from treadle.wire.errors import PeerGoneError, WireError
from treadle.wire.frames import FIRST_BYTES, MOST_BYTES, Frames, framed
from treadle.wire.seal import Seal

M = TypeVar("M")

encode = msgspec.msgpack.encode

MOST_FDS = 8
PAUSE_S = 0.05
"""Before something is tried again that passes: no descriptors left, no place for another."""

HELLO_S = 20.0
"""How long a connection may take to say who it is: on a host that is short of processors, seconds go by unnoticed."""

_CHUNK = 256 << 10


class Link(Generic[M]):
    """One end of a connection; `takes` is the union of messages that may come. Any thread may send, one receives.

    With a `seal`, the other end is on another host, and is called what `peer` says.
    """

    def __init__(self, connection: socket.socket, takes: Any, *, seal: Seal | None = None, peer: str = "") -> None:
        connection.setblocking(False)
        self.connection = connection
        self.pid = peer_of(connection).pid if seal is None else 0
        self.peer = peer if peer else f"process {self.pid}"
        self.fds: list[int] = []
        """Descriptors that came along and were not taken yet."""
        self._decode = msgspec.msgpack.Decoder(takes).decode
        self._frames = Frames(FIRST_BYTES)
        self._sending = threading.Lock()
        self._pidfd = _pidfd(self.pid)
        self._ended = False
        self._seal = seal
        if seal is not None:
            connection.send(framed(seal.nonce))  # nothing is on its way yet: there is room

    def meet(self, timeout_s: float) -> None:
        """Waits for the other end's random number, without which nothing can be sent to it."""
        assert self._seal is not None
        self._seal.meet(self._frame(time.monotonic() + timeout_s))

    def trust(self) -> None:
        """From here on messages may be large."""
        self._frames.most_bytes = MOST_BYTES

    def send(self, message: Any, *, fds: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """Hands the whole message to the kernel, or raises Gone or TimeoutError; half a message ends the connection."""
        self.send_encoded(encode(message), fds=fds, timeout_s=timeout_s)

    def send_encoded(self, body: bytes, *, fds: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """The same, for a message that goes to many."""
        until = time.monotonic() + timeout_s
        if not self._sending.acquire(timeout=timeout_s):
            raise TimeoutError(f"{self.peer} did not take the message before this one in time")
        try:
            whole = data = memoryview(framed(body if self._seal is None else self._seal.close(body)))
            while data:
                try:
                    sent = self._send_some(data, fds)
                except BlockingIOError:
                    try:
                        self._await(select.POLLOUT, until, "take a message")
                    except TimeoutError:
                        if self._seal is not None or len(data) < len(whole):
                            self.shut()  # what came next would be taken for the rest of this
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

    def receive(self, timeout_s: float | None) -> M:
        """The next message. Raises Gone, WireError, or TimeoutError; None waits as long as the other end lives."""
        until = time.monotonic() + timeout_s if timeout_s is not None else None
        if self._seal is not None and not self._seal.met:
            self._seal.meet(self._frame(until))
        frame = self._frame(until)
        if self._seal is not None:
            frame = self._seal.open(frame)
        try:
            message: M = self._decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValidationError is a DecodeError
            raise WireError(f"a message of {len(frame)} bytes is malformed: {error}") from None
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
        if len(self.fds) > MOST_FDS or flags & socket.MSG_CTRUNC:
            self.drop_fds()
            raise WireError(f"more than {MOST_FDS} descriptors came")
        if not data:
            raise PeerGoneError(f"{self.peer} closed the connection")
        self._frames.feed(data)

    def _await(self, event: int, until: float | None, what: str) -> None:
        poll = select.poll()
        poll.register(self.connection, event)
        if self._pidfd is not None and not self._ended:
            poll.register(self._pidfd, select.POLLIN)
        left_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
        ready = poll.poll(left_ms)
        if not ready:
            why = stopped(self.pid) if left_ms else ""  # who only looks whether something came is told nothing
            raise TimeoutError(f"{self.peer} did not {what} in time{why}")
        if any(fd == self._pidfd for fd, _ in ready):
            self._ended = True  # what it sent before its end is read first
            if event == select.POLLOUT:
                raise PeerGoneError(f"{self.peer} ended")

    def drop_fds(self) -> None:
        """Closes descriptors that nobody asked for."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def shut(self) -> None:
        """Ends the connection; a thread that waits in `receive` gets Gone."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and frees its descriptors. Not while another thread receives."""
        self.shut()
        self.drop_fds()
        self.connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _end(error: OSError) -> str:
    """Whether the other end is known to have ended, or only that it is not heard of any more."""
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "closed the connection"
    return f"is out of reach: {error.strerror}"


def accept(server: socket.socket, takes: Any) -> Link[Any] | None:
    """The next that comes to a server; None for a stranger, who is refused. OSError once the server is closed."""
    connection, _ = server.accept()
    try:
        refuse_strangers(connection)
        return Link(connection, takes)
    except OSError:
        connection.close()
        return None


def accepting(server: socket.socket, takes: Any, is_over: Callable[[], bool]) -> Iterator[Link[Any]]:
    """All that come, until it is over, and the server closed with it."""
    while not is_over():
        try:
            link = accept(server, takes)
        except OSError:
            if not is_over():  # out of descriptors, which passes
                time.sleep(PAUSE_S)
            continue
        if link is not None:
            yield link


def _pidfd(pid: int) -> int | None:
    """None where the process is not seen from here (another pid namespace) or ended; the stream will tell then."""
    if pid <= 0 or pid == os.getpid():
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
