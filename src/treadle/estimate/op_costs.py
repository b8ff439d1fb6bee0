"""Costs of a job's ops, for a Program: what `treadle.simulate`, `verify` and every command with --costs take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

from treadle.costs import Costs
from treadle.estimate.block_parts import block_parts
from treadle.estimate.block_work import actions
from treadle.estimate.data_parallel import PARAM_BYTES, data_parallel_seconds, layer_seconds, with_exposed
from treadle.estimate.group_messages import between_stages, messages_of, send
from treadle.estimate.host_copies import offload_seconds
from treadle.estimate.job import Job
from treadle.estimate.job_stages import is_tied
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.parameter_counts import chunk_weights
from treadle.estimate.rates import at_peak, constant, factors, host_seconds, seconds
from treadle.estimate.saved_bytes import saved_bytes
from treadle.ir.ops import COMPUTE_PARTS, LAYER_PARTS
from treadle.ir.trace import MICROSECONDS
from treadle.schedules import family

RankWeights: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank and chunk the weights of all but experts, and of experts."""

NS = 1e9
_LIMIT = 6
"""Exponent of the mean of device and host: the larger it is, the sharper the longer one decides."""
_EXCHANGES = tuple(f"{part}_" for part in LAYER_PARTS if part not in COMPUTE_PARTS)
ADAM_BYTES = 10
"""Read and written for a parameter by Adam besides its gradient and moments: the FP32 weight, and the BF16 one."""


def estimate_costs(job: Job, *, inline_recompute: bool = False) -> Costs:
    """Estimate what each op of the job's Program takes.

    Args:
        job: the model, the cluster and how they are cut.
        inline_recompute: add the whole parts that are recomputed to dgrad, for programs at the grain of cells, which
            have no ops for them. With `recompute_layers` every layer has its share.

    Returns:
        Costs with the parts of a layer, the ends, messages, and what ends a step. Exchanges with experts have their
        whole time: the Program decides what runs beside them.

    Raises:
        ValueError: the GPU does not do the job's precision.

    """
    ticks = _block_ticks(_same_blocks(job), overlapped=family(job.schedule).overlapped)
    layer, dense = dict(ticks["t"]), dict(ticks.get("d", {}))
    if inline_recompute:
        layer, dense = _inlined(job, layer), _inlined(job, dense)
    layer, dense = with_exposed(job, "t", layer, NS), with_exposed(job, "d", dense, NS)
    weights = chunk_weights(job)
    return Costs(
        f"{job.model.name} on {job.cluster.name}",
        MICROSECONDS,
        layer=layer,
        dense=dense,
        ends={name: time for block in "EmL" for name, time in ticks.get(block, {}).items()},
        message=_messages(job, weights),
        step=_step(job, weights),
        saved_bytes=saved_bytes(job),
        moved_bytes=_moved(job, weights),
        model=_model(job),
        about="estimated from the model's shape and the cluster's rates",
    )


def _same_blocks(job: Job) -> Job:
    """Return the job that stands for all with the same blocks on the same GPUs, whatever their schedule and batch."""
    return replace(
        job,
        pp=1,
        vpp=1,
        schedule=Job.schedule,
        layout=None,
        offload=(),
        recompute_layers=0,
        sharding=Job.sharding,
        moment_bytes=Job.moment_bytes,
        saved=Job.saved,
        global_batch_size=job.micro_batch_size * job.dp * job.pp,
    )


@lru_cache(maxsize=4096)
def _block_ticks(job: Job, *, overlapped: bool) -> Mapping[str, Mapping[str, int]]:
    """Return for each block the ticks of its actions.

    Device and host work side by side, so a block takes about as long as the slower of them: what it computes is
    stretched until it does. Exchanges that run beside computation do not keep the host waiting.
    """
    by = factors(job)
    found = {}
    for block in set(job.model.blocks):
        works = actions(job, block)
        device = {name: seconds(at_peak(work, job.cluster, job.precision), by) for name, work in works.items()}
        again = {*job.recompute} if "full" not in job.recompute else {*COMPUTE_PARTS}
        runs = {name for name in works if not name.endswith("_r") or name[:-2] in again}
        host = sum(host_seconds(works[name], job, overlapped=overlapped) for name in runs)
        computed = sum(device[name] for name in runs if not name.startswith(_EXCHANGES))
        waited = 0.0 if overlapped else sum(device[name] for name in runs) - computed
        whole = ((computed + waited) ** _LIMIT + host**_LIMIT) ** (1 / _LIMIT)
        stretch = (whole - waited) / computed if computed else 1.0
        found[block] = {
            name: round(NS * time * (1.0 if name.startswith(_EXCHANGES) else stretch)) for name, time in device.items()
        }
    return found


