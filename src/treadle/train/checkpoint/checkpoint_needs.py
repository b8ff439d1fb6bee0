"""What a run needs of a checkpoint, against what the checkpoint has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from treadle.fields.nearest import nearest
from treadle.train.checkpoint.tensor_parts import TensorPart, form_of

_SHOWN = 3


def forms_in(metadata: Metadata) -> dict[str, str]:
    """Return the shape and type of each tensor of a checkpoint."""
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    return {
        name: form_of(tuple(each.size), each.properties.dtype)
        for name, each in saved.items()
        if isinstance(each, TensorStorageMetadata)
    }


def unmet(have: Mapping[str, str], need: Mapping[str, TensorPart]) -> str | None:
    """Return which tensors a rank needs and the checkpoint lacks, or has in another form."""
    missing = sorted(name for name in need if name not in have)
    if missing:
        near = nearest(missing[0], have)
        has = f"the nearest it has is {near}" if near is not None else f"it has {_listed(list(have)) or 'none'}"
        return f"it has no {_listed(missing)}; {has}"
    other = [f"{name} as {have[name]}, needed as {part.form}" for name, part in need.items() if have[name] != part.form]
    return f"it has {_listed(other)}" if other else None


def unneeded(have: Collection[str], need: Collection[str]) -> str | None:
    """Return which tensors a checkpoint has and no rank needs: it is another model's."""
    left = sorted(set(have) - set(need))
    return f"it has {_listed(left)}, which no rank of this run has" if left else None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
