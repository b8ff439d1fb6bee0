"""How a Pipeline runs: everything that is not the model, the schedule, the mesh or the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

from treadle.costs import UNIT_COSTS, Costs
from treadle.dist.boundary import Boundary

LanesName: TypeAlias = Literal["thread", "paced", "serial", "virtual"]
SavedName: TypeAlias = Literal["leave", "count", "offload"]
ShapesName: TypeAlias = Literal["same", "each", "any"]


@dataclass(frozen=True)
class RunOptions:
    """The options of a Pipeline. They are the same on all ranks, but for those in `OF_A_RANK`.

    Example:
        >>> RunOptions(deadline_s=60, lanes="serial").saved
        'leave'

    """

    deadline_s: float = 600.0
    """Seconds that a rank waits for another before it takes that rank for lost.

    A first step that compiles, or a checkpoint written between two steps, counts: it must fit in.
    """

    seed: int | None = 0
    """The seed of randomness in the stages (dropout); each micro-batch and layer has its own, whatever the schedule.

    None leaves torch's generator alone: results then depend on the order of ops.
    """

    boundaries: Mapping[int, Boundary] | None = None
    """For each stage the shapes and types of the tensors it sends on. None: the first step finds out."""

    address: str | None = None
    """The address under which other hosts reach this one. None: the one from which it reaches torch's store."""

    lanes: LanesName = "thread"
    """What runs the lanes of layers that name their segments: thread, paced, serial or virtual (`runtime.run.lanes`).

    Ignored on a GPU, where lanes are streams, and at cell granularity, which has one thread.
    """

    costs: Costs = UNIT_COSTS
    """How long ops take. Ops of layers are ordered by them, and paced lanes take that long."""

    saved: SavedName = "leave"
    """What becomes of the tensors that layers save for backward: `leave` them, `count` them (`report.saved`), or
    `offload` them to the host as the Program says. Only for layers that name their segments."""

    recompute: tuple[str, ...] = ()
    """Segments that keep their inputs alone and are computed again before their backward: some of attn, mlp.

    Only for layers that name their segments. Random numbers are the same both times, buffers are written once, and
    gradients are the same to the last bit, unless a forward depends on a buffer that forwards change."""

    pool_directory: Path | None = None
    """Where a CPU puts offloaded tensors: into a file without a name in this directory. A GPU uses pinned memory."""

    shapes: ShapesName = "same"
    """Whether micro-batches may have different shapes: none may (`same`), or those of a step may and their inputs
    show it (`each`), or outputs may even where inputs are alike, as rows behind a mask are (`any`).

    Only the first stage's rank has to know the shapes. With `each`, ranks agree before a step whether it has such
    micro-batches; if it has, and always with `any`, a header goes ahead of each message. Only shapes may differ, not
    the number of tensors between stages or their dtypes.
    """


OF_A_RANK = {
    "address": "each host has its own",
    "deadline_s": "how long a rank waits for others is its own",
    "pool_directory": "a directory of this host, whose files no other rank reads",
}
"""The options that may differ from rank to rank, and why."""


def facts_of(options: RunOptions) -> dict[str, str]:
    """Return the options that must be the same on all ranks, each as a text."""
    return {each.name: repr(getattr(options, each.name)) for each in fields(options) if each.name not in OF_A_RANK}


class RunOptionsChanges(TypedDict, total=False):
    """The fields of `RunOptions` as keyword arguments, each with its default left out."""

    deadline_s: float
    seed: int | None
    boundaries: Mapping[int, Boundary] | None
    address: str | None
    lanes: LanesName
    costs: Costs
    saved: SavedName
    recompute: tuple[str, ...]
    pool_directory: Path | None
    shapes: ShapesName
