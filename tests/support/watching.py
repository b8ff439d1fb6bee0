"""Something that goes on in a thread of its own while a block runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class Watching:
    """`_run` is called once, and returns soon after `_stop` is set."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError
