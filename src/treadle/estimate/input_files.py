"""Files that say a model or a cluster: read whole, and refused with their name and the place of a mistake."""

from __future__ import annotations

import json
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_CLOSE = 0.65
"""Below that, names are told apart: mi300x is not meant to be b300."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ValueError: there is none, or it is no TOML; the message names file, line and column.

    """
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: there is none, or it is no such JSON; the message names file, line and column.

    """
    try:
        found = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error.msg} (at line {error.lineno}, column {error.colno})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is JSON of an object, got {type(found).__name__}")
    return found


def nearest_hint(name: str, known: list[str]) -> str:
    """Return words about the known name that a wrong one may stand for; none where no name is close."""
    close = get_close_matches(name, known, 1, _CLOSE)
    return f"; the nearest is {close[0]}" if close else ""


def _text(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
