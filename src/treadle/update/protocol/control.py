"""What update ranks and their coordinator say to each other.

update rank -> coordinator  Join, Enter, Settled, Sides, Agreed, Fault
coordinator -> update rank  Go, Send, Layouts, Proceed, Stop
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from treadle.update.protocol.messages import Message, Status, Wants
from treadle.weights.pieces import Box, Tensor

Kind: TypeAlias = Literal["update", "recover"]
Phase: TypeAlias = Literal["enter", "settle", "layout", "plan", "begin", "load", "finish", "open"]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A place in a list."""


class Join(Message, frozen=True):
    """The first message of an update rank."""

    protocol: int
    rank: int
    world: int
    pid: int
    host: str


class Fault(Message, frozen=True):
    """What went wrong, where: `who` is a person's name for a process.

    `waited`: this rank waited in vain for others, and cannot say for whom.
    """

    epoch: int
    who: str
    phase: Phase
    bucket: int
    text: str
    corrupt: bool = False
    waited: bool = False


class Enter(Message, frozen=True):
    """An update rank begins an attempt. `has` and `wants` are digests of what it has and of what its worker wants.

    `gives`: its worker's engine can hand out what it holds. `circle` is the attempt that made the communicator it has,
    0 if it has none.

    A rank that cannot (`fault`) enters too, so that all ranks hear of it together. `takeover` and `new_set` are what
    its caller vouches for.
    """

    rank: int
    kind: Kind
    version: int
    base: int | None
    changed: tuple[str, ...] | None
    has: str
    wants: str
    status: Status | None
    gives: bool
    circle: int
    fault: Fault | None = None
    takeover: bool = False
    new_set: bool = False


class Settled(Message, frozen=True):
    """How the worker stands after it learnt what is committed. `closed`: workers that left, and are closed now."""

    epoch: int
    rank: int
    status: Status
    closed: tuple[int, ...] = ()


class Sides(Message, frozen=True):
    """What a rank's device has free; what the rank has and its worker wants, where it was asked."""

    epoch: int
    rank: int
    free_bytes: int
    has: Wants | None
    wants: Wants | None


class Agreed(Message, frozen=True):
    """A phase is done on this rank; `value` must be the same on all where there is one."""

    epoch: int
    rank: int
    phase: Phase
    value: str = ""


ToCoordinator: TypeAlias = Join | Enter | Settled | Sides | Agreed | Fault


# ---- from the coordinator --------------------------------------------------------------------------------------------


class Go(Message, frozen=True):
    """The attempt's epoch, and what is committed so far, by which log. `left`: workers that are out of the set now."""

    epoch: int
    committed: int | None
    epochs: tuple[int, ...]
    log: str = ""
    took: tuple[str, ...] = ()
    takeover: bool = False
    left: tuple[int, ...] = ()


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout in numbers: tensor and box of each piece in turn; `idle` are tensors that it has no piece of."""

    pieces: tuple[Number, ...]
    idle: tuple[Number, ...]


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All layouts, each once. `has` and `wants` are by rank, and number `layouts`."""

    tensors: tuple[Tensor, ...]
    boxes: tuple[Box, ...]
    layouts: tuple[Listed, ...]
    has: tuple[Number, ...]
    wants: tuple[Number, ...]
    free_bytes: tuple[int, ...]


class Layouts(Message, frozen=True):
    """What to do after settling: who is to be loaded (`loads`), who holds the version already (`holds`).

    `only`: the tensors that move, None for all. `catalogue` (a packed Catalogue) is None where no layout changed.
    `circle` is the attempt that made the communicator to use: an earlier one that all still have, or this one.
    """

    epoch: int
    version: int
    loads: tuple[int, ...]
    holds: tuple[int, ...]
    only: tuple[str, ...] | None
    circle: int
    catalogue: bytes | None
    why: str = ""


class Send(Message, frozen=True):
    """Layouts changed: send Sides, with those that are asked for; of ranks that are alike one is asked."""

    epoch: int
    has: bool
    wants: bool


class Proceed(Message, frozen=True):
    """All ranks have agreed on the phase; for `finish` this is the decision to commit, which is durable by now."""

    epoch: int
    phase: Phase


class Stop(Message, frozen=True):
    """The attempt is over. `committed`: its version was committed before."""

    epoch: int
    fault: Fault
    committed: bool


FromCoordinator: TypeAlias = Go | Send | Layouts | Proceed | Stop
