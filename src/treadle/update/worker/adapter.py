"""The interface of engines that take updates.

An endpoint calls its adapter from one thread at a time, in this order:

    close, begin, load (many times), finish, invalidate, lease, open

`lease` may come at any time, from another thread, too; `abort` at any point in between, `export` while the engine
serves or before `close`, `layout` at any time. Each call may come again and must do no harm then. Each returns None, or
what went wrong; an exception counts as that, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from treadle.update.protocol.update_messages import WeightLayout
from treadle.update.worker.arrived_boxes import Arrival, Leaving


class Adapter(Protocol):
    """One engine in one worker process."""

    can_export: bool
    """Whether the engine can copy its weights out, byte for byte as they were loaded, and load a part over the rest.

    Both also between `begin` and `finish`, for updates of changed elements. If not, all tensors are loaded in every
    update, the endpoint keeps a copy of each version that arrives, and peers cannot recover from this engine.
    """

    whole: bool
    """Whether the engine needs each piece in one arrival. If not, a piece that was split comes in parts."""

    @property
    def device(self) -> torch.device:
        """The device of the engine's weights: an endpoint answers when this thread's current stream of it is done."""
        ...

    def layout(self) -> WeightLayout:
        """Return the whole tensors by name, and the pieces of them that this worker holds."""
        ...

    def close(self, how: str, deadline_s: float) -> str | None:
        """Stop serving: `how` is drain (let requests end) or abort (break them off)."""
        ...

    def begin(self) -> str | None:
        """Get ready for loads."""
        ...

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        """Copy these pieces into the model, each with `copy_into` or all with `copy_arrivals`.

        Their memory is reused when the current stream has done what this queued.
        An engine that copies on other streams waits for these before it returns.
        """
        ...

    def finish(self) -> str | None:
        """Make the model whole after the last load (tie, repack, finalize), and stay closed."""
        ...

    def invalidate(self) -> str | None:
        """Drop what was computed with other weights: prefix, key-value and any other caches."""
        ...

    def lease(self, until_ns: int | None) -> str | None:
        """Serve no later than this (`boot_ns`), None for without end: no request enters, and no answer leaves then."""
        ...

    def open(self, version: int) -> str | None:
        """Serve this version."""
        ...

    def abort(self) -> str | None:
        """Leave a load that will not be finished. The weights may be torn; they are loaded over, or never served."""
        ...

    def export(self, leaving: Leaving) -> str | None:
        """Copy the elements of pieces, bit by bit, to their tensors, on the host or on a device, while serving goes on.

        `leaving` has each piece with the tensor it goes to; `leaving.copy_from` copies all of an engine that is a dict.
        """
        ...
