"""Reads a configuration from TOML: nested dataclasses, every name and value checked."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from treadle.models.config import ModelConfig
from treadle.train.config import TrainConfig

T = TypeVar("T")


def read_config(path: str | Path) -> TrainConfig:
    """Return the configuration in a TOML file; what it does not name has its default (`config_of`).

    Raises:
        ValueError: no TOML, a name that is no field (the message has the nearest), or a value of another type.

    """
    return config_of(read_table(path), source=path)


def read_table(path: str | Path) -> dict[str, Any]:
    """Return what a TOML file has.

    Raises:
        ValueError: there is no such file, or it has no TOML.

    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config {path}: there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"--config {path}: {error}") from None


def config_of(table: Mapping[str, Any], *, weights: str | None = None, source: str | Path = "") -> TrainConfig:
    """Return the configuration with the values of a table.

    What it does not name has its default; for the model that is the config.json of the directory of weights to start
    from.

    Args:
        table: the content of a TOML file.
        weights: that directory, if it is not the table's `checkpoint.weights`.
        source: the file, for messages.

    Raises:
        ValueError: a name that is no field (the message has the nearest), a value of another type, or there is no
            config.json that is read.

    """
    try:
        default = TrainConfig()
        checkpoint = table.get("checkpoint")
        if weights is None and isinstance(checkpoint, Mapping):
            weights = from_table(default.checkpoint, checkpoint, "checkpoint.").weights
        if weights:
            default = replace(default, model=model_of(weights))
        return from_table(default, table)
    except ValueError as error:
        raise ValueError(f"{source}: {error}" if source else str(error)) from None


def model_of(weights: str) -> ModelConfig:
    """Return the model of a directory of weights, from its config.json.

    Raises:
        ValueError: there is none, or it is of a model that is not here.

    """
    try:
        return ModelConfig.from_hf(weights)
    except ValueError as error:
        raise ValueError(f"checkpoint.weights {weights}: {error}") from None


def from_table(default: T, table: Mapping[str, Any], prefix: str = "") -> T:
    """Return a dataclass with the values of a table; a field that is a dataclass takes a table of its own."""
    hints = get_type_hints(type(default))
    known = [field.name for field in fields(default)]  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        if name not in known:
            raise ValueError(unknown(prefix + name, [prefix + other for other in known], "a field"))
        kind, where = hints[name], prefix + name
        if isinstance(kind, type) and is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where} is a group of fields, a [table], got {type(value).__name__} {value!r}")
            values[name] = from_table(getattr(default, name), value, f"{where}.")
        else:
            values[name] = _converted(value, kind, where)
    try:
        return replace(default, **values)  # type: ignore[type-var]
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
