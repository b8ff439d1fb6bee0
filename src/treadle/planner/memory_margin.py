"""The memory that an advised job leaves free: for the estimate's error, and for experts that get more than their share.

A job that leaves it is advised before one that does not. What does not leave it is not refused.
"""

from __future__ import annotations

import math

from treadle.estimate import Job
from treadle.estimate.activations import ActivationCut, saved_by_part
from treadle.planner.job_estimate import JobEstimate

ERROR = 0.027
"""The most that the memory of the 43 runs of benchmarks/held_to/data/simumax.csv is off."""

VIOLATION = 0.72
"""By how much the fullest expert exceeds the mean of all, as a share of it, in a model of 1B with an auxiliary loss for
balance (arXiv 2408.15664, table 2: MaxVio). Experts of one rank balance each other: the square root of their number."""


def margin_bytes(estimate: JobEstimate) -> int:
    """Return the bytes that the fullest rank of a job may need beyond its estimate."""
    fullest = max(estimate.memory, key=lambda rank: rank.total)
    routed = fullest.activations * _routed_share(estimate.job) + fullest.temporary
    over = imbalance(estimate.job)
    return int(ERROR * fullest.total + (over * routed if over else 0))


def imbalance(job: Job) -> float:
    """Return by how much the tokens of the fullest rank's experts exceed the mean, as a share; 0 without EP."""
    if not job.model.is_moe or job.ep == 1:
        return 0.0
    return VIOLATION / math.sqrt(job.model.num_experts / job.ep)


def leaves_margin(estimate: JobEstimate, limit: int) -> bool:
    """Return True if a job fits with the margin."""
    return estimate.memory_bytes + margin_bytes(estimate) <= limit


def _routed_share(job: Job) -> float:
    """Return the share of a layer's saved bytes that grows with the tokens of its experts."""
    if not job.model.is_moe or "full" in job.recompute:
        return 0.0
    cut = ActivationCut.of(job, "p2p", fused_loss=True)
    parts = saved_by_part(cut, "t")
    kept = {
        name: [each for each in tensors if set(each.discarded_by).isdisjoint(job.recompute)]
        for name, tensors in parts.items()
    }
    routed = [each for each in kept["mlp"] if each.offloaded_by in ("expert_fc1", "moe_act", "expert_fc2")]
    return cut.size(routed) / max(1.0, sum(cut.size(each) for each in kept.values()))
