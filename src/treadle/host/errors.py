"""The base of Treadle's errors. They can be pickled, as frameworks that run ranks (Ray) do with what ranks raise."""

from __future__ import annotations

from typing import Any


class TreadleError(Exception):
    """The base of every error class of Treadle."""


class PortableError(TreadleError):
    """An error with an `__init__` of its own. What pickle does by itself would call that with the text alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Made without `__init__`, with all that it has."""
        return _made, (type(self), *self.args), vars(self)


def _made(kind: type[PortableError], *args: Any) -> PortableError:
    return kind.__new__(kind, *args)
