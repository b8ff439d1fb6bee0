"""Where a rank has its parameters that train, and with which ranks it divides them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from treadle.dist.groups import Group
from treadle.dist.mesh_position import MeshPosition
from treadle.ir.placement import Placement
from treadle.lowering.options import LoweringOptions
from treadle.runtime.model.gradients import Gradients
from treadle.runtime.model.stage_blocks import modules_of_blocks


class HeldParameter(NamedTuple):
    """A parameter that trains, as this rank has it."""

    stage: int
    chunk: int
    """The chunk with which it is reduced; of several that share it the last."""

    block: int
    """Its place in the stage's row of blocks, of several that share it the lowest: it is read there first, and its
    last gradient made there. 0 where a stage is one."""

    tie: int | None
    """The number of the reduction of its tie."""

    is_shared: bool
    """Several chunks of this rank have it, as one object that is not tied: forwards of several stages read it."""

    is_expert: bool
    """Only the ranks with the same experts have it."""

    group: Group | None
    """The ranks that divide it; None if it is this rank's alone."""


def parameters_held(
    modules: Mapping[int, nn.Module],
    placement: Placement,
    position: MeshPosition,
    gradients: Gradients,
    shape: LoweringOptions | None,
) -> Iterator[tuple[nn.Parameter, HeldParameter]]:
    """Yield each parameter that trains with its place; `shape` is None at the grain of cells."""
    of_tie = {param: tie.number for tie in gradients.ties for param in tie.params}
    stages = dict(enumerate(placement.stages[position.pp_rank]))
    blocks: dict[tuple[int, nn.Parameter], int] = {}
    for chunk, module in modules.items() if shape is not None else ():
        for block, parts in enumerate(modules_of_blocks(module, stages[chunk], placement.num_stages)):
            for param in (param for part in parts for param in part.parameters()):
                blocks.setdefault((chunk, param), block)
    holders = Counter(param for module in modules.values() for param in module.parameters())
    for param, chunk in gradients.chunk_of.items():
        tie = of_tie.get(param)
        group = gradients.tied_groups.get(tie) if tie is not None else gradients.group_of(param)
        is_expert = param in gradients.owned
        is_shared = tie is None and holders[param] > 1
        block = blocks.get((chunk, param), 0) if not is_shared else 0
        yield param, HeldParameter(stages[chunk], chunk, block, tie, is_shared, is_expert, group)
