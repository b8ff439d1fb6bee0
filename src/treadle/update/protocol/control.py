"""The messages between update ranks and their coordinator.

update rank -> coordinator  Hello, Enter, Report, Fault; Status of its worker, at any time
coordinator -> update rank  Proceed, Call, Go, Describe, Layouts, Fault; Grant for its worker, at any time

Ranks below the world's size call for updates. Those from there on are agents: each speaks for a worker, joins and
leaves at any time, and enters the attempts that it is called to.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from treadle.update.protocol.buffer_device import BufferDevice
from treadle.update.protocol.update_messages import Describe, Grant, Hello, Message, Status, WeightLayout
from treadle.update.update_options import UpdateOptions
from treadle.weights.tensor_boxes import Box, Tensor

Kind: TypeAlias = Literal["update", "recover"]
Phase: TypeAlias = Literal["enter", "settle", "layout", "plan", "begin", "load", "finish", "open"]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""An index into a list of the same message."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an attempt is for, and how it is done: the same on all ranks. `takeover`: what the caller vouches for."""

    kind: Kind
    version: int
    base: int | None = None
    changed: tuple[str, ...] | None = None
    takeover: bool = False
    options: UpdateOptions = UpdateOptions()


class Fault(Message, frozen=True):
    """What went wrong, where; the attempt fails. `who` names a process for people; `bucket` is -1 outside of loading.

    `epoch` is 0 where the sender has not heard Go. `corrupt`: bytes differed from their source's. `waited`: a wait for
    other ranks failed, and the sender cannot tell whose fault that is. `committed`, from the coordinator: the attempt's
    version had been decided before, so workers will serve it. `call`: of an agent, or for one that is turned away, the
    number of the call that it answers.
    """

    epoch: int
    who: str
    phase: Phase
    bucket: int
    text: str
    corrupt: bool = False
    waited: bool = False
    committed: bool = False
    call: int = 0


class Enter(Message, frozen=True):
    """An update rank begins an attempt. `has` and `wants` are digests of its source's and its worker's layout.

    `worker` is the worker that it speaks for, None where it has none; that one's `status` is None where the rank has a
    `fault`. `group` is the attempt that made the process group the rank has, 0 if it has none. A rank that cannot take
    part enters with a `fault`, so that all ranks hear of it together. `away`: why its worker takes no part, where the
    rank goes on without it. `call`: of an agent, the number of the call that it answers. `device`: where it can have
    its buffers.
    """

    worker: int | None
    asked: Asked
    has: str
    wants: str
    status: Status | None
    group: int
    fault: Fault | None = None
    away: str = ""
    call: int = 0
    device: BufferDevice = BufferDevice()


class Sides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's free device memory, and the layouts it was asked for."""

    free_bytes: int
    has: WeightLayout | None
    wants: WeightLayout | None


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The digest of a sample of the plan's `shared` pieces with this number, and some of their names for people."""

    number: Number
    digest: str
    about: str


class Report(Message, frozen=True):
    """A phase is done on this rank; for `finish` this is its vote.

    For `settle` it has the `status` of the rank's worker, if that has one, which has learnt what is committed; for
    `layout` the rank's `sides`. `value` must be the same on all ranks, and so must be the digests of `samples` on the
    ranks that have these pieces.
    """

    epoch: int
    phase: Phase
    status: Status | None = None
    sides: Sides | None = None
    value: str = ""
    samples: tuple[Sample, ...] = ()


ToCoordinator: TypeAlias = Hello | Enter | Report | Fault | Status


# ---- from the coordinator --------------------------------------------------------------------------------------------


class Call(Message, frozen=True):
    """Calls an agent to an attempt; it enters with this number."""

    number: int
    asked: Asked


class Go(Message, frozen=True):
    """Numbers the attempt: says which ranks take part in it, and has the `grant` with which they settle workers.

    Buffers are on a `device` of this type.
    """

    cast: tuple[int, ...]
    grant: Grant
    device: str = "cpu"

    @property
    def epoch(self) -> int:
        """The attempt's number."""
        return self.grant.epoch


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout as indices: tensor and box of each piece in turn. `idle` are tensors of which it has no piece."""

    pieces: tuple[Number, ...]
    idle: tuple[Number, ...]
    copies: Number = 0
    tied: tuple[tuple[str, str], ...] = ()


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All layouts, each once. `has[r]` and `wants[r]` are rank r's indices into `layouts`."""

    tensors: tuple[Tensor, ...]
    boxes: tuple[Box, ...]
    layouts: tuple[Listed, ...]
    has: tuple[Number, ...]
    wants: tuple[Number, ...]
    free_bytes: tuple[int, ...]


class Layouts(Message, frozen=True):
    """What moves in this attempt: to workers of ranks `loads`, from sources or, in a recovery, from those of `holds`.

    `workers` are the numbers of the workers of `loads`, for error messages.
    `only`: the tensors that move, None for all. `catalogue` (a packed Catalogue) is None where no layout changed.
    `group` is the attempt that made the process group to use: an earlier one that all ranks still have, or this one.
    `why` goes into the notes of the update.
    """

    epoch: int
    version: int
    loads: tuple[int, ...]
    workers: tuple[int, ...]
    holds: tuple[int, ...]
    only: tuple[str, ...] | None
    group: int
    catalogue: bytes | None
    why: str = ""


class Proceed(Message, frozen=True):
    """All ranks are done with the phase. For `finish` this is the decision to commit, which is on disk by now.

    With `epoch` 0 it answers Hello: the rank has joined, and may enter.
    """

    epoch: int
    phase: Phase


FromCoordinator: TypeAlias = Proceed | Call | Go | Describe | Layouts | Fault | Grant
