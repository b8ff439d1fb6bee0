"""The weights of a checkpoint as a source of a weight update, without the run that saved it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from treadle.fields.plain_pickle import UnreadablePickleError
from treadle.train.checkpoint import on_disk
from treadle.train.checkpoint.metadata_reader import CheckpointReader
from treadle.train.checkpoint.on_disk import DamagedError
from treadle.train.checkpoint.planners import PartLoadPlanner, wrapped
from treadle.train.checkpoint.tensor_parts import TensorPart
from treadle.train.optim.sharded import PREFIX
from treadle.update import Source
from treadle.weights.layouts import spread
from treadle.weights.tensor_boxes import Tensor


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's directory; None where it is none of a `Checkpointer`."""
    match = re.fullmatch(r"step-(\d{8,})", path.name)
    saved = any((path / name).exists() for name in (on_disk.MANIFEST, on_disk.METADATA))
    return int(match[1]) if match is not None and saved else None


def damage(path: Path) -> str | None:
    """Return what is damaged in a checkpoint. Every file is read, and held to the digest taken when it was written."""
    step = step_of(path)
    try:
        if step is None:
            raise DamagedError(f"{on_disk.MANIFEST} is not there")
        manifest = on_disk.read_manifest(path.parent, step)
        on_disk.check_files(path.parent, manifest, sorted(manifest.files))
    except DamagedError as error:
        return str(error)
    return None


def read_weights(path: Path, rank: int, world: int) -> Source:
    """Return one rank's part of a checkpoint's parameters: whole tensors, about as many bytes on every rank.

    Raises:
        ValueError: It cannot be read.

    """
    try:
        reader = CheckpointReader(path)
        saved = reader.read_metadata().state_dict_metadata
        forms = {
            name: each
            for name, each in saved.items()
            if isinstance(each, TensorStorageMetadata) and not name.startswith(PREFIX)
        }
        tensors = {
            name: Tensor(name, tuple(each.size), str(each.properties.dtype).removeprefix("torch."))
            for name, each in forms.items()
        }
        own = spread(tensors.values(), world).pieces[rank]
        parts = {
            piece: TensorPart.whole(torch.empty(piece.box.shape, dtype=forms[piece.tensor].properties.dtype))
            for piece in own
        }
        named = {piece.tensor: part for piece, part in parts.items()}
        load(wrapped(named), storage_reader=reader, planner=PartLoadPlanner(), no_dist=True)
    except UnreadablePickleError as error:
        raise ValueError(f"the checkpoint {path} is not read: its {on_disk.METADATA} is refused: {error}") from error
    except (OSError, CheckpointException) as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {' '.join(str(error).split())}") from error
    return Source(tensors, {piece: part.tensor for piece, part in parts.items()})
