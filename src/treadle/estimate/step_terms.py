"""A step as a sum of terms at peak rates: what constants are fitted to.

The step of a job takes, in closed form, the sum of these terms, each times a factor that an achieved share gives. So
measured runs tell the factors: `treadle.estimate.constants` fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from treadle.estimate.job import Job
from treadle.estimate.messages import gather, send
from treadle.estimate.rates import PeakTimes, seconds
from treadle.estimate.stages import rank_rows
from treadle.estimate.step_time import ADAM_BYTES, GRAD_BYTES, PARAM_BYTES, JobTimes, job_times
from treadle.ir.blocks import LAYERS

SAVED_BYTES = 32
"""Bytes that a dense layer saves for a token and an element of its hidden state, about."""

TERMS = (*PeakTimes._fields, "dp", "fsdp", "optimizer", "pp", "pcie", "step")
"""Names of the terms. The last is 1: what a step takes besides all else."""


@lru_cache(maxsize=4096)
def step_terms(job: Job, *, offload_layers: int = 0) -> Mapping[str, float]:
    """Return the terms of a step: seconds at peak rates, or microseconds if each launch or message takes one.

    Args:
        job: the job; its schedule fills and drains as 1F1B or the interleaved one.
        offload_layers: layers of a rank whose saved activations are copied to the host and back.

    """
    times, cluster = job_times(job), job.cluster
    rows = rank_rows(job)
    ranks = [_of_rank(job, chunks, times) for chunks in rows]
    slowest = max(range(len(ranks)), key=lambda rank: seconds(PeakTimes(*ranks[rank]), times.factors))
    count = job.num_microbatches
    whole = [sum(each) for each in zip(*ranks, strict=True)]
    one = ranks[slowest]
    found = {
        name: count * mine + (all_ranks - mine) / job.vpp
        for name, mine, all_ranks in zip(PeakTimes._fields, one, whole, strict=True)
    }
    for name in ("launch", "latency"):
        found[name] *= 1e-6
    blocks = "".join(rows[slowest])
    dense = sum(times.parameters[letter] for letter in blocks)
    experts = sum(times.experts[letter] for letter in blocks)
    moved = GRAD_BYTES + PARAM_BYTES
    over_dp = _link_seconds(job, "dp", dense * moved) + _link_seconds(job, "expert_dp", experts * moved)
    sharded = job.sharding == "parameters"
    found["dp"] = 0.0 if sharded else over_dp
    found["fsdp"] = count * _link_seconds(job, "dp", dense * (moved + PARAM_BYTES)) if sharded else 0.0
    held = dense / job.num_holders + experts / job.num_expert_holders
    found["optimizer"] = held * ADAM_BYTES / cluster.memory_bandwidth
    found["pp"] = 2 * job.vpp * count * sum(message.seconds(cluster) for message in send(job))
    saved = 2 * offload_layers * SAVED_BYTES * job.tokens * job.model.hidden_size / job.tp
    found["pcie"] = count * saved * cluster.gpus_per_pcie / cluster.pcie_bandwidth
    found["step"] = 1.0
    return found


def _of_rank(job: Job, chunks: tuple[str, ...], times: JobTimes) -> list[float]:
    """Peak times of one micro-batch through the chunks of a rank."""
    total = [0.0] * len(PeakTimes._fields)
    for row in chunks:
        layers = 0
        for letter in row:
            done = [times.step[letter]]
            layers += letter in LAYERS
            if letter in LAYERS and (not job.recompute_layers or layers <= job.recompute_layers):
                done.append(times.phases[letter]["r"])
            for each in done:
                total = [one + other for one, other in zip(total, each, strict=True)]
    return total


def _link_seconds(job: Job, group: str, size_bytes: float) -> float:
    """Seconds of a gather of so many bytes over a group at the links' peak rates."""
    return sum(message.seconds(job.cluster) for message in gather(job, group, size_bytes))