def _inlined(job: Job, layer: dict[str, int]) -> dict[str, int]:
    """Return the parts of a layer, what is recomputed added to dgrad; "full" repeats exchanges with experts too."""
    parts = tuple(part for part in COMPUTE_PARTS if part in job.recompute or "full" in job.recompute)
    per_stage = max(1, job.model.num_hidden_layers // job.num_stages)
    share = min(1.0, job.recompute_layers / per_stage) if job.recompute_layers else 1.0
    again = {part: layer.get(f"{part}_r", 0) for part in parts}
    if "full" in job.recompute:
        again |= {part: layer.get(f"{part}_f", 0) for part in LAYER_PARTS if part not in COMPUTE_PARTS}
    changed = {
        f"{part}_b": layer[f"{part}_b"] + round(share * time) for part, time in again.items() if f"{part}_b" in layer
    }
    return {**layer, **changed}


def _model(job: Job) -> dict[str, int]:
    model = job.model
    counts = {
        "layers": model.num_hidden_layers,
        "dense": model.num_dense_layers if model.is_moe else 0,
        "mtp": model.num_nextn_predict_layers,
    }
    return {name: count for name, count in counts.items() if count}


def _messages(job: Job, weights: RankWeights) -> dict[str, int]:
    """Messages between stages, and the reduction of a chunk's gradients: of the largest chunk, as all wait for it."""
    cluster, found = job.cluster, {}
    latency = 1e-6 * constant(cluster, "latency_us")
    tied = between_stages(job, "all_reduce", _tied_bytes(job))
    for name, messages in (("send", send(job)), ("reduce_tied", (tied,))):
        if sent := sum(message.seconds(cluster) for message in messages):
            found[name] = round(NS * (sent / constant(cluster, "pp") + latency))
    if job.sharding in ("gradients", "parameters"):  # a layer at a time: the last one's is left at the end
        reduced = layer_seconds(job, "t", job.gradient_bytes)
    else:
        reduced = max(data_parallel_seconds(job, *each, job.gradient_bytes) for each in {*chain.from_iterable(weights)})
        reduced *= 2 if job.sharding == "none" else 1  # an all-reduce is a reduce-scatter and an all-gather
    if reduced:
        found["reduce_grad"] = round(NS * reduced)
    if job.offload:
        found |= dict.fromkeys(("offload", "onload"), round(NS * (offload_seconds(job) + latency)))
    return found


def _tied_bytes(job: Job) -> int:
    """Return the gradient that embedding and head share, 0 where no two ranks have to sum it."""
    cut = ModelCut.of(job)
    return job.gradient_bytes * cut.vocabulary * job.model.hidden_size if is_tied(job) else 0


def _step(job: Job, weights: RankWeights) -> dict[str, int]:
    """What ends a step, on the rank that has most to do then."""
    held = {(sum(dense for dense, _ in chunks), sum(experts for _, experts in chunks)) for chunks in weights}
    whole = job.sharding in ("optimizer", "gradients")  # none: replicas have all; parameters: each layer is gathered
    gathered = max(data_parallel_seconds(job, *each, PARAM_BYTES) for each in held) if whole else 0.0
    optimizer = max(_optimizer_seconds(job, *each) for each in held)
    ends = {
        "optimizer": optimizer + 1e-6 * constant(job.cluster, "step_us"),
        "gather_params": gathered * (1 - constant(job.cluster, "dp_hidden")),
    }
    return {name: round(NS * value) for name, value in ends.items() if value}


def _optimizer_seconds(job: Job, dense: float, experts: float) -> float:
    """Return the seconds of the optimizer's step on a rank's share of the parameters."""
    cut = job.sharding != "none"
    held = dense / (job.num_holders if cut else 1) + experts / (job.num_expert_holders if cut else 1)
    moved = ADAM_BYTES + 4 * job.moment_bytes + job.gradient_bytes
    return held * moved / job.cluster.memory_bandwidth / constant(job.cluster, "optimizer")


def _moved(job: Job, weights: RankWeights) -> dict[str, int]:
    sizes = {"send": sum(message.size_bytes for message in send(job))}
    if job.model.is_moe:
        for name in ("dispatch", "combine"):
            (piece,) = block_parts(ModelCut.of(job), "t")[name]
            sizes[name] = sum(m.size_bytes for each in piece.collectives for m in messages_of(job, each))
    sizes["reduce_tied"] = _tied_bytes(job)
    sizes["reduce_grad"] = max(job.gradient_bytes * sum(each) for each in chain.from_iterable(weights))
    return {name: round(size) for name, size in sizes.items() if size}
