"""The interface of all lane backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from treadle.dist.device import Device

Run: TypeAlias = Callable[[], None]

NEVER = -1
"""When something started or ended that did not."""


def in_ns(device: Device, noted: Sequence[Any]) -> list[int]:
    """Return times of a device's clock in nanoseconds, NEVER for None."""
    known = iter(device.nanoseconds([time for time in noted if time is not None]))
    return [next(known) if time is not None else NEVER for time in noted]


class Lanes(Protocol):
    """The lanes of a rank. Ops and lanes are numbers. A step launches each op once and then calls `finish`.

    On a lane, ops run in the order in which they are launched, each after the ops it waits for; these were launched
    before it, unless the backend takes them `ahead`. `launch` or `finish` raises the first error of a run; ops that
    have not started by then never start.
    """

    ahead: bool
    """May an op be launched before those it waits for: lanes are threads."""

    @property
    def failed(self) -> int | None:
        """Returns the op whose run raised in this step, or None."""
        ...

    def begin(self) -> None:
        """Starts a step: nothing has run."""
        ...

    def launch(self, lane: int, op: int, run: Run, after: Sequence[int]) -> None:
        """Runs `run` on a lane, after the ops `after`. May return before `run` has."""
        ...

    def finish(self) -> None:
        """Returns when everything launched has run."""
        ...

    def times(self) -> tuple[list[int], list[int]]:
        """Returns starts and ends of the last step's ops, in nanoseconds of this host's clock; -1 if not run."""
        ...

    def close(self) -> None:
        """Gives threads and streams back."""
        ...
