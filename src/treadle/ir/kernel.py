"""numba behind one typed decorator; it is imported when a kernel is first called, not before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """A function over arrays, compiled on first use and kept on disk for the next process."""
    compiled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if compiled is None:
            import numba

            try:
                compiled = numba.njit(cache=True, nogil=True)(function)
            except RuntimeError:  # nowhere to write: a read-only install without a home
                compiled = numba.njit(nogil=True)(function)
        assert compiled is not None
        return compiled(*args, **kwargs)

    return call
