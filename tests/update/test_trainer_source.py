"""Sources of trainers that draw or yield weights: which pieces ranks send, and that together they have them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treadle.update import Source
from treadle.update.adapters.vllm.trainer_source import source_of
from treadle.update.rank.staged_share import staged_share
from treadle.weights.tensor_boxes import Tensor

WHOLE = {f"w{at}": torch.arange(35.0).reshape(7, 5) + 100 * at for at in range(6)}


def shard(dim: int) -> Any:
    return SimpleNamespace(dim=dim)


REPLICATE = SimpleNamespace()


@dataclass
class Yielding:
    """What vLLM 0.33 takes as a source, on one rank."""

    metadata: list[Any]
    rank: int
    local: bool = True

    def implements_iter_local(self) -> bool:
        return self.local

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata:
            if meta.owners is None or self.rank in meta.owners:
                yield meta.name, WHOLE[meta.name]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata:
            if meta.owners is None or self.rank in meta.owners:
                yield meta.name, self._piece(meta)

    def _piece(self, meta: Any) -> torch.Tensor:
        """Chunks as torch cuts them, the outer dimension of the mesh first."""
        piece = WHOLE[meta.name]
        if meta.placements is None:
            return piece
        place = torch.arange(len(meta.owners)).reshape(meta.mesh_shape)
        at = (place == meta.owners.index(self.rank)).nonzero()[0].tolist()
        for placement, index, size in zip(meta.placements, at, meta.mesh_shape, strict=True):
            if placement is not REPLICATE:
                chunks = piece.chunk(size, placement.dim)
                shape = list(piece.shape)
                shape[placement.dim] = 0
                piece = chunks[index] if index < len(chunks) else piece.new_empty(shape)
        return piece


def meta(name: str, owners: tuple[int, ...] | None = None, mesh: Any = None, placements: Any = None) -> Any:
    shape = tuple(WHOLE[name].shape)
    mesh = mesh if mesh is not None or owners is None else (len(owners),)
    fields = {"name": name, "dtype": torch.float32, "shape": shape}
    return SimpleNamespace(**fields, owners=owners, mesh_shape=mesh, placements=placements)


METAS = [
    meta("w0", (0, 1, 2, 3), (4,), (shard(0),)),  # 2, 2, 2, 1 rows
    meta("w1", (3, 1), (2,), (shard(1),)),
    meta("w2", (0, 1, 2, 3), (2, 2), (shard(0), shard(0))),  # the last one has nothing
    meta("w3", (2, 3), (2,)),  # whole on both
    meta("w4", (0, 1, 2, 3), (2, 2), (REPLICATE, shard(1))),
    meta("w5"),  # whole on all
]


def written(sources: list[Source]) -> dict[str, torch.Tensor]:
    """All tensors, put together from what ranks hold; how often an element is held is not looked at."""
    made = {name: torch.full_like(tensor, torch.nan) for name, tensor in WHOLE.items()}
    for source in sources:
        for piece, local in source.held.items():
            made[piece.tensor][tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))] = local
    return made


@pytest.mark.parametrize("local", [True, False])
def test_all_elements_are_where_the_placements_say(local: bool) -> None:
    sources = [source_of(Yielding(METAS, rank, local), rank, 4) for rank in range(4)]
    for name, tensor in written(sources).items():
        assert torch.equal(tensor, WHOLE[name]), name
    holders = {name: sum(name in source.tensors for source in sources) for name in WHOLE}
    if local:
        assert holders == {"w0": 4, "w1": 2, "w2": 4, "w3": 1, "w4": 4, "w5": 4}
        assert sources[0].held[next(iter(sources[0].held))].data_ptr() == WHOLE["w0"].data_ptr(), "not copied"
    else:
        assert set(holders.values()) == {1}
        assert {len(source.held) for source in sources} <= {1, 2}


def test_a_piece_that_is_not_as_declared_is_refused() -> None:
    class Wrong(Yielding):
        def _piece(self, meta: Any) -> torch.Tensor:
            return super()._piece(meta)[:1]

    with pytest.raises(ValueError, match=r"yields w0 as \(1, 5\) of float32 on rank 0, and its metadata has \(2, 5\)"):
        source_of(Wrong(METAS, 0), 0, 4)


@pytest.mark.parametrize("world", [1, 2, 5, 9])
def test_ranks_that_draw_in_step_keep_each_tensor_once(world: int) -> None:
    forms = {"w1": Tensor("w1", (7, 5), "bfloat16")}
    sources = [staged_share(WHOLE.items(), rank, world, forms) for rank in range(world)]
    held = [(piece.tensor, tensor) for source in sources for piece, tensor in source.held.items()]
    assert sorted(name for name, _ in held) == sorted(WHOLE)
    for name, tensor in held:
        assert torch.equal(tensor, WHOLE[name].to(torch.bfloat16 if name == "w1" else torch.float32))
        assert tensor.data_ptr() != WHOLE[name].data_ptr()
    assert max(len(source.held) for source in sources) == -(-len(WHOLE) // world)
