"""Layouts: who holds which boxes, by rules on tensors' names. DTensor's placements as plain data, and what is usual.

A mesh has dimensions; along each a tensor is cut (`Shard`), held by all (`Replicate`), or held by one place (`Owner`:
a pipeline stage's layers, an expert's rank). Ranks are numbered with the last dimension running fastest.

    have = from_mesh(tensors, (2, 4), lambda name: (Replicate(), Shard(0)))        # HSDP: 2 replicas, 4 shards
    want = tensor_parallel(tensors, 4, {"q_proj": 0, "o_proj": 1}.get)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from treadle.weights.collecting import uncollected
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor


@dataclass(frozen=True)
class Shard:
    """Cut along a dimension of the tensor, as torch does: chunks of the rounded-up length, the last short or empty."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Held by every place along the mesh dimension."""


@dataclass(frozen=True)
class Owner:
    """Held by one place along the mesh dimension."""

    place: int


Placements = Sequence[Shard | Replicate | Owner]
Rule = Callable[[str], Placements]
REPLICATE = Replicate()


def from_mesh(
    tensors: Iterable[Tensor], mesh: Sequence[int], rule: Rule, *, order: Sequence[int] | None = None
) -> Holding:
    """Lay tensors out over the ranks of a mesh. `rule(name)` gives a placement for each mesh dimension.

    Where two dimensions cut the same dimension of a tensor, the left one cuts first, as in DTensor; `order` names the
    mesh dimensions in another order, as FSDP2 over tensor parallelism has it ((1, 0) on a mesh of (dp, tp)).
    """
    with uncollected():
        return _from_mesh({tensor.name: tensor for tensor in tensors}, mesh, rule, order)


def _from_mesh(described: dict[str, Tensor], mesh: Sequence[int], rule: Rule, order: Sequence[int] | None) -> Holding:
    placements = {name: _checked(tensor, mesh, rule(name)) for name, tensor in described.items()}
    # Ranks that differ only along dimensions that replicate everything hold the same, and share one tuple.
    varying = [any(type(p[d]) is not Replicate for p in placements.values()) for d in range(len(mesh))]
    classes: dict[tuple[int, ...], list[Piece]] = {
        place: [] for place in product(*(range(n) if varies else (0,) for n, varies in zip(mesh, varying, strict=True)))
    }
    cutting = tuple(order) if order is not None else tuple(range(len(mesh)))
    known: dict[tuple[tuple[int, ...], Placements], list[tuple[tuple[int, ...], Box]]] = {}
    for name, tensor in described.items():
        key = (tensor.shape, placements[name])
        if key not in known:
            known[key] = _boxes(tensor.shape, placements[name], mesh, varying, cutting)
        for place, box in known[key]:
            classes[place].append(Piece(name, box))
    shared = {place: tuple(pieces) for place, pieces in classes.items()}
    ranks = product(*(range(n) for n in mesh))
    return Holding(
        described, tuple(shared[tuple(i if t else 0 for i, t in zip(r, varying, strict=True))] for r in ranks)
    )


def replicated(tensors: Iterable[Tensor], num_ranks: int) -> Holding:
    """All of it on every rank."""
    return from_mesh(tensors, (num_ranks,), lambda name: (REPLICATE,))


def sharded(tensors: Iterable[Tensor], num_ranks: int) -> Holding:
    """Each tensor cut along its first dimension over all ranks, as FSDP does; a scalar is on every rank."""
    described = {tensor.name: tensor for tensor in tensors}
    return from_mesh(described.values(), (num_ranks,), lambda name: (Shard(0) if described[name].shape else REPLICATE,))


def tensor_parallel(tensors: Iterable[Tensor], num_ranks: int, dim: Callable[[str], int | None]) -> Holding:
    """Each tensor cut along the dimension that its name gives; None: on every rank."""
    return from_mesh(tensors, (num_ranks,), lambda name: (_cut(dim(name)),))


