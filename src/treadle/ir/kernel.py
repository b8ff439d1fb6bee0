"""Kernels: loops over arrays, run by plain Python where the arrays are small, and compiled by numba where they are not.

numba takes half a second to import, and seconds to compile a kernel for the first time; a small program is done by
then. So a kernel runs as plain Python until its arrays are larger than SMALL, or until it has been through BUDGET
elements in this process. Both ways give the same results.

Kernels take NamedTuples of arrays, and call functions of their own file that are marked `inlined`. An argument that may
be None is tested with `is None` in the function that receives it: numba then leaves the branch out. Inside a NamedTuple
that does not work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

SMALL = 20_000
"""Elements of the largest array that plain Python goes through, at some 20 µs each in the slowest kernel."""

BUDGET = 100_000
"""Elements in all that plain Python goes through in one kernel: seconds, as many as compiling it takes."""


def kernel(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile a function when it is first called with much to do, and keep the result on disk for the next process."""
    return Compiled(function, cache=True, nogil=True)


def inlined(function: Callable[P, R]) -> Compiled[P, R]:
    """Compile a function into the kernels that call it.

    It must not make arrays: it is compiled without reference counts. With them numba counts the references to each
    array that is taken out of a NamedTuple, which made the sweep twice as slow and the rule thirty times.
    """
    return Compiled(function, forceinline=True, _nrt=False)


class Compiled(Generic[P, R]):
    """A function that numba compiles with `options` when it is first needed."""

    compiling: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    """Called once a process, before the first kernel is compiled that the disk does not hold."""

    def __init__(self, function: Callable[P, R], **options: bool) -> None:
        functools.update_wrapper(self, function)
        assert isinstance(function, FunctionType)
        self._function = function
        self._options = options
        self._compiled: Callable[P, R] | None = None
        self._budget = BUDGET

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._compiled is None:
            size = max(map(_size, (*args, *kwargs.values())), default=0)
            self._budget -= size
            if size <= SMALL and self._budget >= 0:
                return self.plain(*args, **kwargs)
        return self.compiled(*args, **kwargs)

    @functools.cached_property
    def plain(self) -> Callable[P, R]:
        """The function in plain Python, and so all that it calls."""
        return self._with_callees(lambda callee: callee.plain)

    @property
    def compiled(self) -> Callable[P, R]:
        """Numba's function, which is made once."""
        if self._compiled is None:
            import numba

            jit: Any = numba.njit
            function = self._with_callees(lambda callee: callee.compiled)
            try:
                self._compiled = jit(**self._options)(function)
            except RuntimeError:  # nowhere to write: a read-only install without a home
                self._compiled = jit(**{**self._options, "cache": False})(function)
            if self._options.get("cache"):
                _announce(self._compiled)
        assert self._compiled is not None
        return self._compiled

    def _with_callees(self, resolve: Callable[[Compiled[..., Any]], Any]) -> Callable[P, R]:
        """Copy the function so that its names of other kernels mean what `resolve` makes of them."""
        function = self._function
        callees: dict[str, Any] = {}
        for name in function.__code__.co_names:
            callee = function.__globals__.get(name)
            if isinstance(callee, Compiled):
                # numba's cache on disk looks at the caller's file only, and would keep a callee's old version
                assert callee.__module__ == function.__module__, f"{name} has to be in the file of its caller"
                callees[name] = resolve(callee)
        if not callees:
            return function
        copy = FunctionType(function.__code__, {**function.__globals__, **callees}, function.__name__)
        functools.update_wrapper(copy, function)
        del copy.__wrapped__  # type: ignore[attr-defined]
        return copy


def _size(argument: object) -> int:
    """Elements of an array, or of the largest in a NamedTuple."""
    if isinstance(argument, tuple):
        return max(map(_size, argument), default=0)
    return getattr(argument, "size", 0)  # numbers are no work


def _announce(dispatcher: Any) -> None:
    """Announce that a kernel is going to be compiled, once, if the disk holds no version of it."""
    function = dispatcher.py_func
    held = Path(dispatcher.stats.cache_path or "/nowhere").glob(f"*.{function.__name__}-*.nbi")
    if not any(held):
        announce, Compiled.compiling = Compiled.compiling, staticmethod(lambda: None)
        announce()
