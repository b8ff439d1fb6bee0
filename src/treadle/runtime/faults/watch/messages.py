"""What ranks say to each other about losses, and how it looks in bytes.

A frame is a type (1 byte), a length (2) and a body: fixed fields, and at most one part of varying length at its end.
Whatever does not fit raises MalformedError, and the connection it came from is dropped. Nothing is ever evaluated.

Hello, Beat and Bye go to a neighbour and no further. Lost, Ask and State are passed on by everyone, each once, which
is what `origin` and `seq` are for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from treadle.host.errors import TreadleError
from treadle.runtime.faults.progress.page import Snapshot

UNKNOWN = -2
"""As an op: nobody could tell."""

MOST_TEXT_BYTES = 600
MOST_WAITED_FOR = 8192

_HEADER = struct.Struct("!BH")
_MAGIC = b"treadle2"


class MalformedError(TreadleError):
    """Bytes that are no message."""


class LossKind(IntEnum):
    """What became of a rank."""

    KILLED = 1
    RAISED = 2
    HUNG = 3
    LEFT = 4
    CUT = 5

    @property
    def word(self) -> str:
        """As `RankLostError.kind` has it."""
        return self.name.lower()


class WaitFailure(IntEnum):
    """Why a rank asks what the others are doing. STUCK: what it waited for in vain is an op of its own."""

    TIMED_OUT = 1
    CLOSED = 2
    STUCK = 3


class Condition(IntEnum):
    """How a rank's state came to be known: it answered, or a neighbour speaks for it."""

    ANSWERS = 1
    SILENT = 2
    LEFT = 3


class WaitState(IntEnum):
    """How a rank's wait stands. OVERDUE: it ought to have timed out, so its thread hangs there, whatever it waits for.

    UNSAID is what a neighbour says, who cannot know.
    """

    UNSAID = 0
    RUNS = 1
    TIMED_OUT = 2
    CLOSED = 3
    OVERDUE = 4


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of a connection: the token of the rank that is called, the rank that calls."""

    token: bytes
    rank: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live, and this is where I am."""

    slots: Snapshot


@dataclass(frozen=True, slots=True)
class Goodbye:
    """I leave in good order."""

    slots: Snapshot


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank is lost. `at_ns` is the wall clock where it was seen, `still_ms` how long it had not moved.

    exact: the op was read from the rank's own page or told by it, rather than taken from its last heartbeat.
    silent: it gave no sign of life, so it cannot be expected to end itself.
    secondhand: it raised what a rank raises when its peer is gone, so it was hardly the first.
    """

    origin: int
    seq: int
    rank: int
    kind: LossKind
    op: int
    step: int
    at_ns: int
    still_ms: int
    exact: bool = True
    silent: bool = False
    secondhand: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A wait of the origin failed and nobody has told why: what is everyone doing?"""

    origin: int
    seq: int
    cause: WaitFailure


@dataclass(frozen=True, slots=True)
class Observation:
    """What a rank is doing: the ranks it waits for (none: it computes, or is outside a step), and for how long."""

    rank: int
    condition: Condition
    op: int
    step: int
    still_ms: int
    exact: bool
    waits: tuple[int, ...]
    wait: WaitState = WaitState.UNSAID


@dataclass(frozen=True, slots=True)
class StateReply:
    """An answer to the ask with this origin and seq, for oneself or for a neighbour that cannot."""

    origin: int
    seq: int
    ask: tuple[int, int]
    sight: Observation


Flooded: TypeAlias = Lost | StateRequest | StateReply
Message: TypeAlias = Greeting | Heartbeat | Goodbye | Flooded

_HELLO = struct.Struct("!8s16sI")
_SLOTS = struct.Struct("!qqq")
_LOST = struct.Struct("!IIIBqqqQB")
_ASK = struct.Struct("!IIB")
_STATE = struct.Struct("!IIIIIBqqQB")


