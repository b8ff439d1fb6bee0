"""Ties: parameters that several stages share, such as the embedding's table and the head's weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Tie:
    """A parameter of several stages, as this rank has it.

    `params` are this rank's own objects of it, each once: one where a module is shared or one stage of the tie is here,
    several where stages of this rank have a copy each, none where all stages of the tie are on other ranks.
    """

    name: str
    stages: tuple[int, ...]
    params: tuple[nn.Parameter, ...]