def owned(tensors: Iterable[Tensor], num_ranks: int, owner: Callable[[str], int | None]) -> Holding:
    """Each tensor on one rank: a pipeline stage's, an expert's; None: on every rank."""
    return from_mesh(tensors, (num_ranks,), lambda name: (_at(owner(name)),))


def spread(tensors: Iterable[Tensor], num_ranks: int) -> Holding:
    """Each tensor whole on one rank, with its family, bytes about even: how a checkpoint is read by many."""
    described = {tensor.name: tensor for tensor in tensors}
    total = sum(tensor.size_bytes for tensor in described.values())
    owner: dict[str, int] = {}
    of_family: dict[str, int] = {}
    before = 0
    for name, tensor in described.items():
        turn = min(num_ranks - 1, before * num_ranks // max(1, total))
        owner[name] = of_family.setdefault(tensor.family, turn) if tensor.family else turn
        before += tensor.size_bytes
    return owned(described.values(), num_ranks, owner.__getitem__)


@dataclass(frozen=True)
class Parallel:
    """Pipeline, expert and tensor parallelism of one model, with `replicas` of all of it.

    `stage`, `expert` and `dim` say for a name which stage has it, which place along `ep`, and which dimension is cut
    over `tp`; None: every one, every one, none. Ranks are numbered replica, pp, ep, tp, the last running fastest.
    """

    pp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1
    stage: Callable[[str], int | None] = lambda name: None
    expert: Callable[[str], int | None] = lambda name: None
    dim: Callable[[str], int | None] = lambda name: None

    def holding(self, tensors: Iterable[Tensor]) -> Holding:
        """Return the boxes that each rank holds."""
        mesh = (self.replicas, self.pp, self.ep, self.tp)
        return from_mesh(
            tensors, mesh, lambda name: (REPLICATE, _at(self.stage(name)), _at(self.expert(name)), _cut(self.dim(name)))
        )


def _cut(dim: int | None) -> Shard | Replicate:
    return REPLICATE if dim is None else Shard(dim)


def _at(place: int | None) -> Owner | Replicate:
    return REPLICATE if place is None else Owner(place)


def _checked(tensor: Tensor, mesh: Sequence[int], placements: Placements) -> tuple[Shard | Replicate | Owner, ...]:
    if len(placements) != len(mesh) or prod(mesh) < 1:
        raise ValueError(f"{tensor.name}: a mesh of {tuple(mesh)} takes a placement a dimension, got {placements}")
    for placement, num in zip(placements, mesh, strict=True):
        if isinstance(placement, Shard) and not 0 <= placement.dim < len(tensor.shape):
            raise ValueError(f"{tensor.name} has shape {tensor.shape}, which has no dimension {placement.dim} to cut")
        if isinstance(placement, Owner) and not 0 <= placement.place < num:
            raise ValueError(f"{tensor.name} is owned by place {placement.place} of {num}; places go from 0")
    return tuple(placements)


def _boxes(
    shape: tuple[int, ...], placements: Placements, mesh: Sequence[int], varying: Sequence[bool], order: Sequence[int]
) -> list[tuple[tuple[int, ...], Box]]:
    """The box of each class of ranks that holds any of such a tensor."""
    found = []
    for place in product(*(_places(p, n, t) for p, n, t in zip(placements, mesh, varying, strict=True))):
        start, stop = [0] * len(shape), list(shape)
        for d in order:
            placement = placements[d]
            if isinstance(placement, Shard):
                cut = placement.dim
                step = -(-(stop[cut] - start[cut]) // mesh[d])
                low = min(stop[cut], start[cut] + step * place[d])
                start[cut], stop[cut] = low, min(stop[cut], low + step)
        box = Box(tuple(start), tuple(stop))
        if box.num_elements:
            found.append((place, box))
    return found


def _places(placement: Shard | Replicate | Owner, num: int, varies: bool) -> Sequence[int]:
    if isinstance(placement, Owner):
        return (placement.place,)
    return range(num) if varies else (0,)
