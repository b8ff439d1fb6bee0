"""What reaches an update rank: messages from its worker and from the coordinator, and the end of either.

A thread for each connection puts messages here; the thread that runs the update waits here, with a deadline, for what
it needs next. Bad news ends any wait at once, and calls those who can break off a wait elsewhere.
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
    """One rank's inbox."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._boxes: dict[Side, deque[Any]] = {"worker": deque(), "coordinator": deque()}
        self._gone: dict[Side, str] = {}
        self._connection: dict[Side, int] = {"worker": 0, "coordinator": 0}
        self._pid: dict[Side, int] = {"worker": 0, "coordinator": 0}
        self.bad: UpdateError | None = None
        self.on_bad: Callable[[], None] = lambda: None

    def start(self) -> None:
        """A new attempt: what is left of the last one is dropped."""
        with self._changed:
            for box in self._boxes.values():
                box.clear()
            self.bad = None

    def put(self, side: Side, connection: int, message: Any) -> None:
        """A message has come, over the connection with that number."""
        with self._changed:
            if self._connection[side] == connection:
                self._boxes[side].append(message)
                self._changed.notify_all()

    def fail(self, error: UpdateError) -> None:
        """Bad news; the first of an attempt counts."""
        with self._changed:
            if self.bad is not None:
                return
            self.bad = error
            self._changed.notify_all()
        self.on_bad()

    def lose(self, side: Side, connection: int, text: str) -> None:
        """A connection ended."""
        with self._changed:
            if self._connection[side] == connection:
                self._gone[side] = text
                self._changed.notify_all()

    def find(self, side: Side, pid: int) -> int:
        """A connection was made; its number. What still comes over an earlier one is of no interest."""
        with self._changed:
            self._pid[side] = pid
            self._gone.pop(side, None)
            self._boxes[side].clear()
            self._connection[side] += 1
            return self._connection[side]

    def wait(self, side: Side, deadline_s: float, *, heed: bool = True) -> Any:
        """The next message from a side. Raises Gone, TimeoutError, or the bad news (not with `heed=False`)."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while True:
                if side == "coordinator" and self._boxes[side]:
                    return self._boxes[side].popleft()  # it said so before whatever ended the attempt
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
        """Something that `until` waits for may have come about."""
        with self._changed:
            self._changed.notify_all()

    def until(self, ready: Callable[[], bool], deadline_s: float) -> bool:
        """Waits for something that another thread brings about and then stirs; raises the bad news."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.bad is not None or ready(), deadline_s)
            if self.bad is not None:
                raise self.bad
            return done

    def wait_bad(self, deadline_s: float) -> UpdateError | None:
        """The bad news, if it comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.bad is not None, deadline_s)
            return self.bad


def read_into(
    inbox: Inbox, side: Side, link: Link[Any], take: Callable[[Any], bool], lost: Callable[[str], None]
) -> None:
    """Starts a thread that reads a connection to its end. `take` handles what needs no waiting for, or raises Gone."""
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
