"""Something that goes on in a thread of its own while a block runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class Watching:
    """`_run` is called once, and returns soon after `_stop` is set. What it raises, the end of the block raises."""

    _raised: BaseException | None = None

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._raised is not None and error is not None:
            error.add_note(f"beside it: {type(self._raised).__name__}: {self._raised}")
        elif self._raised is not None:
            raise self._raised

    def _go(self) -> None:
        try:
            self._run()
        except BaseException as raised:  # a thread that ends unseen would be looked for elsewhere
            self._raised = raised

    def _run(self) -> None:
        raise NotImplementedError
