"""The bases of Treadle's errors. They can be pickled, as frameworks that run ranks (Ray) do with ranks' errors."""

from __future__ import annotations

from typing import Any


class TreadleError(Exception):
    """The base of every error class of Treadle. A wrong argument is a ValueError or a TypeError, as in Python itself.

    Example:
        >>> issubclass(treadle.RankLostError, TreadleError)
        True

    """


class PortableError(TreadleError):
    """The base of errors with an `__init__` of their own, which plain pickling would call with the text alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Has unpickling skip `__init__` and restore all attributes."""
        return _made, (type(self), *self.args), vars(self)


def _made(kind: type[PortableError], *args: Any) -> PortableError:
    return kind.__new__(kind, *args)


def named(value: object) -> str:
    """Name what came instead of what is allowed: its type and a short repr, in one line."""
    text = repr(value).replace("\n", " ")
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