def encode(message: Message) -> bytes:
    """The message as a frame."""
    match message:
        case Greeting(token, rank):
            number, body = 1, _HELLO.pack(_MAGIC, token, rank)
        case Heartbeat(slots):
            number, body = 2, _SLOTS.pack(*slots)
        case Goodbye(slots):
            number, body = 3, _SLOTS.pack(*slots)
        case Lost(origin, seq, rank, kind, op, step, at_ns, still_ms, exact, silent, secondhand, text):
            flags = exact | silent << 1 | secondhand << 2
            number, body = 4, _LOST.pack(origin, seq, rank, kind, op, step, at_ns, still_ms, flags)
            body += text.encode(errors="replace")[:MOST_TEXT_BYTES]
        case StateRequest(origin, seq, cause):
            number, body = 5, _ASK.pack(origin, seq, cause)
        case StateReply(origin, seq, ask, sight):
            waits = sight.waits[:MOST_WAITED_FOR]
            flags = sight.exact | sight.wait << 1
            head = (origin, seq, *ask, sight.rank, sight.condition, sight.op, sight.step, sight.still_ms, flags)
            number, body = 6, _STATE.pack(*head) + struct.pack(f"!{len(waits)}I", *waits)
    return _HEADER.pack(number, len(body)) + body


def _hello(body: bytes) -> Greeting:
    magic, token, rank = _HELLO.unpack(body)
    if magic != _MAGIC:
        raise MalformedError("no hello of this version")
    return Greeting(token, rank)


def _lost(body: bytes) -> Lost:
    origin, seq, rank, kind, op, step, at_ns, still_ms, flags = _LOST.unpack_from(body)
    text = body[_LOST.size :].decode(errors="replace")
    printable = "".join(char if char.isprintable() else " " for char in text)  # it will be shown in a terminal
    exact, silent, secondhand = bool(flags & 1), bool(flags & 2), bool(flags & 4)
    return Lost(origin, seq, rank, LossKind(kind), op, step, at_ns, still_ms, exact, silent, secondhand, printable)


def _ask(body: bytes) -> StateRequest:
    origin, seq, cause = _ASK.unpack(body)
    return StateRequest(origin, seq, WaitFailure(cause))


def _state(body: bytes) -> StateReply:
    origin, seq, asker, asked, rank, condition, op, step, still_ms, flags = _STATE.unpack_from(body)
    tail = body[_STATE.size :]
    waits = struct.unpack(f"!{len(tail) // 4}I", tail)
    sight = Observation(rank, Condition(condition), op, step, still_ms, bool(flags & 1), waits, WaitState(flags >> 1))
    return StateReply(origin, seq, (asker, asked), sight)


_DECODERS: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    1: (_HELLO.size, _hello),
    2: (_SLOTS.size, lambda body: Heartbeat(Snapshot(*_SLOTS.unpack(body)))),
    3: (_SLOTS.size, lambda body: Goodbye(Snapshot(*_SLOTS.unpack(body)))),
    4: (_LOST.size + MOST_TEXT_BYTES, _lost),
    5: (_ASK.size, _ask),
    6: (_STATE.size + 4 * MOST_WAITED_FOR, _state),
}
"""For each type the longest body it may have, and what reads it."""


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now. Raises MalformedError as soon as a type or a length cannot be."""
        self._data += data
        messages: list[Message] = []
        at = 0
        while len(self._data) - at >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._data, at)
            most, decode = _DECODERS.get(number, (-1, None))
            if decode is None or length > most:
                raise MalformedError(f"a frame of type {number} and {length} bytes")
            if len(self._data) - at < _HEADER.size + length:
                break
            at += _HEADER.size
            try:
                messages.append(decode(bytes(self._data[at : at + length])))
            except (struct.error, ValueError) as error:
                raise MalformedError(f"a frame of type {number}: {error}") from error
            at += length
        del self._data[:at]
        return messages
