"""The settings of a run as facts: what all ranks must have the same, and what a resumed run may change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from treadle.train.run_config import TrainConfig

CORPUS = "the text and its tokens"
TOKENS = "the files of data.cache"
WEIGHTS = "the weights to start from"
DEVICE = "the type of device"

OF_A_NODE = {
    "data.paths": f"the files may be elsewhere on another node; their content is compared ({CORPUS})",
    "data.tokenizer": f"so may its file; its content is compared ({CORPUS})",
    "data.cache": f"a directory for the ranks of a node; the content of its files is compared ({TOKENS})",
    "checkpoint.directory": "a shared directory may have another name on another node; loading compares what is there",
    "checkpoint.weights": f"so may this; samples of its content are compared ({WEIGHTS})",
    "output": "as checkpoint.directory",
    "costs": "a run does not read it, only a dry run does",
}
"""The fields of a configuration that may differ from node to node, and why."""

ORDER = ("training.seq_len", "training.seed", "data.held_out", CORPUS)
"""What the order and the content of samples depend on: a run that is resumed has to have the same."""

_UNSAID = ("logging.", "checkpoint.", "model.", "parallel.")
"""Groups of which a resumed run need not say what has changed: a model is compared in its own words, the layout is on
the line before, and the others change no number."""

_BLOCK_BYTES, _NUM_BLOCKS = 1 << 12, 64


def settings_of(config: TrainConfig) -> dict[str, str]:
    """Return all fields of a configuration that must be the same on all ranks, by name.

    Example:
        >>> settings_of(TrainConfig())["training.lr"]
        '0.0003'

    """
    return {name: repr(value) for name, value in _leaves(config) if name not in OF_A_NODE}


def _leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for each in fields(group):
        value, name = getattr(group, each.name), f"{prefix}{each.name}"
        if is_dataclass(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def digest_of_weights(directory: str) -> str:
    """Return a digest of samples of a directory's safetensors: names, sizes, the begin of each, and blocks of it.

    Two models of one shape differ in nearly all their elements, so samples show it. All of it would take minutes.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(directory).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(_BLOCK_BYTES, size // _NUM_BLOCKS)):
                file.seek(at)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:24]


def changed(settings: Mapping[str, str], saved: Mapping[str, str]) -> str | None:
    """Return what a resumed run has other than its checkpoint, in one line; None if nothing that matters.

    Raises:
        ValueError: the order or the content of its samples would be another; the message names the setting.

    """
    odd = [name for name in settings if name in saved and settings[name] != saved[name]]
    for name in (name for name in ORDER if name in odd):
        back = f"--{name} {saved[name]}, " if name != CORPUS else "the text that it was trained on, "
        raise ValueError(
            f"the checkpoint is of a run with {name} {saved[name]}, got {settings[name]}: samples would come twice or "
            f"never; give {back}another --output, or --checkpoint.no-resume"
        )
    said = [name for name in odd if not name.startswith(_UNSAID)]
    told = ", ".join(f"{name} {settings[name]} (was {saved[name]})" for name in said)
    return f"changed since the checkpoint: {told}" if said else None
