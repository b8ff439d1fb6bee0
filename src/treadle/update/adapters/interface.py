"""What an engine must be able to do to take updates.

Calls come from one thread, in the order close, begin, load (many), finish, digest, invalidate, open; `abort` at any
point in between. Each may come again and does no harm then. Each returns None, or what went wrong, rather than raising;
what is raised nevertheless is taken for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from treadle.update.memory.copying import Array
from treadle.update.protocol.messages import WeightLayout
from treadle.update.worker.arrivals import Arrival
from treadle.weights.pieces import Piece


class Adapter(Protocol):
    """One engine in one worker process."""

    can_export: bool
    """Can it hand out what it holds, byte for byte as it was loaded, and take a part of the tensors over the rest.

    Otherwise all tensors move in every update, and the endpoint keeps copies of them to go back to.
    """

    whole: bool
    """Does it want each piece in one arrival. Otherwise a piece that was split comes in parts."""

    def layout(self) -> WeightLayout:
        """The tensors, whole, and its boxes of them."""
        ...

    def close(self, how: str, deadline_s: float) -> str | None:
        """Serve nobody; `how` is drain (let requests end) or abort (break them off)."""
        ...

    def begin(self) -> str | None:
        """Loads follow."""
        ...

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        """Take these in; the staged memory is gone afterwards."""
        ...

    def finish(self) -> str | None:
        """All were loaded: make the model whole (tie, repack, finalize), and stay closed."""
        ...

    def digest(self) -> str:
        """A digest of the weights held, or nothing where an engine cannot tell."""
        ...

    def invalidate(self) -> str | None:
        """Forget what was computed with other weights: prefix, key-value and any other caches."""
        ...

    def open(self, version: int) -> str | None:
        """Serve."""
        ...

    def abort(self) -> str | None:
        """Leave a load that will not be finished. What is held may be torn; it is loaded over or never served."""
        ...

    def export(self, piece: Piece, out: Array) -> str | None:
        """Copy what is held of a piece, while serving goes on."""
        ...
