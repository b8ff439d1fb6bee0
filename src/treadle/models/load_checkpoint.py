"""Loads a rank's part of a Hugging Face checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from treadle.fields.nearest import nearest
from treadle.models.checkpoint_files import files_of
from treadle.models.tensor_names import views
from treadle.models.views import NamedView


def load_pretrained(stages: Mapping[int, nn.Module], directory: str | Path) -> None:
    """Fill a rank's stages from safetensors. Opens only files that have tensors of these stages, reads only those.

    Numbers are converted to the type of the parameter. One tensor at a time is in memory beside the model.

    Args:
        stages: the modules of `build_stages`.
        directory: what `save_pretrained` of transformers, or this package's, has written.

    Raises:
        ValueError: a tensor is missing or has another shape; the message names it. Nothing was changed then.

    """
    wanted = [view for stage in stages.values() for view in views(stage)]
    files = files_of(directory)
    _refuse_missing(wanted, files, directory)
    of_file: dict[Path, list[NamedView]] = {}
    for view in wanted:
        of_file.setdefault(files[view.name], []).append(view)
    for file, parts in of_file.items():
        _check_shapes(file, parts)
    for file, parts in of_file.items():
        _read(file, parts)


@torch.no_grad()
def _read(file: Path, parts: Iterable[NamedView]) -> None:
    with safe_open(file, framework="pt") as tensors:
        for view in parts:
            view.of(view.tensor).copy_(tensors.get_tensor(view.name))


def _check_shapes(file: Path, parts: Iterable[NamedView]) -> None:
    """Refuse tensors of another shape. A slice has a shape before anything of it is read."""
    with safe_open(file, framework="pt") as tensors:
        present = set(tensors.keys())
        for view in parts:
            if view.name not in present:
                raise ValueError(f"{file} has no {view.name}, though the index says so; save the checkpoint again")
            got, expected = list(tensors.get_slice(view.name).get_shape()), list(view.of(view.tensor).shape)
            if got != expected:
                raise ValueError(
                    f"{view.name} is {expected} in this model, got {got} in {file}; build the model from the "
                    "checkpoint's own config (ModelConfig.from_hf)"
                )


def _refuse_missing(wanted: Iterable[NamedView], files: Collection[str], directory: str | Path) -> None:
    missing = [view.name for view in wanted if view.name not in files]
    if missing:
        near = nearest(missing[0], files)
        hint = f" (it has {near})" if near is not None else ""
        raise ValueError(
            f"{directory} lacks {len(missing)} tensors of this model, the first {missing[0]}{hint}; build the model "
            "from the checkpoint's own config (ModelConfig.from_hf)"
        )
