"""Messages between watchdogs about losses: msgspec structs, each the body of one frame.

Texts and lists of ranks are bounded, so the largest message is known, and a longer one is refused by its length.
Malformed bytes raise WireError, and the connection they came from is dropped.

Greeting, Heartbeat and Goodbye go to a neighbour and no further. Lost, StateRequest and StateReply are passed on by
every rank, each once: `origin` and `seq` identify them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec.structs import replace

from treadle.runtime.faults.progress.progress_page import Snapshot
from treadle.wire.codec import MessageDecoder
from treadle.wire.codec import encode as encode_body
from treadle.wire.frames import framed

UNKNOWN = -2
"""As an op: no rank could read it."""

TOKEN_BYTES = 16
MOST_TEXT = 600
"""Characters, and as many bytes: longer texts are cut."""

MOST_WAITED_FOR = 8192
"""Ranks that one Observation may list; further ones are left out."""

MOST_MESSAGE_BYTES = 48 << 10
"""The largest message, a StateReply with MOST_WAITED_FOR ranks of 5 bytes each, takes 41 KiB."""

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class LossKind(IntEnum):
    """How a rank was lost."""

    KILLED = 1
    RAISED = 2
    HUNG = 3
    LEFT = 4
    CUT = 5

    @property
    def word(self) -> str:
        """The value of `RankLostError.kind`."""
        return self.name.lower()


class WaitFailure(IntEnum):
    """Why a rank asks for the states of the others. STUCK: it waited in vain for an op of its own."""

    TIMED_OUT = 1
    CLOSED = 2
    STUCK = 3


class Condition(IntEnum):
    """How a rank's state is known: the rank answered, or a neighbour reports it as silent or as having left."""

    ANSWERS = 1
    SILENT = 2
    LEFT = 3


class WaitState(IntEnum):
    """The state of a rank's wait. OVERDUE: it should have timed out, so the rank's thread hangs in it.

    UNSAID is reported by a neighbour, which cannot know.
    """

    UNSAID = 0
    RUNS = 1
    TIMED_OUT = 2
    CLOSED = 3
    OVERDUE = 4


class WatchMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Tagged with its class name in lower case; unknown fields are refused."""


class Greeting(WatchMessage, frozen=True, tag="treadle watch 3"):
    """The first message of a connection: the token of the called rank, the number of the calling rank.

    The tag is the version of these messages: other versions are refused.
    """

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    rank: Natural


class Heartbeat(WatchMessage, frozen=True):
    """The sender is alive, and at these slots."""

    slots: Snapshot


class Goodbye(WatchMessage, frozen=True):
    """The sender closes its watch in good order."""

    slots: Snapshot


class Lost(WatchMessage, frozen=True):
    """A rank is lost. `at_ns` is the wall clock of the rank that saw it, `still_ms` how long it had not moved.

    exact: the op was read from the rank's own page or told by it, not taken from its last heartbeat.
    silent: the rank gave no sign of life, so it cannot be expected to end itself.
    secondhand: the rank raised what ranks raise when a peer is gone, so another was probably lost before.
    """

    origin: Natural
    seq: Natural
    rank: Natural
    kind: LossKind
    op: int
    step: int
    at_ns: int
    still_ms: Annotated[int, msgspec.Meta(ge=0)]
    exact: bool = True
    silent: bool = False
    secondhand: bool = False
    text: Annotated[str, msgspec.Meta(max_length=MOST_TEXT)] = ""


class StateRequest(WatchMessage, frozen=True):
    """Asks every rank for its state: a wait of the origin failed for `cause`, and no loss is known."""

    origin: Natural
    seq: Natural
    cause: WaitFailure


class Observation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank is doing. `waits` are the ranks it waits for: none while it computes, or outside a step."""

    rank: Natural
    condition: Condition
    op: int
    step: int
    still_ms: Annotated[int, msgspec.Meta(ge=0)]
    exact: bool
    waits: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MOST_WAITED_FOR)]
    wait: WaitState = WaitState.UNSAID


class StateReply(WatchMessage, frozen=True):
    """Answers the request with this (origin, seq), for the sender or for a neighbour that cannot answer."""

    origin: Natural
    seq: Natural
    request: tuple[Natural, Natural]
    observation: Observation


Flooded: TypeAlias = Lost | StateRequest | StateReply
Message: TypeAlias = Greeting | Heartbeat | Goodbye | Flooded

_decode: MessageDecoder[Message] = MessageDecoder(Message)


def encode(message: Message) -> bytes:
    """Returns the message as a frame, with texts and lists cut to their bounds."""
    match message:
        case Lost(text=text):
            cut = text.encode(errors="replace")[:MOST_TEXT].decode(errors="ignore")
            message = replace(message, text=cut)
        case StateReply(observation=observation) if len(observation.waits) > MOST_WAITED_FOR:
            message = replace(message, observation=replace(observation, waits=observation.waits[:MOST_WAITED_FOR]))
    return framed(encode_body(message), MOST_MESSAGE_BYTES)


def decode(body: bytes) -> Message:
    """Returns the message in a frame. Its text is made printable, as it will be shown in a terminal."""
    message = _decode(body)
    if isinstance(message, Lost) and not message.text.isprintable():
        printable = "".join(char if char.isprintable() else " " for char in message.text)
        return replace(message, text=printable)
    return message
