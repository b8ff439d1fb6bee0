"""Every message, by who takes it. A worker's messages carry the epoch of the attempt they belong to.

update rank -> worker       Hello, GetWants, Settle, Map, TakePlan, Begin, Load, Finish, Commit, Abort, Give
anyone of the user -> worker  Hello, GetStatus, Ask
worker -> update rank       Welcome, Status, Wants, Mapped, Planned, Begun, Loaded, Prepared, Given, Answer, Refused
update rank -> coordinator  Join, Enter, Settled, Sides, Agreed, Fault
coordinator -> update rank  Go, Send, Layouts, Proceed, Stop
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from treadle.weights.pieces import Piece, Tensor
from treadle.weights.plan import Item, Take

PROTOCOL = 3

MOST_PLANS = 8
"""How many plans a worker keeps; the one that came first goes."""

State: TypeAlias = Literal["serving", "closed", "loading", "prepared"]
Rollback: TypeAlias = Literal["host", "disk", "none"]
Close: TypeAlias = Literal["drain", "abort"]
Reason: TypeAlias = Literal[
    "malformed", "order", "stale", "busy", "late", "taken", "closed", "failed", "corrupt", "memory", "foreign"
]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """Tagged with its own name in lower case; a field that is not known is refused."""


# ---- to a worker -----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message of a connection."""

    protocol: int
    role: Literal["update", "ask"]
    rank: int = -1


class GetStatus(Message, frozen=True):
    """Asks for Status."""


class GetWants(Message, frozen=True):
    """Asks for Wants."""


class Settle(Message, frozen=True):
    """What is committed, `version` (None: nothing yet) by any of `epochs`. A prepared worker opens it or goes back.

    One that serves anything else is closed, as an update would, and keeps what it holds. `log` is the id of the log
    that says so; a worker of another log refuses, except of those that it `took` over, or with `takeover`.
    """

    epoch: int
    version: int | None
    epochs: tuple[int, ...]
    close: Close = "drain"
    drain_s: float = 2.0
    log: str = ""
    took: tuple[str, ...] = ()
    takeover: bool = False


class Map(Message, frozen=True):
    """The IPC buffers: descriptors of shared memory come along, or handles of a GPU's."""

    sizes_bytes: tuple[int, ...]
    handles: tuple[bytes, ...] = ()
    device: int = -1


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's part of a bucket. The digest of take t is the `checks[t]`-th of the table at `table_bytes`."""

    bucket: int
    items: tuple[Item, ...]
    takes: tuple[Take, ...]
    checks: tuple[int, ...]
    table_bytes: int


class TakePlan(Message, frozen=True):
    """A worker's part of a plan, to be kept under its digest. `gives` are the buckets that it is the source of."""

    digest: str
    tensors: tuple[Tensor, ...]
    shares: tuple[Share, ...]
    gives: tuple[Share, ...] = ()


class Begin(Message, frozen=True):
    """Keep a way back, close, and be ready to load the plan. `partial`: what is not in the plan stays as it is."""

    epoch: int
    version: int
    plan: str
    rollback: Rollback
    close: Close
    drain_s: float
    checked: bool
    partial: bool
    log: str = ""


class Load(Message, frozen=True):
    """The bucket is in that buffer."""

    epoch: int
    bucket: int
    buffer: int


class Give(Message, frozen=True):
    """Put your bucket of the plan into that buffer; go on serving."""

    epoch: int
    plan: str
    bucket: int
    buffer: int
    checked: bool


class Finish(Message, frozen=True):
    """Everything was loaded: make it whole, and stay closed."""

    epoch: int


class Commit(Message, frozen=True):
    """It was decided: open this version."""

    epoch: int
    version: int


class Abort(Message, frozen=True):
    """It was decided: go back to what was there before this epoch."""

    epoch: int


class Ask(Message, frozen=True):
    """A request to what serves, answered with the version it was answered by."""

    body: bytes


ToWorker: TypeAlias = (
    Hello | GetStatus | GetWants | Settle | Map | TakePlan | Begin | Load | Give | Finish | Commit | Abort | Ask
)


# ---- from a worker ---------------------------------------------------------------------------------------------------


class Status(Message, frozen=True):
    """How a worker stands. `version` is what it serves, or holds; `epoch` the last attempt it knows of.

    `log` is the log that it belongs to; `origin` and `content` are the log and the attempt that its version is of.
    `incarnation` is new for each endpoint, `slot` names the place that one process at a time holds (`holds_slot`), and
    `before` is the process that holds it, where this one does not.
    """

    worker: int
    pid: int
    state: State
    version: int | None
    epoch: int
    rollbacks: int
    log: str = ""
    origin: str = ""
    content: int = 0
    incarnation: str = ""
    slot: str = ""
    holds_slot: bool = True
    before: int = 0
    host: str = ""


class Welcome(Message, frozen=True):
    """The answer to Hello."""

    protocol: int
    status: Status
    gives: bool
    plans: tuple[str, ...]


class Wants(Message, frozen=True):
    """What a worker wants, by whole tensors and its boxes of them."""

    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]


class Mapped(Message, frozen=True):
    """The buffers are mapped."""


class Planned(Message, frozen=True):
    """The plan is kept."""

    digest: str


class Begun(Message, frozen=True):
    """Closed and ready."""

    epoch: int
    rollback_bytes: int


class Loaded(Message, frozen=True):
    """The bucket is out of its buffer."""

    epoch: int
    bucket: int
    start_ns: int
    end_ns: int


class Given(Message, frozen=True):
    """The bucket is in its buffer."""

    epoch: int
    bucket: int


class Prepared(Message, frozen=True):
    """The version is there, whole, and not served. `digest` is of what is held, where the engine can tell."""

    epoch: int
    version: int
    digest: str


class Answer(Message, frozen=True):
    """What was asked, and the version that answered."""

    version: int
    body: bytes


class Refused(Message, frozen=True):
    """Why not. `code` is for programs, `text` for people."""

    code: Reason
    text: str


FromWorker: TypeAlias = (
    Welcome | Status | Wants | Mapped | Planned | Begun | Loaded | Given | Prepared | Answer | Refused
)
