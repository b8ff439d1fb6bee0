"""Ties: parameters that several stages share, such as the embedding's table and the head's weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Tie:
    """A parameter of several stages, as this rank has it.

    `params` are this rank's own objects of it, each once: one where a module is shared or one stage of the tie is here,
    several where stages of this rank have a copy each, none where all stages of the tie are on other ranks. `number` is
    that of its reduction in the Program; ties that the same ranks hold are reduced together.
    """

    name: str
    stages: tuple[int, ...]
    params: tuple[nn.Parameter, ...]
    number: int


def stages_of_reductions(ties: Iterable[Tie]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each reduction of ties, by its number."""
    stages: dict[int, set[int]] = {}
    for tie in ties:
        stages.setdefault(tie.number, set()).update(tie.stages)
    return tuple(tuple(sorted(stages[number])) for number in sorted(stages))
