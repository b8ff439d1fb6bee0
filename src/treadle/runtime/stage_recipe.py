"""How the stages of a rank are built from its modules, for steps and, without a backward, for evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from treadle.dist.boundary import Boundary, all_flags
from treadle.dist.mesh_position import MeshPosition
from treadle.ir import Schedule
from treadle.ir.ops import WEIGHT_OF
from treadle.lowering.options import LoweringOptions
from treadle.runtime.model import weight_grad as split
from treadle.runtime.model.chunk import CheckedLoss, Chunk, LossFn
from treadle.runtime.model.layered import LayeredStage
from treadle.runtime.model.saved import SavedTensors
from treadle.runtime.model.seeding import Seeds
from treadle.runtime.model.stage import Stage
from treadle.runtime.model.weight_grad import WeightGradQueue, WeightGradSplit
from treadle.runtime.step_plan import forwards_of


@dataclass(frozen=True)
class StageRecipe:
    """What the stages of a rank are built from. `boundaries[stage]` is what it sends on, where that is known."""

    modules: Mapping[int, nn.Module]
    schedule: Schedule
    position: MeshPosition
    shape: LoweringOptions | None
    splits: Mapping[int, WeightGradSplit]
    depths: tuple[int, ...]
    device: torch.device
    seed: int | None
    loss_fn: LossFn
    boundaries: Mapping[int, Boundary]
    store: SavedTensors | None
    trains: bool = True

    def evaluating(self) -> StageRecipe:
        """Return the recipe of the same stages for evaluations: they save nothing, and find out their own shapes."""
        return replace(self, splits={}, boundaries={}, store=None, shape=forwards_of(self.shape), trains=False)

    def build(self) -> dict[int, Chunk]:
        """Return the stages of this rank by chunk."""
        return {chunk: self._build(chunk, module) for chunk, module in self.modules.items()}

    def _build(self, chunk: int, module: nn.Module) -> Chunk:
        placement = self.schedule.placement
        number = placement.stage(self.position.pp_rank, chunk)
        first, num_layers = sum(self.depths[:number]), sum(self.depths)
        seeds = Seeds(self.device, first, num_layers) if self.seed is not None else None
        in_pipe = placement.pipes[chunk] * self.schedule.microbatches_per_pipe
        offset = self.position.dp_rank * self.schedule.num_microbatches + in_pipe
        queue = self._weight_grad_queue(chunk, module)
        made: Chunk
        if self.shape is None:
            made = Stage(number, module, queue, seeds, offset)
        else:
            made = LayeredStage(number, module, queue or WeightGradQueue(), seeds, offset)
            made.deferred = tuple(WEIGHT_OF[kind] for kind in self.shape.split)
            made.recomputed = self.shape.recompute
            made.store = self.store
        made.trains = self.trains
        made.loss_fn = self._loss(module) if number == placement.num_stages - 1 else None
        return made

    def _loss(self, module: nn.Module) -> CheckedLoss:
        return CheckedLoss(self.loss_fn, module, lambda: (p for own in self.modules.values() for p in own.parameters()))

    def reset_shapes(self, stage: Chunk) -> None:
        """Let a stage know of shapes what is known beforehand, and nothing else."""
        own, before = self.boundaries.get(stage.number), self.boundaries.get(stage.number - 1)
        stage.boundary, stage.header_due = own, own is None
        stage.output_flags = all_flags(own) if own is not None else None
        stage.input_flags = all_flags(before) if before is not None else None

    def _weight_grad_queue(self, chunk: int, module: nn.Module) -> WeightGradQueue | None:
        """Let the chunk's linears defer their weight gradients to a queue, if those are ops of their own."""
        found = self.splits.get(chunk)
        if self.shape is not None:
            if not self.shape.split:
                return None
            found = found if found is not None else split.examine(module)  # a head of plain modules alone
        if found is None or not found.possible:
            return None
        queue = WeightGradQueue()
        split.apply(found.linears, queue)
        return queue

    def known_inputs(self, stages: Mapping[int, Chunk]) -> dict[int, Boundary]:
        """Return the shapes that arrive at each chunk, as far as they are known beforehand."""
        known = self.boundaries
        return {chunk: known[stage.number - 1] for chunk, stage in stages.items() if stage.number - 1 in known}
