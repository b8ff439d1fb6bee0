"""Kernels: functions over arrays that numba compiles when they are first called. numba is imported then, not before.

Kernels take NamedTuples of arrays, and call functions of their own file that are marked `inlined`. An argument that may
be None is tested with `is None` in the function that receives it: numba then leaves the branch out. Inside a NamedTuple
that does not work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile a function when it is first called, and keep the result on disk for the next process."""
    return Compiled(function, cache=True, nogil=True)


def inlined(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile a function into the kernels that call it.

    It must not make arrays: it is compiled without reference counts. With them numba counts the references to each
    array that is taken out of a NamedTuple, which made the sweep twice as slow and the rule thirty times.
    """
    return Compiled(function, forceinline=True, _nrt=False)


class Compiled(Generic[P, R]):
    """A function that numba compiles with `options` when it is first needed."""

    def __init__(self, function: Callable[P, R], **options: bool) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._compiled: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        compiled = self._compiled if self._compiled is not None else self.compiled()
        return compiled(*args, **kwargs)

    def compiled(self) -> Callable[P, R]:
        """Return numba's function, which is made once."""
        if self._compiled is None:
            import numba

            jit: Any = numba.njit
            function = self._with_compiled_callees()
            try:
                self._compiled = jit(**self._options)(function)
            except RuntimeError:  # nowhere to write: a read-only install without a home
                self._compiled = jit(**{**self._options, "cache": False})(function)
        assert self._compiled is not None
        return self._compiled

    def _with_compiled_callees(self) -> FunctionType:
        """Copy the function so that its names of other compiled functions mean what numba made of them."""
        function = self._function
        assert isinstance(function, FunctionType)
        callees: dict[str, Any] = {}
        for name in function.__code__.co_names:
            callee = function.__globals__.get(name)
            if isinstance(callee, Compiled):
                # numba's cache on disk looks at the caller's file only, and would keep a callee's old version
                assert callee.__module__ == function.__module__, f"{name} has to be in the file of its caller"
                callees[name] = callee.compiled()
        if not callees:
            return function
        copy = FunctionType(function.__code__, {**function.__globals__, **callees}, function.__name__)
        functools.update_wrapper(copy, function)
        del copy.__wrapped__  # type: ignore[attr-defined]
        return copy
