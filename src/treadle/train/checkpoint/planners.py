"""Plans of torch.distributed.checkpoint for a `State`: which part of which tensor is written and read.

Only documented classes of torch are used: planners may be subclassed, and write and read items are plain records.
torch gets the parts as one value (`wrapped`): it would log each of them, which takes longer than to copy them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.staging import AsyncStager

from treadle.train.checkpoint.tensor_parts import LeavingPart, State, TensorPart

_PARTS = "parts"


def wrapped(parts: State) -> dict[str, Any]:
    """Return what torch's functions take for these parts."""
    return {_PARTS: parts}


class PartSavePlanner(DefaultSavePlanner):
    """Writes each part once: of ranks that have the same part, the one with the fewest bytes writes it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take the parts to write, in the thread that writes: a device may still copy them."""
        parts = state_dict[_PARTS]
        self.state_dict = {
            name: part.arrived() if isinstance(part, LeavingPart) else part for name, part in parts.items()
        }
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan to write all parts of this rank."""
        self.plan = SavePlan([_write_item(name, part) for name, part in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that is written."""
        return _tensor(self.state_dict, index)


Held: TypeAlias = tuple[str, tuple[int, ...], int]
"""A part that a rank holds: name, offset and bytes."""


def shared_out(held: Sequence[Sequence[Held]]) -> list[set[str]]:
    """Return the names of the parts that each rank writes: each once, by the holder with the fewest bytes so far."""
    holders: dict[Held, list[int]] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    names: list[set[str]] = [set() for _ in held]
    num_bytes = [0] * len(held)
    for part in sorted(holders, key=lambda part: (len(holders[part]) > 1, -part[2], part)):
        writer = min(holders[part], key=lambda rank: (num_bytes[rank], rank))
        names[writer].add(part[0])
        num_bytes[writer] += part[2]
    return names


class PartLoadPlanner(DefaultLoadPlanner):
    """Reads into each part of this rank, out of whatever parts the checkpoint has."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        """Take the parts to fill."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict[_PARTS], metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan to read each part."""
        assert self.metadata is not None, "it is set up"
        items = []
        for name, part in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), "names were checked"
            items += create_read_items_for_chunk_list(name, saved, [_chunk(part)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that is filled."""
        return _tensor(self.state_dict, index)


class PartCopies(AsyncStager):
    """Copies parts as an asynchronous save begins, so that training continues at once.

    A device copies into pinned memory, in the order of its launches; the thread that writes waits for that.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return copies in host memory, or on their way there."""
        return wrapped({name: part.leaving() for name, part in state_dict[_PARTS].items()})

    def synchronize_staging(self) -> None:
        """Do nothing: copies are made, or launched, when `stage` returns."""

    def close(self) -> None:
        """Do nothing: nothing is kept."""


def _tensor(state: dict[str, Any], index: MetadataIndex) -> Tensor:
    part: TensorPart = state[index.fqn]
    return part.tensor.detach()


def _chunk(part: TensorPart) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=part.tensor.shape)


def _write_item(name: str, part: TensorPart) -> WriteItem:
    whole = part.tensor.shape == part.shape
    return WriteItem(
        index=MetadataIndex(name, torch.Size(part.offset)),
        type=WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(part),
            properties=TensorProperties.create_from_tensor(part.tensor),
            size=torch.Size(part.shape),
        ),
    )
