"""The messages between update ranks and workers. Those of an attempt carry its number (`epoch`).

update rank -> worker                    Hello, Describe, Grant, Map, TakePlan, Begin, Move, Finish
its thread that keeps a lease -> worker  Hello, Describe, Grant
any process of the user -> worker        Hello, Describe, Ask
worker -> who asked                      Status, WeightLayout to Describe, Moved to Move, Answer to Ask; or Refused

`control.py` has those between update ranks and their coordinator.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from treadle.weights.tensor_boxes import Piece, Tensor
from treadle.weights.update_plan import Item, Take

PROTOCOL = 14

MOST_PLANS = 8
"""How many plans a worker keeps; it drops the oldest."""

State: TypeAlias = Literal["serving", "lapsed", "loading", "staged"]
Rollback: TypeAlias = Literal["host", "disk", "none"]
Close: TypeAlias = Literal["drain", "abort"]
Reason: TypeAlias = Literal["order", "stale", "busy", "taken", "closed", "failed", "corrupt", "memory", "foreign"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    """The base of all messages: tagged with the class name in lower case; unknown fields are refused."""


# ---- to a worker -----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Opens a connection, and says what for.

    At a worker: `update` is that of its update rank, `lease` the same one's for its lease, `ask` that of any process.
    At the coordinator: `join` is an update rank's, which is process `pid` on `host`. `world`: how many ranks call for
    updates; those above are agents. Answered by Proceed; without it the rank calls again.
    """

    protocol: int
    role: Literal["update", "lease", "ask", "join"]
    rank: int = -1
    world: int = 0
    pid: int = 0
    host: str = ""


class Describe(Message, frozen=True):
    """Asks how a worker stands; or for a layout: what a rank's source `has`, what a worker `wants`.

    The coordinator asks ranks in attempt `epoch`, since layouts changed; of ranks with the same digest one is asked for
    the layout. `group` is the attempt that made the process group to use, as in Layouts: ranks whose device memory is
    measured make the group first, because it takes some of that memory.
    """

    epoch: int = 0
    has: bool = False
    wants: bool = False
    group: int = 0


class Grant(Message, frozen=True):
    """Says what is committed: `version` (None: nothing yet), by any of the attempts `epochs` of `log`.

    Attempts before `epoch` are over, and so is `epoch` unless it begins with this grant. A worker that holds that
    version, or has it staged, serves it; another one goes back from a load, closes (`close`, within `drain_s` seconds)
    and keeps its weights. A worker that belongs to another log refuses, unless that is among `took`, or `takeover` is
    set. `term` numbers the coordinators of a log: a worker refuses one before the last that it knows.
    `lease_ns`: the worker serves until that long after `stamp_ns`, the time of one of its reports; None: without end.
    """

    epoch: int
    version: int | None
    epochs: tuple[int, ...]
    close: Close = "drain"
    drain_s: float = 2.0
    log: str = ""
    took: tuple[str, ...] = ()
    takeover: bool = False
    term: int = 0
    stamp_ns: int = 0
    lease_ns: int | None = None


class Map(Message, frozen=True):
    """Hands the buffers over, which are on devices of torch's type `device`.

    Host memory comes by file descriptors with the message, that of other devices by handles in it.
    """

    sizes_bytes: tuple[int, ...]
    handles: tuple[bytes, ...] = ()
    device: str = "cpu"


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's part of a bucket. The digest of take t is entry `checks[t]` of the table at offset `table_bytes`."""

    bucket: int
    items: tuple[Item, ...]
    takes: tuple[Take, ...]
    checks: tuple[int, ...]
    table_bytes: int


class TakePlan(Message, frozen=True):
    """A worker's part of a plan, kept under `digest`: what it takes of each bucket, and the buckets it exports."""

    digest: str
    tensors: tuple[Tensor, ...]
    shares: tuple[Share, ...]
    exports: tuple[Share, ...] = ()


class Begin(Message, frozen=True):
    """Make a rollback copy, close, and get ready to load. `partial`: tensors outside of the plan stay as they are.

    `delta`: buckets have the elements that differ from the version that is served, which is the committed one.
    """

    epoch: int
    version: int
    plan: str
    rollback: Rollback
    close: Close
    drain_s: float
    partial: bool
    log: str = ""
    delta: bool = False


class Move(Message, frozen=True):
    """Load a bucket from the buffer with that index; or `out`: copy it there from your weights, while serving goes on.

    `checked`: digests follow the bucket. `delta_bytes` of changed elements are in the buffer; 0: the bucket is whole.
    """

    epoch: int
    plan: str
    bucket: int
    buffer: int
    out: bool
    checked: bool
    delta_bytes: int = 0


class Finish(Message, frozen=True):
    """All buckets were loaded: make the model whole, and stay closed."""

    epoch: int


class Ask(Message, frozen=True):
    """A request to the engine; the Answer carries the version that answered."""

    body: bytes


ToWorker: TypeAlias = Hello | Describe | Grant | Map | TakePlan | Begin | Move | Finish | Ask


# ---- from a worker ---------------------------------------------------------------------------------------------------


class Status(Message, frozen=True):
    """How a worker stands: the answer to Hello, and to what has no other. A rank passes it on to the coordinator.

    `version` is the one that it serves or holds, made by attempt `content` of log `origin`; `log` is the log that it
    belongs to, `epoch` the last attempt it knows of, `staged` the one that it has voted for, 0 if none. `incarnation`
    is a random id, new for each endpoint. `slot` is the id of the worker's slot, which one process at a time holds
    (`holds_slot`); where this process does not, `before` is the pid of the one that does. `replica` is the number of
    the first worker of its engine. `stamp_ns` is the time of this status by the worker's clock, `term` the last
    coordinator of its log that it heard. `plans` are those that it has, `base` the one whose boxes it keeps a copy of
    as they are served; empty where it has none. `layout` numbers the layout that it wants, which its engine may change
    when a load is finished. `rollback_bytes`: its copy, which a delta lets grow with each bucket. `device` is where
    its weights are, by a name that all processes of the host have for it (`ipc_buffers.name_of`).
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
    replica: int = -1
    staged: int = 0
    stamp_ns: int = 0
    term: int = 0
    base: str = ""
    layout: int = 0
    can_export: bool = False
    plans: tuple[str, ...] = ()
    rollback_bytes: int = 0
    device: str = "cpu"


class WeightLayout(Message, frozen=True):
    """A layout of weights: whole tensors, and the pieces of them that a rank has or a worker wants.

    `copies` is how many buckets the worker's engine copies on its device while it loads; buffers leave room for them.
    `tied` are other names of tensors: the engine takes the second of each pair, and serves it under both names.
    """

    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    copies: int = 0
    tied: tuple[tuple[str, str], ...] = ()


class Moved(Message, frozen=True):
    """The worker has moved the bucket; a buffer that it loaded from is free. Times are of the worker's host clock."""

    epoch: int
    bucket: int
    start_ns: int
    end_ns: int


class Answer(Message, frozen=True):
    """The engine's answer to Ask, and the version that answered."""

    version: int
    body: bytes


class Refused(Message, frozen=True):
    """The worker did not do what attempt `epoch` asked. `code` is for programs, `text` for people."""

    code: Reason
    text: str
    epoch: int = 0


FromWorker: TypeAlias = Status | WeightLayout | Moved | Answer | Refused
