"""Layouts: DTensor's placements as data hold what torch itself cuts; usual parallelisms are what they are called."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.weights.layouts import (
    REPLICATE,
    Owner,
    Parallel,
    Replicate,
    Shard,
    from_mesh,
    owned,
    replicated,
    sharded,
    spread,
    tensor_parallel,
)
from treadle.weights.tensor_boxes import Box, Holding, Tensor


def cut_by_torch(
    whole: torch.Tensor, mesh: tuple[int, ...], placements: tuple[Shard | Replicate, ...], place: tuple[int, ...]
) -> torch.Tensor:
    """What a place of the mesh holds, by `torch.chunk`, which DTensor cuts with, one mesh dimension after another."""
    for num, placement, index in zip(mesh, placements, place, strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(num, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = chunks[index] if index < len(chunks) else empty
    return whole


@settings(max_examples=200)
@given(st.data())
def test_shards_are_those_of_torch(data: st.DataObject) -> None:
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    placements = tuple(
        data.draw(st.one_of(st.just(REPLICATE), st.integers(0, len(shape) - 1).map(Shard))) for _ in mesh
    )
    held = from_mesh([Tensor("t", shape, "int64")], mesh, lambda name: placements)
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    assert len(held.pieces) == int(np.prod(mesh))
    for rank, place in enumerate(product(*map(range, mesh))):
        wanted = cut_by_torch(whole, mesh, placements, place)
        if not held.pieces[rank]:
            assert wanted.numel() == 0
            continue
        (piece,) = held.pieces[rank]
        assert torch.equal(whole[piece.box.slices(Box.whole(shape))], wanted)


def test_the_last_shard_may_be_short_and_those_after_it_empty() -> None:
    held = from_mesh([Tensor("t", (5,), "float32")], (4,), lambda name: (Shard(0),))
    assert [[str(p.box) for p in pieces] for pieces in held.pieces] == [["[0:2]"], ["[2:4]"], ["[4:5]"], []]


def test_fsdp_over_tensor_parallelism_cuts_the_inner_dimension_first() -> None:
    """As torch's own strided shard says for a mesh of (dp, tp)."""
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    held = from_mesh([Tensor("t", (16, 3), "float32")], (2, 4), lambda name: (Shard(0), Shard(0)), order=(1, 0))
    for rank, place in enumerate(product(range(2), range(4))):
        theirs = (_StridedShard(0, split_factor=4), TorchShard(0))
        shape, offset = _compute_local_shape_and_global_offset((16, 3), (2, 4), list(place), theirs)
        (piece,) = held.pieces[rank]
        assert (piece.box.shape, piece.box.start) == (tuple(shape), tuple(offset))


def boxes(holding: Holding) -> list[dict[str, str]]:
    return [{piece.tensor: str(piece.box) for piece in pieces} for pieces in holding.pieces]


TENSORS = [Tensor("a", (4, 2), "float32"), Tensor("b", (6,), "bfloat16"), Tensor("c", (), "int64")]
WHOLE = {"a": "[0:4, 0:2]", "b": "[0:6]", "c": "[]"}


def test_usual_layouts() -> None:
    assert boxes(replicated(TENSORS, 2)) == [WHOLE, WHOLE]
    assert boxes(sharded(TENSORS, 2)) == [
        {"a": "[0:2, 0:2]", "b": "[0:3]", "c": "[]"},
        {"a": "[2:4, 0:2]", "b": "[3:6]", "c": "[]"},
    ]
    assert boxes(tensor_parallel(TENSORS, 2, {"a": 1, "b": 0}.get)) == [
        {"a": "[0:4, 0:1]", "b": "[0:3]", "c": "[]"},
        {"a": "[0:4, 1:2]", "b": "[3:6]", "c": "[]"},
    ]
    assert boxes(owned(TENSORS, 2, {"a": 1, "b": 0}.get)) == [
        {"b": "[0:6]", "c": "[]"},
        {"a": "[0:4, 0:2]", "c": "[]"},
    ]


def test_pipeline_expert_and_tensor_parallelism_together() -> None:
    tensors = [Tensor(f"{stage}.{expert}", (4,), "float32") for stage in range(2) for expert in (*range(2), "dense")]
    layout = Parallel(
        pp=2,
        ep=2,
        tp=2,
        replicas=2,
        stage=lambda name: int(name[0]),
        expert=lambda name: int(name[2:]) if name[2:] != "dense" else None,
        dim=lambda name: 0,
    )
    held = layout.holding(tensors)
    assert len(held.pieces) == 16
    assert held.pieces[:8] == held.pieces[8:]
    assert all(one is other for one, other in zip(held.pieces[:8], held.pieces[8:], strict=True))
    expected = [
        {f"{stage}.{expert}": half, f"{stage}.dense": half}
        for stage in range(2)
        for expert in range(2)
        for half in ("[0:2]", "[2:4]")
    ]
    assert boxes(held)[:8] == expected


def test_spreading_is_even_and_keeps_families() -> None:
    tensors = [Tensor(f"{i}{kind}", (64,), "uint8", str(i)) for i in range(12) for kind in ("w", "s")]
    held = spread(tensors, 5)
    sizes = [sum(64 for _ in pieces) for pieces in held.pieces]
    assert max(sizes) - min(sizes) <= 2 * 128
    owner = {piece.tensor: rank for rank, pieces in enumerate(held.pieces) for piece in pieces}
    assert all(owner[f"{i}w"] == owner[f"{i}s"] for i in range(12))
    assert len(owner) == 24


def test_impossible_placements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has shape \(4, 2\), which has no dimension 2 to cut"):
        tensor_parallel(TENSORS[:1], 2, lambda name: 2)
    with pytest.raises(ValueError, match="owned by place 3 of 2"):
        owned(TENSORS[:1], 2, lambda name: 3)
    with pytest.raises(ValueError, match=r"a mesh of \(2, 2\) takes a placement a dimension"):
        from_mesh(TENSORS, (2, 2), lambda name: (Owner(0),))
