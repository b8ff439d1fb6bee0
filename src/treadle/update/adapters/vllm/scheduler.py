"""vLLM's scheduler as a replica sees it: running or paused, changed by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.update.adapters.vllm.engines import Engine


class Scheduler:
    """Pauses and resumes an engine. A pause waits for a start that is under way."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._busy = threading.Lock()
        self._paused = False

    def pause(self) -> None:
        """Schedule nothing; a paused engine is left alone."""
        with self._busy:
            if not self._paused:
                self._pause()

    def is_free_within(self, deadline_s: float) -> bool:
        """Wait for a start that is under way; False if it takes longer."""
        free = self._busy.acquire(timeout=deadline_s)
        if free:
            self._busy.release()
        return free

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around a start: no pause comes in between."""
        with self._busy:
            yield

    def resume(self, version: int) -> None:
        """Schedule again; within `starting`."""
        self._paused = False
        self.engine.resume(version)

    def pause_again(self) -> None:
        """Take a resume back; within `starting`."""
        self._pause()

    def _pause(self) -> None:
        self.engine.pause()
        self._paused = True
