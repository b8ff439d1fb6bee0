"""The project's name until 2026-11-16, in the marks of files: such files are read, and never written."""

from __future__ import annotations

from typing import TypeVar

_FORMER, _NAME = "weft", "treadle"

Value = TypeVar("Value")


def former(mark: str) -> str:
    """A mark as files of before have it."""
    return mark.replace(_NAME, _FORMER, 1)


def renamed(mark: str) -> str:
    """A mark as it is written now."""
    return _NAME + mark.removeprefix(_FORMER) if mark.startswith(_FORMER) else mark


def renamed_key(content: dict[str, Value], key: str) -> dict[str, Value]:
    """The object, with `key` in place of the key that a file of before has."""
    if key in content or former(key) not in content:
        return content
    return {key if name == former(key) else name: value for name, value in content.items()}
