"""Values of a config.json by key; a key that is absent or null has its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.fields.fields import Fields
from treadle.fields.kinds import LIST, TABLE, Number, ValueKind


def whole(said: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a whole number.

    Example:
        >>> whole({"moe_layer_freq": "two"}, "moe_layer_freq")
        Traceback (most recent call last):
        ...
        ValueError: config.json: moe_layer_freq is a whole number, got 'two'

    """
    number: int = _value(said, key, Number(whole=True), default)
    return number


def listed(said: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list; by default an empty one."""
    return list(_value(said, key, LIST, []))


def section(said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; by default an empty one."""
    return dict(_value(said, key, TABLE, {}))


def _value(said: Mapping[str, Any], key: str, kind: ValueKind, default: Any) -> Any:
    return Fields("config.json", "", said).given(key, kind, default)
