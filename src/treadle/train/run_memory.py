"""The memory of each rank of a run, by part, without a process or a device: stages, optimizer, a simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from treadle.costs import UNIT_COSTS, Costs
from treadle.costs.costs import EXCHANGE
from treadle.dist.channel import most_in_flight
from treadle.ir.ops import LaneKind
from treadle.ir.program import Program
from treadle.lowering.options import LoweringOptions
from treadle.lowering.running import lower_weaving
from treadle.models.tensor_names import tied_parameters
from treadle.passes.step_end import reduces
from treadle.simulator import simulate
from treadle.train.footprint import ModelFootprint, ParameterShape, model_footprint
from treadle.train.optim.batched_muon import matrices_of_batch
from treadle.train.optim.division import Shares, divide_elements, divide_whole
from treadle.train.parallel import ParallelPlan
from treadle.train.run_config import TrainConfig
from treadle.train.sweep import StepPeak, step_peaks

_LONG = 8
_FLOAT = 4
_ADAMW_BYTES = 2 * _FLOAT
"""What AdamW's update of a tensor takes, bytes an element: the root of the second moment, and the quotient."""

_MUON_BYTES = 2 * _FLOAT + 3 * 2
"""What Muon's takes: the momentum's update and its copy, and three matrices of Newton-Schulz in bfloat16."""

_TICKS = UNIT_COSTS.clock.ticks

