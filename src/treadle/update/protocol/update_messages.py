"""The messages between update ranks and workers. Those of an attempt carry its number (`epoch`).

update rank -> worker       Hello, GetStatus, GetLayout, Grant, Map, TakePlan, Begin, Load, Finish, Export
its thread that keeps a lease -> worker  Hello, GetStatus, Grant
any process of the user -> worker  Hello, GetStatus, Ask
worker -> update rank       Welcome, Status, WeightLayout, Mapped, Planned, Begun, Loaded, Prepared, Exported, Refused
worker -> who asked         Welcome, Status, Answer, Refused

`control.py` has those between update ranks and their coordinator.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from treadle.weights.tensor_boxes import Piece, Tensor
from treadle.weights.update_plan import Item, Take

PROTOCOL = 12

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
    """Opens a connection: of the update rank of this worker, of the same for its lease, or of a process that asks."""

    protocol: int
    role: Literal["update", "lease", "ask"]
    rank: int = -1


class GetStatus(Message, frozen=True):
    """Asks how the worker stands; answered by Status."""


class GetLayout(Message, frozen=True):
    """Asks which pieces the worker wants; answered by WeightLayout."""


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
    checked: bool
    partial: bool
    log: str = ""
    delta: bool = False


class Load(Message, frozen=True):
    """Load a bucket, which is in the buffer with that index: `delta_bytes` of changed elements; 0: it is whole."""

    epoch: int
    bucket: int
    buffer: int
    delta_bytes: int = 0


class Export(Message, frozen=True):
    """Copy a bucket of your weights into the buffer with that index, while serving goes on."""

    epoch: int
    plan: str
    bucket: int
    buffer: int
    checked: bool


class Finish(Message, frozen=True):
    """All buckets were loaded: make the model whole, and stay closed."""

    epoch: int


class Ask(Message, frozen=True):
    """A request to the engine; the Answer carries the version that answered."""

    body: bytes


ToWorker: TypeAlias = Hello | GetStatus | GetLayout | Grant | Map | TakePlan | Begin | Load | Export | Finish | Ask


# ---- from a worker ---------------------------------------------------------------------------------------------------


class Status(Message, frozen=True):
    """How a worker stands. `version` is the one it serves or holds, `epoch` the last attempt it knows of.

    `log` is the log that the worker belongs to; `origin` and `content` are the log and the attempt that made its
    version. `incarnation` is a random id, new for each endpoint. `slot` is the id of the worker's slot, which one
    process at a time holds (`holds_slot`); where this process does not, `before` is the pid of the one that does.
    `replica` is the number of the first worker of its engine. `staged` is the attempt that it has voted for, 0 if none.
    `stamp_ns` is the time of this status by the worker's clock, `term` the last coordinator of its log that it heard.
    `base` is the plan whose boxes the worker keeps a copy of as they are served; empty where it has none.
    `layout` is the number of the layout that it wants, which is another one after its engine has changed it.
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


class Welcome(Message, frozen=True):
    """Accepts a connection. `plans` are digests of the plans that the worker has already."""

    protocol: int
    status: Status
    can_export: bool
    plans: tuple[str, ...]


class WeightLayout(Message, frozen=True):
    """A layout of weights: whole tensors, and the pieces of them that a rank has or a worker wants.

    `copies` is how many buckets the worker's engine copies on its device while it loads; buffers leave room for them.
    `tied` are other names of tensors: the engine takes the second of each pair, and serves it under both names.
    """

    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    copies: int = 0
    tied: tuple[tuple[str, str], ...] = ()


class Mapped(Message, frozen=True):
    """The worker has mapped the buffers."""


class Planned(Message, frozen=True):
    """The worker has stored the plan."""

    digest: str


class Begun(Message, frozen=True):
    """The worker is closed and ready to load; its rollback copy takes `rollback_bytes`."""

    epoch: int
    rollback_bytes: int


class Loaded(Message, frozen=True):
    """The worker has loaded the bucket; its buffer is free. Times are of the worker's host clock."""

    epoch: int
    bucket: int
    start_ns: int
    end_ns: int


class Exported(Message, frozen=True):
    """The exported bucket is in its buffer."""

    epoch: int
    bucket: int


class Prepared(Message, frozen=True):
    """The worker holds the version, whole, and does not serve it. `digest` is empty where the engine has none.

    `rollback_bytes` is the size of its rollback copy by now: that of a delta grows with each bucket.
    """

    epoch: int
    version: int
    digest: str
    rollback_bytes: int = 0


class Answer(Message, frozen=True):
    """The engine's answer to Ask, and the version that answered."""

    version: int
    body: bytes


class Refused(Message, frozen=True):
    """The worker did not do what attempt `epoch` asked. `code` is for programs, `text` for people."""

    code: Reason
    text: str
    epoch: int = 0


FromWorker: TypeAlias = (
    Welcome | Status | WeightLayout | Mapped | Planned | Begun | Loaded | Exported | Prepared | Answer | Refused
)
