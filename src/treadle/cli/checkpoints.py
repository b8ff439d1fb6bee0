"""Checkpoints that a command takes: directories of safetensors files, and those that the trainer saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treadle.host.extras import brought_by

if TYPE_CHECKING:
    from treadle.update import Source


def read_source(path: Path, rank: int, world: int) -> Source:
    """Return one rank's part of a checkpoint."""
    if _is_saved(path):
        from treadle.train.checkpoint.saved_weights import read_weights

        return read_weights(path, rank, world)
    from treadle.update.rank.checkpoint import read_checkpoint

    return read_checkpoint(path, rank, world)


def fault_of(path: Path) -> str | None:
    """Return why a checkpoint cannot be loaded, or not yet; None if it is whole."""
    if _is_saved(path):
        from treadle.train.checkpoint.saved_weights import damage

        return damage(path)
    from treadle.update.rank.checkpoint import unfinished

    return unfinished(path)


def _is_saved(path: Path) -> bool:
    """Whether the trainer saved it, which is looked up where its name is that of a trainer's checkpoint."""
    if not path.name.startswith("step-"):
        return False
    with brought_by("train", "update", needed_by="reading a trainer's checkpoint"):
        from treadle.train.checkpoint.saved_weights import step_of
    return step_of(path) is not None
