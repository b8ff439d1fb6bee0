"""Errors that other processes get as they are: frameworks that run ranks, as Ray does, pickle what ranks raise."""

from __future__ import annotations

from typing import Any


class PortableError(Exception):
    """An error with an `__init__` of its own. What pickle does by itself would call that with the text alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Made without `__init__`, with all that it has."""
        return _made, (type(self), *self.args), vars(self)


def _made(kind: type[PortableError], *args: Any) -> PortableError:
    return kind.__new__(kind, *args)
