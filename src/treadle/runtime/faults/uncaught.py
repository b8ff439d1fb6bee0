"""Errors of a user's own loop, which end its rank between two steps: other ranks raise them as those of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from weakref import WeakMethod


class UncaughtErrors:
    """Reports the error that ends the process, before the hook that was there prints it.

    `sys.exit` raises no error that a hook sees: other ranks learn that the rank left.
    """

    def __init__(self, tell: WeakMethod[Callable[[BaseException], None]]) -> None:
        self._tell, self._before, self._is_closed = tell, sys.excepthook, False
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Report and print the error."""
        try:
            tell = self._tell()
            if tell is not None and not self._is_closed:
                tell(error)
        finally:
            self._before(kind, error, traceback)

    def close(self) -> None:
        """Give way to the hook before, once nothing that came later stands on this one."""
        self._is_closed = True
        hook = sys.excepthook
        while isinstance(hook, UncaughtErrors) and hook._is_closed:
            hook = hook._before
        sys.excepthook = hook
