"""Values of a config.json, each refused by its key where it is not of the kind that is read there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def whole(said: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a whole number; the default where the key is not there.

    Example:
        >>> whole({"moe_layer_freq": "two"}, "moe_layer_freq")
        Traceback (most recent call last):
        ...
        ValueError: moe_layer_freq of a config.json is a whole number, got 'two'

    """
    value = said.get(key, default)
    if type(value) is not int:
        raise ValueError(f"{key} of a config.json is a whole number, got {value!r}")
    return value


def listed(said: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list; an empty one where the key is not there, or null."""
    value = said.get(key)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{key} of a config.json is a list, got {value!r}")
    return value or []


def section(said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object; an empty one where the key is not there, or null."""
    value = said.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} of a config.json is an object, got {value!r}")
    return value or {}
