"""Says which rank, layer and parameter has NaN or infinity."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from treadle.host.errors import TreadleError
from treadle.models.views import NamedView
from treadle.train.probe import BadOutput, ForwardProbe, not_finite


class NonFiniteError(TreadleError, RuntimeError):
    """A loss or a gradient has NaN or infinity. The message names where it was found first."""


@dataclass(frozen=True)
class RankFindings:
    """What a rank has found: names of tensors in the whole model, and the first bad value of a forward."""

    rank: int
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    output: BadOutput | None


def examine(
    rank: int,
    views: Sequence[NamedView],
    gradients: Sequence[str],
    probe: ForwardProbe,
    forward: Callable[[], object],
) -> list[RankFindings]:
    """Return what all ranks find; every rank calls it.

    Args:
        rank: this one.
        views: this rank's parameters by their names in the whole model.
        gradients: the names of those whose gradients are not finite on this rank.
        probe: put on this rank's stages.
        forward: runs the batch of the step once more, without gradients.

    """
    parameters = tuple(view.name for view in views if not_finite(view.of(view.tensor.detach())))
    own = RankFindings(rank, parameters, tuple(gradients), probe.first(forward))
    everything: list[RankFindings | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, own)
    return [found for found in everything if found is not None]


def describe(step: int, loss: float, found: Sequence[RankFindings]) -> str:
    """Return one line: the first bad parameter, else the first bad value of the forward, else the first bad gradient.

    Backward goes from the last layer to the first, so of several bad gradients that of the last layer was first.
    """
    told = f"step {step}: the loss is {loss}" if loss != loss or loss in (float("inf"), float("-inf")) else ""
    told = told or f"step {step}: a gradient has NaN or infinity, the loss is {loss:.4f}"
    parameters = [(name, each.rank) for each in found for name in each.parameters]
    gradients = [(name, each.rank) for each in found for name in each.gradients]
    outputs = [each.output for each in found if each.output is not None]
    if parameters:
        name, rank = min(parameters, key=lambda pair: (_layer(pair[0]), pair[1]))
        return f"{told}; first: rank {rank}, {_place(name)}: parameter {name} is not finite" + _more(parameters)
    if outputs:
        return f"{told}; first: {min(outputs)}"
    if gradients:
        name, rank = max(gradients, key=lambda pair: (_layer(pair[0]), -pair[1]))
        return f"{told}; first: rank {rank}, {_place(name)}: the gradient of {name} is not finite" + _more(gradients)
    return f"{told}; no parameter, gradient or output of a segment shows why"


def _more(names: Sequence[tuple[str, int]]) -> str:
    others = len({name for name, _ in names}) - 1
    return f" (and of {others} more)" if others else ""


def _layer(name: str) -> int:
    """Return the layer that a tensor's name is of: -1 for the embedding, one after all others for norm and head."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    if found:
        return int(found[1])
    return -1 if "embed" in name else 1 << 30


def _place(name: str) -> str:
    layer = _layer(name)
    return f"layer {layer}" if 0 <= layer < 1 << 30 else ("the embedding" if layer < 0 else "the head")
