"""Memory: the bytes that every rank of a pipeline allocates at its peak, by part.

Weights in BF16, main gradients in FP32 or BF16, FP32 weights and two moments for Adam, activations as `activations` and
`alive` say, and what frameworks keep beside them. It is what torch.cuda.max_memory_allocated reports. What the
allocator reserves beyond it (`RESERVED_OVER_ALLOCATED`), and the CUDA context and NCCL (`OUTSIDE_BYTES`), come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.estimate.activations import ActivationCut, BlockActivations, block_activations, checkpointed
from treadle.estimate.alive import Moments, moments
from treadle.estimate.job import Job
from treadle.estimate.job_stages import rank_rows
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.parameter_counts import RankParameters, block_parameters, rank_parameters
from treadle.ir.blocks import LAYERS

Floats: TypeAlias = npt.NDArray[np.float64]

MIB = 1 << 20
WEIGHT_BYTES = 2
MASTER_BYTES = 4
"""FP32 weight of Adam, beside its two moments."""

WORKSPACE_BYTES = 32 * MIB
"""cuBLAS's workspace since Hopper. torch has one, Transformer Engine another, grouped GEMMs four more."""

RESERVED_OVER_ALLOCATED = 1.1
"""The most that torch's allocator reserved in the 43 runs of benchmarks/held_to/data/simumax.csv was 9.3 % more."""

OUTSIDE_BYTES = 6_400 * MIB
"""CUDA context, NCCL and all else on the device beside the allocator: 6,403 MB with 64 H100 (Megatron-LM pull request
6429: 68,973 MB in use, 62,570 MB reserved)."""

_QUANTISED_WEIGHTS = {"nvfp4": 2 * (1 / 2 + 1 / 16)}
"""Bytes of a weight's copies in the GEMMs' precision, by rows and by columns. FP8 ones replace the BF16 weight."""


@dataclass(frozen=True)
class MemoryOptions:
    """What memory depends on beside a job. The defaults are Megatron's."""

    cp_comm_type: str = "p2p"
    """How context parallelism exchanges: p2p (a ring) or a2a, which saves attention's output twice."""

    fused_cross_entropy: bool = True
    """The loss overwrites the logits with their gradient, as Transformer Engine's does (cross_entropy_fusion_impl te).
    Megatron's own, fused or not, keeps an FP32 softmax."""

    def __post_init__(self) -> None:
        if self.cp_comm_type not in ("p2p", "a2a"):
            raise ValueError(f"cp_comm_type is p2p or a2a, got {self.cp_comm_type!r}")


