"""SIGTERM asks a run to stop: it ends its step, saves and leaves."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Notes SIGTERM while it is entered; the handler before is back afterwards.

    Example:
        >>> with StopSignal() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.came
        True

    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        """Start to listen."""
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop to listen."""
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
