"""Which tensors of the model a rank trains, under which names, and which other ranks have the same.

Ranks that hold a tensor divide its optimizer state. They are the replicas of a stage (its copies at both ends of
dualpipe's pipes, too), for experts the ranks with the same experts, for a tied parameter all ranks that have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from treadle.dist.groups import Group
from treadle.models.views import NamedView
from treadle.runtime import Pipeline
from treadle.runtime.agreement import Claim

_TIED = -1
_Views: TypeAlias = dict[Tensor, list[NamedView]]
_TieNames: TypeAlias = dict[str, tuple[int, list[str]]]


@dataclass(frozen=True)
class TensorFamily:
    """Tensors of one type that the same ranks train, of a stage or a tie, from the last block to the first, by name.

    Without a group they are this rank's alone.
    """

    kind: str
    """What it is, the same on all of them."""

    chunk: int | None
    """Their gradients are reduced with this chunk, or with the tie."""

    tie: int | None
    is_shared: bool
    """Several chunks read them."""

    group: Group | None
    dtype: torch.dtype
    views: tuple[NamedView, ...]
    blocks: tuple[int, ...]
    """For each view its block in the stage."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks that divide them."""
        return len(self.group.ranks) if self.group is not None else 1

    @property
    def number(self) -> int:
        """The number of this rank among them."""
        return self.group.group_rank if self.group is not None else 0

    def cut(self, firsts: Sequence[int]) -> Iterator[list[NamedView]]:
        """Yield the views of each bucket: of blocks from its first on, those of the bucket before it excepted."""
        for first, end in zip(firsts, (math.inf, *firsts), strict=False):
            yield [view for view, block in zip(self.views, self.blocks, strict=True) if first <= block < end]


@dataclass(frozen=True)
class Holdings:
    """A rank's tensors. Families are in one order on all ranks, so that waiting for each in turn cannot deadlock."""

    views: tuple[NamedView, ...]
    """All tensors, also those that do not train. A tied parameter is there once, by its name in the lowest stage."""

    families: tuple[TensorFamily, ...]
    copies: tuple[tuple[nn.Parameter, nn.Parameter], ...]
    """(a tied parameter, another object of it on this rank)."""

    def objects_of(self, param: nn.Parameter) -> tuple[nn.Parameter, ...]:
        """Return a parameter, and the other objects of it on this rank if it is tied."""
        return (param, *(copy for first, copy in self.copies if first is param))

    @classmethod
    def of(cls, pipe: Pipeline, views: Sequence[NamedView]) -> Holdings:
        """Find a rank's tensors. All ranks of the pipeline call it.

        Raises:
            ValueError: on all ranks, if one has a parameter without a name, or replicas name theirs differently.

        """
        named, reason = _by_tensor(views), _foreign(pipe, views)
        told = pipe.agree(problem=reason, told=_names_of_ties(pipe, named) if reason is None else None)
        copies = _name_ties(pipe, named, [names for of_replicas in told for names in of_replicas])
        found = tuple(view for of_tensor in named.values() for view in of_tensor)
        others = {copy for _, copy in copies}
        problem = _twice(found) or _uncovered(pipe, named, others)
        families = tuple(_families(pipe, named, others)) if problem is None else ()
        pipe.agree(list(_claims(families)), problem)
        return cls(found, families, tuple(copies))


def _by_tensor(views: Iterable[NamedView]) -> _Views:
    """Return the views of each tensor in the order of its elements. Of several names for the same, the first counts."""
    named: _Views = {}
    for view in views:
        of_tensor = named.setdefault(view.tensor, [])
        if all(view.run != other.run for other in of_tensor):
            of_tensor.append(view)
    return {tensor: sorted(of_tensor, key=lambda view: view.run) for tensor, of_tensor in named.items()}


def _own(pipe: Pipeline) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield (stage, name, parameter) of this rank's modules."""
    for stage, module in pipe.modules.items():
        for name, param in module.named_parameters():
            yield stage, name, param


def _foreign(pipe: Pipeline, views: Iterable[NamedView]) -> str | None:
    own = {tensor for module in pipe.modules.values() for tensor in (*module.parameters(), *module.buffers())}
    for view in views:
        if view.tensor not in own:
            return (
                f"the view {view.name} is of a tensor that no stage of this rank has; make views of the modules that "
                "the Pipeline was made with"
            )
    return None