ORDER_COSTS = Costs(
    "order",
    UNIT_COSTS.clock,
    cells=UNIT_COSTS.cells,
    layer=dict.fromkeys(EXCHANGE, _TICKS // 10),
    ends=dict.fromkeys(("embed_f", "embed_b", "head_f", "head_b", "head_w", "mtp_f", "mtp_b", "mtp_w"), _TICKS // 10),
    message=dict.fromkeys(("send", "offload", "onload", "reduce_grad", "reduce_tied"), _TICKS // 10),
    about="a layer's F = I = W = 1, all else a tenth: for the order of ops, where no costs are known",
)
"""Costs for a step's memory where none are known. Everything takes some time, so that nothing happens at once."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank of a pipeline at its peak, in bytes."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    """Moments, and float32 masters of two-byte parameters."""

    activations: int
    """Saved for backward, or passed from op to op."""

    temporaries: int
    """What exists only while an op runs: of the head the logits' gradient, of an all-gather its bucket."""

    messages: int
    """Between stages, on their way or awaited; and the batch."""

    peak: str
    """What the rank does at its peak."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporaries + self.messages


@dataclass(frozen=True)
class RunMemory:
    """The memory of a run on the ranks of its plan."""

    config: TrainConfig
    plan: ParallelPlan
    costs: Costs = field(default=ORDER_COSTS)

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters."""
        found: torch.dtype = getattr(torch, self.config.training.dtype)
        return found

    @cached_property
    def model(self) -> ModelFootprint:
        """The memory of the model's blocks."""
        training = self.config.training
        return model_footprint(
            self.config.model,
            (training.micro_batch_size, training.seq_len),
            ep=self.plan.ep,
            dtype=self.dtype,
            recompute=self.config.parallel.recompute,
            device="cuda" if _on_gpu(self.config) else "cpu",
        )

    @cached_property
    def program(self) -> Program:
        """The Program that a Pipeline of this run executes."""
        plan, parallel = self.plan, self.config.parallel
        has_experts = any("t" in row for row in plan.rows)
        tied = tied_parameters(self.config.model, plan.rows) or {}
        options = LoweringOptions(
            blocks=plan.rows if has_experts else tuple(row.replace("d", "t") for row in plan.rows),
            by_layer=True,
            moe=has_experts,
            padded=has_experts and parallel.exchange == "deepep",
            offload=parallel.saved == "offload",
            recompute=parallel.recompute,
        )
        return lower_weaving(
            plan.schedule,
            UNIT_COSTS,
            options,
            reduce=reduces(plan.schedule.placement, plan.num_replicas),
            tied=tuple(tuple(sorted(where)) for where in tied.values()),
        )

    def parameters_of(self, pp_rank: int) -> list[tuple[int, ParameterShape]]:
        """Return (chunk, parameter) of a rank; one that its stages share is there once. Layers have numbered names."""
        found: dict[str, tuple[int, ParameterShape]] = {}
        for chunk, number in self.plan.stages_of(pp_rank).items():
            for place, letter in enumerate(self.plan.rows[number]):
                for shape in self.model.blocks[letter].parameters:
                    name = shape.name if shape.is_shared else f"{chunk} {place} {shape.name}"
                    found.setdefault(name, (chunk, shape))
        return list(found.values())

    # -- a rank ------------------------------------------------------------------------------------------------------

    @cached_property
    def ranks(self) -> tuple[RankMemory, ...]:
        """Each rank of a pipeline; replicas have the same, but for the rest of a division."""
        trace = simulate(self.program, self.costs)
        peaks = step_peaks(trace, self.plan.rows, self.model)
        return tuple(self._rank(rank, peak) for rank, peak in enumerate(peaks))

    def _rank(self, rank: int, peak: StepPeak) -> RankMemory:
        """Return the larger of the step's peak and the optimizer's."""
        held = self.parameters_of(rank)
        shapes = [shape for _, shape in held]
        num = sum(shape.size for shape in shapes)
        parameters = num * self.dtype.itemsize
        optimizer = OptimizerMemory.of(self, shapes)
        gradients = num * max(_FLOAT, self.dtype.itemsize)  # main gradients keep their memory
        in_step = RankMemory(
            pp_rank=rank,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer.state,
            activations=peak.activations,
            temporaries=peak.temporaries,
            messages=self._message_bytes(rank),
            peak=peak.op,
        )
        behind = RankMemory(
            pp_rank=rank,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer.state,
            activations=0,
            temporaries=optimizer.temporaries,
            messages=self._batch_bytes(),
            peak=optimizer.peak,
        )
        return max(in_step, behind, key=lambda memory: memory.total)

    def num_holders(self, shape: ParameterShape) -> int:
        """Return the number of ranks that have a parameter and divide its optimizer state."""
        copies = self.plan.schedule.placement.num_pipes
        if shape.is_expert and self.plan.ep > 1:
            return self.plan.dp * copies
        return self.plan.dp * self.plan.ep * copies

    def _message_bytes(self, rank: int) -> int:
        """Return the bytes of a receive awaited on each channel, of messages still leaving, and of the batch."""
        program, boundary = self.program, self.model.boundary
        total = self._batch_bytes()
        for number in range(program.num_lanes):
            lane = program.lane(number)
            num = int(program.lane_ptr[number + 1] - program.lane_ptr[number])
            if lane.rank == rank and lane.kind is LaneKind.RECV:
                total += boundary * min(num, 1)
            if lane.rank == rank and lane.kind is LaneKind.SEND:
                total += boundary * min(num, most_in_flight(boundary))
        return total

    def _batch_bytes(self) -> int:
        """Return the bytes of tokens, targets, positions and documents of a step."""
        training = self.config.training
        return 4 * _LONG * training.micro_batch_size * training.seq_len * self.plan.num_microbatches


@dataclass(frozen=True)
class OptimizerMemory:
    """The optimizer's memory on a rank: its state, and the most that a step of it takes besides."""

    state: int
    temporaries: int
    peak: str

    @classmethod
    def of(cls, run: RunMemory, shapes: Sequence[ParameterShape]) -> OptimizerMemory:
        """Divide a rank's parameters as the optimizer does."""
        config, itemsize = run.config.optimizer, run.dtype.itemsize
        has_masters = itemsize < _FLOAT
        bucket = max(1, int(config.bucket_mb * 2**20) // itemsize)
        families: dict[tuple[int, bool], list[int]] = {}
        for shape in shapes:
            by_muon = config.by_muon(shape.name, len(shape.shape))
            families.setdefault((run.num_holders(shape), by_muon), []).append(shape.size)
        state = own = largest = gather = 0
        for (num_ranks, by_muon), sizes in families.items():
            divide = divide_whole if by_muon else divide_elements
            divided = divide(sizes, num_ranks, bucket)
            loads = [sum(len(run) for shares in divided for run in shares[rank]) for rank in range(num_ranks)]
            pieces = max((len(run) for shares in divided for runs in shares for run in runs), default=0)
            state += max(loads) * _FLOAT * ((1 if by_muon else 2) + has_masters)
            own += max(loads)
            if by_muon:
                largest = max(largest, _muon_batch(divided, num_ranks) * _MUON_BYTES)
            else:
                largest = max(largest, pieces * _ADAMW_BYTES)
            if num_ranks > 1:
                most = max(max(sum(map(len, runs)) for runs in shares) for shares in divided)
                gather = max(gather, (num_ranks + 1) * most * itemsize)
        if _on_gpu(run.config) and config.name == "adamw":
            largest = 0  # torch's fused kernel keeps nothing
        peak = "the optimizer's step" if largest >= gather else "the exchange of parameters"
        return cls(state, max(largest, gather), peak)


def _muon_batch(divided: Sequence[Shares], num_ranks: int) -> int:
    """Return the elements of the largest batch of matrices that a rank orthogonalises together."""
    batches = [0]
    for rank in range(num_ranks):
        num = Counter(len(run) for shares in divided for run in shares[rank])
        batches += [size * min(of_size, matrices_of_batch(size)) for size, of_size in num.items()]
    return max(batches)


def _on_gpu(config: TrainConfig) -> bool:
    device = config.training.device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())
