"""vLLM's `WeightSource` as Treadle's: metadata and placements become pieces.

vLLM 0.33 has `metadata` with owners and placements, `iter_local` and `iter_full`; 0.32 has `metadata()` and an iterator
of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from treadle.update.rank.source import Source, dtype_name
from treadle.update.rank.staged_share import staged_share
from treadle.weights.layouts import REPLICATE, Shard, from_mesh
from treadle.weights.tensor_boxes import Piece, Tensor


def source_of(source: Any, rank: int, num_ranks: int) -> Source:
    """Return what a trainer's rank has of a vLLM source. Every rank calls it: a source may gather as it iterates.

    Pieces of `iter_local` are sent from the trainer's own memory. Of whole tensors each rank keeps its share.
    """
    if not hasattr(source, "iter_local"):  # vLLM 0.32
        return staged_share(_held(source), rank, num_ranks)
    metas = {meta.name: meta for meta in source.metadata}
    keepers = _keepers(source.metadata, num_ranks)
    if not source.implements_iter_local():
        own = ((name, tensor) for name, tensor in source.iter_full() if keepers[name] == rank)
        return staged_share(own, 0, 1)
    held: dict[Piece, torch.Tensor] = {}
    for name, yielded in source.iter_local():
        meta, local = metas[name], yielded.detach()
        if meta.owners is not None and meta.placements is None and keepers[name] != rank:
            continue  # whole on each of its owners, and perhaps gathered for this round
        piece = _piece(meta, rank)
        if dtype_name(local) != dtype_name(meta) or (piece is not None and tuple(local.shape) != piece.box.shape):
            raise ValueError(
                f"the source yields {name} as {tuple(local.shape)} of {dtype_name(local)} on rank {rank}, and its "
                f"metadata has {piece.box.shape if piece is not None else 'nothing'} of {dtype_name(meta)}"
            )
        if piece is not None:
            held[piece] = local
    return Source({name: _tensor(metas[name]) for name in {piece.tensor for piece in held}}, held)


def _held(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of a source of 0.32."""
    if source.held_names() is not None:
        raise ValueError(
            "a source that is split by held_names() cannot be sent by shares; use vLLM 0.33, whose metadata has owners"
        )
    weights: Iterator[tuple[str, torch.Tensor]] = iter(source)
    return weights


def _keepers(metas: Sequence[Any], num_ranks: int) -> dict[str, int]:
    """Which of its owners sends each tensor that they have whole: the one with the fewest bytes by then."""
    bytes_of = [0] * num_ranks
    keepers: dict[str, int] = {}
    for meta in metas:
        owners = meta.owners if meta.owners is not None else range(num_ranks)
        keepers[meta.name] = keeper = min(owners, key=bytes_of.__getitem__)
        bytes_of[keeper] += _tensor(meta).size_bytes
    return keepers


def _tensor(meta: Any) -> Tensor:
    return Tensor(meta.name, tuple(meta.shape), dtype_name(meta))


def _piece(meta: Any, rank: int) -> Piece | None:
    """The piece that a rank has of a tensor; None where an uneven shard has no elements here."""
    tensor = _tensor(meta)
    at, shape = rank, (rank + 1,)
    rules: tuple[Any, ...] = (REPLICATE,)
    if meta.owners is not None:
        if rank not in meta.owners:
            raise ValueError(f"the source yields {meta.name} on rank {rank}, and its owners are {meta.owners}")
        at, shape = meta.owners.index(rank), meta.mesh_shape
        rules = tuple(_rule(each) for each in meta.placements or ()) or (REPLICATE,) * len(shape)
    pieces = from_mesh([tensor], shape, lambda name: rules).pieces[at]
    return pieces[0] if pieces else None


def _rule(placement: Any) -> Any:
    dim = getattr(placement, "dim", None)
    return Shard(dim) if dim is not None else REPLICATE
