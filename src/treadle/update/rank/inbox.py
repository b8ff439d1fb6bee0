"""An update rank's inbox: messages from its worker and from the coordinator, and the ends of both connections.

A thread for each connection puts messages in; the thread that runs the update waits here, with a deadline, for the next
one. Bad news (the attempt is over) ends any wait at once, and calls `on_bad`, which ends waits elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from treadle.host.lateness import why_late
from treadle.update.errors import UpdateError
from treadle.wire.errors import PeerGoneError, WireError
from treadle.wire.link import Link

M = TypeVar("M")
Side: TypeAlias = Literal["worker", "coordinator"]


class Inbox:
    """One rank's inbox. Thread-safe. `bad` is the error that ended the attempt, if any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._boxes: dict[Side, deque[Any]] = {"worker": deque(), "coordinator": deque()}
        self._gone: dict[Side, str] = {}
        self._connection: dict[Side, int] = {"worker": 0, "coordinator": 0}
        self._pid: dict[Side, int] = {"worker": 0, "coordinator": 0}
        self.bad: UpdateError | None = None
        self.on_bad: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin an attempt: drop what is left of the last one."""
        with self._changed:
            for box in self._boxes.values():
                box.clear()
            self.bad = None

    def put(self, side: Side, connection: int, message: Any) -> None:
        """Add a message that came over the connection with that number."""
        with self._changed:
            if self._connection[side] == connection:
                self._boxes[side].append(message)
                self._changed.notify_all()

    def fail(self, error: UpdateError) -> None:
        """End the attempt with an error; the first one of an attempt counts."""
        with self._changed:
            if self.bad is not None:
                return
            self.bad = error
            self._changed.notify_all()
        self.on_bad()

    def lose(self, side: Side, connection: int, text: str) -> None:
        """Note that a connection ended."""
        with self._changed:
            if self._connection[side] == connection:
                self._gone[side] = text
                self._changed.notify_all()

    def find(self, side: Side, pid: int) -> int:
        """Note a new connection; its number. Messages of earlier connections are dropped from then on."""
        with self._changed:
            self._pid[side] = pid
            self._gone.pop(side, None)
            self._boxes[side].clear()
            self._connection[side] += 1
            return self._connection[side]

    def wait(self, side: Side, deadline_s: float, *, heed: bool = True) -> Any:
        """Return the next message from a side. Raises PeerGoneError, TimeoutError, or with `heed` the bad news."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while True:
                if side == "coordinator" and self._boxes[side]:
                    return self._boxes[side].popleft()  # sent before whatever ended the attempt
                if heed and self.bad is not None:
                    raise self.bad
                if self._boxes[side]:
                    return self._boxes[side].popleft()
                if side in self._gone:
                    raise PeerGoneError(self._gone[side])
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer within {deadline_s:g} s{why_late(self._pid[side])}")
                self._changed.wait(left)

    def stir(self) -> None:
        """Have `until` look at its condition again."""
        with self._changed:
            self._changed.notify_all()

    def until(self, ready: Callable[[], bool], deadline_s: float) -> bool:
        """Wait for a condition, of which another thread calls `stir`; whether it holds. Raises the bad news."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.bad is not None or ready(), deadline_s)
            if self.bad is not None:
                raise self.bad
            return done

    def wait_bad(self, deadline_s: float) -> UpdateError | None:
        """Wait for bad news; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.bad is not None, deadline_s)
            return self.bad


def read_into(
    inbox: Inbox, side: Side, link: Link[Any], take: Callable[[Any], bool], lost: Callable[[str], None]
) -> None:
    """Start a thread that reads a connection to its end.

    `take` sees each message first: True keeps it out of the inbox, PeerGoneError ends the connection. `lost` is called
    with the reason when it has ended.
    """
    connection = inbox.find(side, link.pid)

    def read() -> None:
        try:
            while True:
                message = link.receive(None)
                if not take(message):
                    inbox.put(side, connection, message)
        except (PeerGoneError, WireError, OSError) as error:
            text = str(error)
        link.close()
        inbox.lose(side, connection, text)
        lost(text)

    threading.Thread(target=read, name=f"treadle {side}", daemon=True).start()
