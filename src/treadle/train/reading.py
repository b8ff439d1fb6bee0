"""Reads a configuration from TOML: nested dataclasses, every name and value checked."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from treadle.train.config import TrainConfig

T = TypeVar("T")


def read_config(path: str | Path) -> TrainConfig:
    """Return the configuration in a TOML file; what it does not name has its default.

    Raises:
        ValueError: no TOML, a name that is no field (the message has the nearest), or a value of another type.

    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config {path}: there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    try:
        return from_table(TrainConfig, table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_table(cls: type[T], table: Mapping[str, Any], prefix: str = "") -> T:
    """Return a dataclass with the values of a table; a field that is a dataclass takes a table of its own."""
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        if name not in known:
            raise ValueError(unknown(prefix + name, [prefix + other for other in known], "a field"))
        kind, where = hints[name], prefix + name
        if isinstance(kind, type) and is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where} is a group of fields, a [table], got {type(value).__name__} {value!r}")
            values[name] = from_table(kind, value, f"{where}.")
        else:
            values[name] = _converted(value, kind, where)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"[{prefix[:-1]}] {error}" if prefix else str(error)) from None


def _converted(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        told = str(error).replace("`", "")
        raise ValueError(f"{where}: {told[0].lower()}{told[1:]}: {value!r}") from None


def flag_names(cls: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Yield the names of all fields, `parallel.pp`, as the command line has them behind `--`."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            yield from flag_names(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def unknown(name: str, known: list[str], what: str) -> str:
    """Say that a name is not known, and which is the nearest."""
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"{name!r} is not {what}; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}")
