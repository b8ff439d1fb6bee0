"""Reads a configuration from TOML: nested dataclasses, every name and value checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from treadle.fields.input_files import Toml, read_toml
from treadle.fields.kinds import joined
from treadle.fields.typed import kind_of
from treadle.models.model_config import ModelConfig
from treadle.train.run_config import CheckpointConfig, TrainConfig

T = TypeVar("T")

EMPTY = Toml("", {}, {})
"""No file: every field has its default."""


def read_config(path: str | Path) -> TrainConfig:
    """Return the configuration in a TOML file; what it does not name has its default (`config_of`).

    Raises:
        ValueError: no TOML, a name that is no field (the message has the nearest), or a value of another type.

    """
    return config_of(read_toml(path))


def config_of(file: Toml, *, weights: str | None = None) -> TrainConfig:
    """Return the configuration with the values of a file.

    What it does not name has its default; for the model that is the config.json of the directory of weights to start
    from.

    Args:
        file: a TOML file.
        weights: that directory, if it is not the file's `checkpoint.weights`.

    Raises:
        ValueError: a name that is no field (the message has the nearest), a value of another type, or there is no
            config.json that is read.

    """
    for path, message in kind_of(TrainConfig).wrong(file.table):
        raise ValueError(f"{file.at(*path)}: {joined(path)} {message}")
    try:
        default = TrainConfig()
        if weights is None:
            weights = file.table.get("checkpoint", {}).get("weights", CheckpointConfig.weights)
        if weights:
            default = replace(default, model=model_of(weights))
        return _replaced(default, file.table)
    except ValueError as error:
        raise ValueError(f"{file.source}: {error}" if file.source else str(error)) from None


def model_of(weights: str) -> ModelConfig:
    """Return the model of a directory of weights, from its config.json.

    Raises:
        ValueError: there is none, or it is of a model that is not here.

    """
    try:
        return ModelConfig.from_hf(weights)
    except ValueError as error:
        raise ValueError(f"checkpoint.weights {weights}: {error}") from None


def _replaced(default: T, table: Mapping[str, Any], group: str = "") -> T:
    """Return a dataclass with the values of a table that has been checked."""
    hints = get_type_hints(type(default))
    values = {
        name: _replaced(getattr(default, name), value, name)
        if is_dataclass(hints[name])
        else _converted(value, hints[name])
        for name, value in table.items()
    }
    try:
        return replace(default, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise ValueError(f"[{group}] {error}" if group else str(error)) from None


def _converted(value: Any, hint: Any) -> Any:
    """Return a value of TOML as the dataclass has it: a list is a tuple, a whole number may be a float."""
    return tuple(value) if isinstance(value, list) else float(value) if hint is float else value


def flag_names(cls: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Yield the names of all fields, `parallel.pp`, as the command line has them after `--`."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            yield from flag_names(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
