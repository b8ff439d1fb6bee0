"""A model of so many layers, cut into the stages of a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from treadle.ir.blocks import LAYERS


def cut_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, as even as can be; where they do not divide, earlier stages have one more.

    The last stage has the head and the loss besides, so it is not the one to have more. And in every placement (loop,
    v, bidirectional) a run of stages from the first on is spread evenly over the ranks.

    Raises:
        ValueError: a stage would have no layer.

    Example:
        >>> cut_layers(11, 4)
        (3, 3, 3, 2)

    """
    if num_layers < num_stages:
        raise ValueError(
            f"a model of {num_layers} layers cannot be cut into {num_stages} stages; it needs at least {num_stages} "
            f"layers, or a schedule with at most {num_layers} stages"
        )
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


def cut_evenly(blocks: str, num_stages: int) -> tuple[str, ...]:
    """Cut a model's letters as `lower` does: layers as even as can be, the ends on the first and the last stage.

    Raises:
        ValueError: a stage would have no layer.

    Example:
        >>> cut_evenly("EdttttmL", 3)
        ('Edt', 'tt', 'tmL')

    """
    places = [place for place, letter in enumerate(blocks) if letter in LAYERS]
    cuts, done = [0], 0
    for count in cut_layers(len(places), num_stages)[:-1]:
        done += count
        cuts.append(places[done])
    return tuple(blocks[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(blocks)], strict=True))


def common_layers(stage_counts: Iterable[int]) -> int:
    """Return the layers of the smallest model that can be cut evenly into each of these numbers of stages.

    Example:
        >>> common_layers([4, 8, 12])
        24

    """
    return lcm(*stage_counts)