class MemoryEstimate(NamedTuple):
    """Bytes on a rank at its peak, by part."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Saved for backwards, without logits."""

    logits: int
    temporary: int
    """Needed by what is computed at the peak: gradients of activations, tokens on their way to experts and back."""

    buffers: int
    """Stand-ins for fused gradients, workspaces, messages between stages, copies of weights in FP4."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self)

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer


def estimate_memory(
    job: Job, options: MemoryOptions | None = None, *, held: Sequence[int] | None = None
) -> tuple[MemoryEstimate, ...]:
    """Return the peak memory of each rank of the pipeline. Experts are taken to be balanced.

    Args:
        job: the model, the cluster and how it is cut.
        options: what else matters; None for `MemoryOptions()`.
        held: where the job offloads, the most bytes of saved activations that each rank holds, as a simulation of its
            Program shows: copies may lag. None: they do not, and two cells of each rank are there at most.

    Raises:
        ValueError: the schedule cannot do this size, or the layout does not fit it.

    Example:
        >>> from treadle.estimate import load_cluster, load_model
        >>> job = Job(load_model("llama3-70b"), load_cluster("h100:64"), tp=4, pp=4, global_batch_size=64, seq_len=8192)
        >>> [round(rank.total / 2**30, 1) for rank in estimate_memory(job)]
        [80.7, 68.1, 57.6, 50.4]

    """
    chosen = options if options is not None else MemoryOptions()
    cut = ActivationCut.of(job, chosen.cp_comm_type, fused_loss=chosen.fused_cross_entropy)
    owned, rows = rank_parameters(job), rank_rows(job)
    peaks = _activation_peaks(job, cut, rows, held)
    return tuple(
        MemoryEstimate(*_states(job, each, "".join(row)), *peak, _buffers(job, cut, each, row))
        for each, row, peak in zip(owned, rows, peaks, strict=True)
    )


def least_state_bytes(job: Job) -> int:
    """Return the bytes of parameters, gradients and optimizer that the fullest rank holds at least: their mean."""
    dense, experts = _model_parameters(ModelCut.of(job))
    share = job.placement.num_pipes / job.pp
    held = RankParameters(int(share * dense), int(share * experts), frozenset())
    return sum(_states(job, held, "")) if job.sharding in ("none", "optimizer") else 0


@lru_cache(maxsize=1024)
def _model_parameters(cut: ModelCut) -> tuple[int, int]:
    """Return the parameters of a whole model on the ranks of a stage: of all but experts, and of experts."""
    blocks = [block_parameters(cut, block) for block in cut.shape.blocks]
    experts = sum(each.experts for each in blocks)
    shared = block_parameters(cut, "E").total if cut.shape.tie_word_embeddings else 0
    return sum(each.total for each in blocks) - experts - shared, experts


def _states(job: Job, held: RankParameters, blocks: str) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer, cut over replicas as the job has it.

    What is cut is gathered a block at a time, the next one while one computes.
    """
    shards = (job.num_holders, job.num_expert_holders) if job.model.is_moe else (job.num_holders, 1)
    whole = held.dense + held.experts
    shared = held.dense / shards[0] + held.experts / shards[1]
    largest = 0
    if job.sharding in ("gradients", "parameters"):
        cut = ModelCut.of(job)
        largest = max(block_parameters(cut, block).total for block in set(blocks))
    parameters = WEIGHT_BYTES * (shared + 2 * largest if job.sharding == "parameters" else whole)
    gradients = job.gradient_bytes * (whole if job.sharding in ("none", "optimizer") else shared + largest)
    optimizer = (MASTER_BYTES + 2 * job.moment_bytes) * (whole if job.sharding == "none" else shared)
    return int(parameters), int(gradients), int(optimizer)


def _buffers(job: Job, cut: ActivationCut, held: RankParameters, rows: tuple[str, ...]) -> int:
    """Return the bytes that stay allocated beside states and activations.

    A GEMM that adds its weight gradient to the main gradient still hands autograd a BF16 tensor of the weight's
    shape; Transformer Engine keeps one for each shape. A rank receives the input of a stage ahead of its forward, of
    two stages where it has several.
    """
    stand_ins = WEIGHT_BYTES * sum(outputs * inputs for outputs, inputs in held.shapes)
    workspaces = WORKSPACE_BYTES * (6 if held.experts else 2)
    received = sum(not row.startswith("E") for row in rows) if job.pp > 1 else 0
    copies = _QUANTISED_WEIGHTS.get(job.precision, 0.0) * (held.dense + held.experts)
    return int(stand_ins + workspaces + min(2, received) * cut.hidden + copies)


class _RowBytes(NamedTuple):
    """Bytes of a stage for one micro-batch, as in `BlockActivations`, and those of its logits.

    `whole` is all that was saved and recomputed, `more` what `split` is larger than that. `forward` and `backward`
    are beside what the whole stage saves; `beside_forward` and `beside_backward` beside what is saved by then.
    `largest` is what the block saves that saves most.
    """

    saved: int
    offloaded: int
    split: int
    whole: int
    more: int
    forward: int
    backward: int
    beside_forward: int
    beside_backward: int
    logits: int
    largest: int


def _of_row(job: Job, cut: ActivationCut, row: str) -> _RowBytes:
    """Return the bytes of a stage. When a block computes, those after it have saved nothing yet, or freed all."""
    logits, saved = cut.logits, 0
    forward, backward = [0], [0]
    blocks = _blocks(job, cut, row)
    for block, each in reversed(list(zip(row, blocks, strict=True))):
        forward.append(each.forward - saved)
        backward.append(each.backward - saved)
        if block == "m":
            forward[-1] -= logits
        saved += each.saved
    return _RowBytes(
        saved,
        sum(each.offloaded for each in blocks),
        sum(each.split for each in blocks),
        sum(each.saved + each.again for each in blocks),
        sum(max(0, each.split - each.saved - each.again) for each in blocks),
        max(forward),
        max(backward),
        max((each.forward for each in blocks), default=0),
        max((each.backward - each.again for each in blocks), default=0),
        logits * (row.count("L") + row.count("m")),
        max((each.saved for each in blocks), default=0),
    )