def _names_of_ties(pipe: Pipeline, named: _Views) -> _TieNames:
    """Return for each tied parameter of this rank its lowest stage, and its names there."""
    stages = {param: stage for stage, _, param in reversed(list(_own(pipe)))} if pipe.ties else {}
    return {
        tie.name: min((stages[param], [view.name for view in named[param]]) for param in tie.params if param in named)
        for tie in pipe.ties
        if any(param in named for param in tie.params)
    }


def _name_ties(pipe: Pipeline, named: _Views, told: Iterable[_TieNames]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Give each tied parameter its name in the lowest stage that names it; return (one object of it, another)."""
    known: dict[str, list[tuple[int, list[str]]]] = {}
    for name, (stage, names) in (item for row in told for item in row.items()):
        known.setdefault(name, []).append((stage, names))
    copies: list[tuple[nn.Parameter, nn.Parameter]] = []
    for tie in pipe.ties:
        if tie.name in known and tie.params:
            first, *others = tie.params
            _rename(named, first, others, min(known[tie.name])[1])
            copies += [(first, other) for other in others]
    return copies


def _rename(named: _Views, first: nn.Parameter, others: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Leave one object of a tied parameter in `named`, under these names."""
    found = next((named[param] for param in (first, *others) if len(named.get(param, ())) == len(names)), None)
    if found is None:
        found = [NamedView(names[0], first)]
    for other in others:
        named.pop(other, None)
    named[first] = [replace(view, name=name, tensor=first) for view, name in zip(found, names, strict=True)]


def _twice(views: Iterable[NamedView]) -> str | None:
    seen: set[str] = set()
    for view in views:
        if view.name in seen:
            return f"two tensors of this rank have the name {view.name}; a name is one tensor of the model"
        seen.add(view.name)
    return None


def _uncovered(pipe: Pipeline, named: _Views, copies: set[nn.Parameter]) -> str | None:
    """Return why a parameter that trains cannot be saved: its views leave elements out, or it is not contiguous."""
    for stage, name, param in _own(pipe):
        if not param.requires_grad or param in copies:
            continue
        if not param.is_contiguous():
            return f"parameter {name} of stage {stage} is not contiguous; make it so, by param.data.contiguous()"
        ends = [(0, 0), *(view.run for view in named.get(param, ())), (param.numel(), param.numel())]
        if any(before[1] != after[0] for before, after in pairwise(ends)):
            return (
                f"parameter {name} of stage {stage} trains, and its views ("
                f"{', '.join(view.name for view in named.get(param, ())) or 'none'}) do not have each of its "
                f"{param.numel()} elements once; give views of all of it, or freeze it"
            )
    return None


def _families(pipe: Pipeline, named: _Views, copies: set[nn.Parameter]) -> Iterator[TensorFamily]:
    """Yield families: by replicas and by the ranks with the same experts, stage by stage, and tie by tie."""
    found: dict[tuple[int, int, bool, str], list[nn.Parameter]] = {}
    holders = pipe.held_parameters()
    for param, held in holders.items():
        if param not in copies:
            stage, kind = (_TIED, held.tie) if held.tie is not None else (held.stage, int(held.is_expert))
            found.setdefault((stage, kind, held.is_shared, str(param.dtype)), []).append(param)
    for (stage, kind, is_shared, dtype), params in sorted(found.items()):
        views = [(-holders[param].block, view.name, view) for param in params for view in named[param]]
        views.sort(key=lambda each: each[:2])
        held = holders[params[0]]
        yield TensorFamily(
            kind=f"{stage} {kind} {is_shared} {dtype}",
            chunk=held.chunk if held.tie is None else None,
            tie=held.tie,
            is_shared=is_shared,
            group=held.group,
            dtype=params[0].dtype,
            views=tuple(view for *_, view in views),
            blocks=tuple(-block for block, *_ in views),
        )


def _claims(families: Iterable[TensorFamily]) -> Iterator[Claim]:
    """Yield what ranks that divide a family must have the same: its tensors' names and shapes, in their order."""
    for family in families:
        if family.group is not None:
            views = [f"{view.name} {tuple(view.of(view.tensor).shape)}" for view in family.views]
            yield Claim(
                f"{family.kind} of {family.group.ranks}",
                {"the names and shapes of tensors that they divide": ", ".join(views)},
                "{}; give views that name and cut parameters alike",
            )
