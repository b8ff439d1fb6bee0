"""What every backend of lanes does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

Run: TypeAlias = Callable[[], None]


class Lanes(Protocol):
    """The lanes of a rank; ops and lanes are numbers. A step launches each op once, and then finishes.

    On a lane, ops run in the order in which they are launched, each after the ops it waits for; these were launched
    before it, unless the backend takes them `ahead`. What a run raises, `launch` or `finish` raises; ops that have not
    started by then do not.
    """

    ahead: bool
    """May an op be launched before those it waits for."""

    @property
    def failed(self) -> int | None:
        """The op whose run raised in this step, if one did."""
        ...

    def begin(self) -> None:
        """Starts a step: nothing has run."""
        ...

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Has `run` run on a lane, after the ops named; may return before it has."""
        ...

    def finish(self) -> None:
        """Returns when everything launched has run."""
        ...

    def times(self) -> tuple[list[int], list[int]]:
        """When each op of the last step started and ended, in nanoseconds of this host's clock; -1 if it did not."""
        ...

    def close(self) -> None:
        """Gives threads and streams back."""
        ...
