"""Saves a model that is spread over ranks as one Hugging Face checkpoint.

Ranks agree who writes which tensor; each writes its own files, tensor by tensor, and then rank 0 the index. A directory
without an index is not a checkpoint, so one that was cut off is not loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treadle.models.build_stages import build_stages
from treadle.models.checkpoint_files import CONFIG, INDEX
from treadle.models.model_config import ModelConfig
from treadle.models.tensor_names import views_of_stages
from treadle.models.views import NamedView

MAX_SHARD_BYTES = 4 * 1024**3

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""The names of types in safetensors."""

Sizes: TypeAlias = Mapping[str, int]
"""The bytes of each tensor by its name."""


@dataclass(frozen=True)
class Part:
    """A tensor that is saved under a name and in a type."""

    name: str
    tensor: Tensor
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes in a file."""
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Shards:
    """The files of a checkpoint: `files[name]` are the tensors in it, `writer[name]` the rank that writes it."""

    files: dict[str, list[str]]
    writer: dict[str, int]


def save_pretrained(
    stages: Mapping[int, nn.Module],
    config: ModelConfig,
    directory: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model so that transformers loads it. All ranks of the group call it; the directory is one for all.

    Args:
        stages: this rank's modules of `build_stages`.
        config: the model's shape, written as `config.json`.
        directory: is made if it is not there. Safetensors that are there and not of this checkpoint are removed.
        group: the ranks that hold the model together; None: all ranks, or this process alone without torch.distributed.
        dtype: what parameters are converted to; None: they stay as they are.
        max_shard_bytes: the most a file has, unless one tensor alone is more.

    Raises:
        ValueError: the ranks together do not hold the whole model.

    """
    directory = Path(directory)
    parts = {view.name: _part(view, dtype) for view in views_of_stages(stages)}
    rank, sizes = _gather({name: part.size_bytes for name, part in parts.items()}, group)
    _refuse_incomplete(config, sizes)
    shards = plan_shards(sizes, max_shard_bytes)
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / INDEX).unlink(missing_ok=True)
    _meet(group)
    for file, names in shards.files.items():
        if shards.writer[file] == rank:
            write_safetensors(directory / file, [parts[name] for name in names])
    _meet(group)
    if rank == 0:
        _finish(directory, config, shards, {name: size for of_rank in sizes for name, size in of_rank.items()})
    _meet(group)


def plan_shards(sizes: Sequence[Sizes], max_shard_bytes: int = MAX_SHARD_BYTES) -> Shards:
    """Decide who writes which tensor into which file.

    Args:
        sizes: for each rank the tensors that it holds.
        max_shard_bytes: the most a file has, unless one tensor alone is more.

    Returns:
        Each tensor in one file, written by the one of its holders that has least to write so far.

    Example:
        >>> plan_shards([{"a": 4, "b": 4}, {"a": 4}]).files
        {'model-00001-of-00002.safetensors': ['b'], 'model-00002-of-00002.safetensors': ['a']}

    """
    holders: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(sizes):
        for name in of_rank:
            holders.setdefault(name, []).append(rank)
    written = [0] * len(sizes)
    mine: list[list[str]] = [[] for _ in sizes]
    for name in sorted(holders, key=lambda name: len(holders[name])):
        rank = min(holders[name], key=lambda rank: written[rank])
        written[rank] += sizes[rank][name]
        mine[rank].append(name)
    cut = [(rank, names) for rank, own in enumerate(mine) for names in _cut(own, sizes[rank], max_shard_bytes)]
    named = {f"model-{at:05}-of-{len(cut):05}.safetensors": part for at, part in enumerate(cut, start=1)}
    return Shards(
        {file: names for file, (_, names) in named.items()}, {file: rank for file, (rank, _) in named.items()}
    )


def _cut(names: Iterable[str], sizes: Sizes, most: int) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for name in names:
        if part and size + sizes[name] > most:
            yield part
            part, size = [], 0
        part.append(name)
        size += sizes[name]
    if part:
        yield part


def write_safetensors(path: Path, parts: Sequence[Part]) -> None:
    """Write a safetensors file with one tensor at a time in the host's memory.

    The form: the length of a JSON header, the header (type, shape and place of each tensor), the tensors' bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        begin, end = end, end + part.size_bytes
        shape = list(part.tensor.shape)
        header[part.name] = {"dtype": DTYPES[part.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            saved = part.tensor.to("cpu", part.dtype).contiguous()
            file.write(saved.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _part(view: NamedView, dtype: torch.dtype | None) -> Part:
    """Return what is saved of a view. Buffers keep their type: a router's bias has to stay float32."""
    given = dtype if isinstance(view.tensor, nn.Parameter) else None
    return Part(view.name, view.of(view.tensor.detach()), given if given is not None else view.tensor.dtype)


def _refuse_incomplete(config: ModelConfig, sizes: Sequence[Sizes]) -> None:
    whole = build_stages(config, (config.blocks,), {0: 0}, device="meta")
    held = {name for of_rank in sizes for name in of_rank}
    missing = [view.name for view in views_of_stages(whole) if view.name not in held]
    if missing:
        raise ValueError(
            f"the ranks together lack {len(missing)} tensors of the model, the first {missing[0]}; all ranks that hold "
            "a part of it save it together, with the config it was built from"
        )


def _finish(directory: Path, config: ModelConfig, shards: Shards, sizes: Sizes) -> None:
    """Write the config and, all at once, the index; remove safetensors that are not of this checkpoint."""
    for stale in directory.glob("model*.safetensors"):
        if stale.name not in shards.files:
            stale.unlink()
    (directory / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    weight_map = {name: file for file, names in shards.files.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    part = directory / f"{INDEX}.part"
    part.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    part.replace(directory / INDEX)


def _gather(mine: Sizes, group: dist.ProcessGroup | None) -> tuple[int, list[Sizes]]:
    """Return this rank's number in the group, and what each rank holds."""
    if not dist.is_initialized():
        return 0, [mine]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return dist.get_rank(group), every


def _meet(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group)
