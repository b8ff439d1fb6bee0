"""The command line: `--config FILE`, and a flag for each field that replaces the file's value."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr

from treadle.fields.input_files import read_toml
from treadle.fields.nearest import did_you_mean
from treadle.train.checking import check_config
from treadle.train.config_reading import EMPTY, config_of, flag_names
from treadle.train.run_config import TrainConfig

PROGRAM = "python -m treadle.train"
_OTHER_FLAGS = ("--config", "--help", "-h")
_MEANT = {
    "learning_rate": "lr",
    "min_lr": "final_lr",
    "max_steps": "steps",
    "num_steps": "steps",
    "batch_size": "global_batch_size",
    "max_seq_len": "seq_len",
    "sequence_length": "seq_len",
    "max_norm": "clip_norm",
    "precision": "dtype",
}
"""Fields by other names that are typed for them."""
_EXAMPLES = {"--config": "configs/moe_tiny.toml", "--checkpoint.weights": "runs/default/model"}


def parse_command(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration that a command line asks for.

    Args:
        arguments: as `["--config", "configs/moe_tiny.toml", "--parallel.pp", "2"]`; flags replace the file's values.
            With `--checkpoint.weights DIR` the model is that of DIR/config.json.

    Raises:
        ValueError: the file or a flag is wrong; one line names it, and the nearest name.
        SystemExit: help was asked for and is printed.

    Example:
        >>> parse_command(["--parallel.pp", "2", "--training.steps=30"]).training.steps
        30

    """
    path, rest = _take(list(arguments), "--config")
    _check_flags(rest)
    weights, _ = _take(rest, "--checkpoint.weights")
    config = _parse(rest, config_of(read_toml(path) if path is not None else EMPTY, weights=weights))
    check_config(config)
    return config


def _take(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value that a flag has, and all other arguments."""
    value, rest = None, []
    left = iter(arguments)
    for argument in left:
        if argument == flag:
            value = next(left, None)
            if value is None:
                raise ValueError(f"{flag} needs a value: {flag} {_EXAMPLES[flag]}")
        elif argument.startswith(f"{flag}="):
            value = argument.removeprefix(f"{flag}=")
        else:
            rest.append(argument)
    return value, rest


def _check_flags(arguments: Sequence[str]) -> None:
    known = [f"--{name}" for name in flag_names()]
    switches = [re.sub(r"--(.*\.)?", r"--\1no-", name) for name in known]
    for argument in arguments:
        name = argument.partition("=")[0].replace("-", "_")
        allowed = {flag.replace("-", "_") for flag in (*known, *switches, *_OTHER_FLAGS)}
        if argument.startswith("--") and name not in allowed:
            flag = argument.partition("=")[0]
            group, dot, own = flag.rpartition(".")
            meant = f"{group}{dot}{_MEANT.get(own.replace('-', '_'), own)}"
            raise ValueError(f"{flag!r} is not an option; {did_you_mean(meant, [*known, *_OTHER_FLAGS])}")


def _parse(arguments: Sequence[str], base: TrainConfig) -> TrainConfig:
    import tyro

    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return tyro.cli(TrainConfig, default=base, args=list(arguments), prog=PROGRAM, use_underscores=True)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(_first_part(told.getvalue())) from None


def _first_part(box: str) -> str:
    """Return what tyro says in its box, without the box and what follows its first rule."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    rule = next((at for at, line in enumerate(lines) if set(line) <= {"─"}), len(lines))
    return " ".join(lines[:rule]) or box.strip()