def _blocks(job: Job, cut: ActivationCut, row: str) -> list[BlockActivations]:
    """Return the bytes of each block.

    With "full", the first `recompute_layers` layers keep their input only, and so do MTP blocks.
    """
    left = (job.recompute_layers or len(row)) if "full" in job.recompute else 0
    found = []
    for block in row:
        if (block in LAYERS and left > 0) or (block == "m" and "full" in job.recompute):
            found.append(checkpointed(cut, block))
            left -= 1
        else:
            found.append(block_activations(cut, block))
    return found


def _activation_peaks(
    job: Job, cut: ActivationCut, rows: tuple[tuple[str, ...], ...], held: Sequence[int] | None
) -> list[tuple[int, int, int]]:
    """Return for each rank what is saved, of it logits apart, and what is temporary, at its peak."""
    of_row = {row: _of_row(job, cut, row) for row in set(chain.from_iterable(rows))}
    sizes = np.array([[of_row[row] for row in rank] for rank in rows], np.float64)
    by_name: dict[str, Floats] = dict(zip(_RowBytes._fields, np.moveaxis(sizes, 2, 0), strict=True))
    found = moments(job.schedule, pp=job.pp, vpp=job.vpp, microbatches=job.num_microbatches)
    saved = _alive(found.full, by_name["saved"][found.rank])
    saved -= _exchanged(found, by_name)
    out = _alive(found.full, by_name["offloaded"][found.rank])
    kept = np.maximum(0.0, saved - out)
    if job.offload and held is None:  # the cell that is made or leaves, and the one that comes back or is used
        saved = kept + np.minimum(out, 2 * by_name["offloaded"].max(1)[found.rank])
    if found.splits:  # what wgrad waits with stays here
        saved += _alive(found.split, by_name["split"][found.rank])
    temporary = _computing(found, by_name["forward"], by_name["backward"])
    if job.offload and held is not None:
        waiting = _alive(found.split, by_name["whole"][found.rank])  # a Program holds it up to wgrad
        there = np.maximum.reduce((np.array(held, np.float64)[found.rank], waiting, kept))
        there += _alive(found.split, by_name["more"][found.rank])
        beside = _computing(found, by_name["beside_forward"], by_name["beside_backward"])
        offloaded = there + beside < saved + temporary
        saved, temporary = np.where(offloaded, there, saved), np.where(offloaded, beside, temporary)
    total = saved + temporary
    peaks = []
    for rank, (start, stop) in enumerate(pairwise(found.starts)):
        at = start + int(total[start:stop].argmax())
        logits = min(float(found.full[at] @ by_name["logits"][rank]), float(saved[at]))
        peaks.append((int(saved[at] - logits), int(logits), int(temporary[at])))
    return peaks


def _alive(counts: Floats, sizes: Floats) -> Floats:
    """Return the bytes of each moment, in which so many micro-batches of each chunk are alive."""
    return np.asarray(np.einsum("ic,ic->i", counts, sizes))


def _exchanged(found: Moments, sizes: dict[str, Floats]) -> Floats:
    """Return what a forward has not saved yet while the backward that it overlaps with has not freed it.

    Both go layer by layer: when the forward is through some of its layers, the backward has freed as many.
    """
    both = (found.forward >= 0) & (found.backward >= 0)
    made = sizes["saved"][found.rank, found.forward]
    freed = (sizes["saved"] - (sizes["split"] if found.splits else 0))[found.rank, found.backward]
    spare = np.minimum(made, freed) - sizes["largest"][found.rank, found.forward]
    return np.asarray(np.where(both, np.maximum(0.0, spare), 0.0))


def _computing(found: Moments, forward: Floats, backward: Floats) -> Floats:
    """Return what the forward and the backward that run in each moment need."""
    none = np.zeros((len(forward), 1))
    running = np.hstack((forward, none))[found.rank, found.forward]
    return np.asarray(running + np.hstack((backward, none))[found.rank, found.backward])
