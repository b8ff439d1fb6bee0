"""What a step consists of, on a rank on average: parts that add up to it.

What the device computes is split by its terms, each at its achieved rate. Launches are what the host makes blocks take
beyond that. Of communication counts what no computation hides: of experts, then between stages, then of replicas. The
rest is idle: the bubble.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from treadle.estimate import Job
from treadle.estimate.block_work import actions
from treadle.estimate.job_stages import stage_rows
from treadle.estimate.rates import PeakTimes, at_peak, factors
from treadle.ir.ops import COMMUNICATION, COMPUTE_PARTS, LaneKind
from treadle.ir.trace import Trace
from treadle.planner.job_estimate import JobEstimate
from treadle.simulator.metrics import Metrics, exposed_by

_TERMS = {
    "GEMM": ("gemm", "gemm_bf16", "gemm_bytes", "grouped", "grouped_bytes"),
    "attention": ("attention",),
    "elementwise": ("vector", "cast"),
    "permute": ("permute",),
    "TP": ("tp",),
    "CP": ("cp",),
    "EP": ("ep_nvlink", "ep_nic"),
}
_LANES = {
    "EP": (LaneKind.EP,),
    "PP": (LaneKind.SEND, LaneKind.RECV, LaneKind.TIED),
    "DP": COMMUNICATION,
}


def step_parts(estimate: JobEstimate, trace: Trace, metrics: Metrics) -> dict[str, float]:
    """Return the seconds of each part of a step; parts of no length are left out."""
    job, tick = estimate.job, 1e-6 / trace.clock.ticks
    found: dict[str, float] = defaultdict(float, _computed(job))
    optimizer = tick * estimate.costs.step.get("optimizer", 0)
    busy = tick * sum(rank.busy for rank in metrics.ranks) / len(metrics.ranks)
    whole = job.sharding in ("gradients", "parameters")  # what layers wait for gathers is in their times
    found["launches and DP" if whole else "launches"] += busy - optimizer - sum(found.values())
    found["optimizer"] += optimizer
    lanes = exposed_by(trace, tuple(_LANES.values()))
    for name, exposed in zip(_LANES, lanes, strict=True):
        found[name] += tick * exposed
    found["idle"] = tick * metrics.makespan - sum(found.values())
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def parts_text(parts: dict[str, float]) -> str:
    """Return the parts as shares of the step, the largest first."""
    whole = sum(parts.values())
    shares = sorted(((seconds / whole, name) for name, seconds in parts.items()), reverse=True)
    return ", ".join(f"{name} {share:.1%}" for share, name in shares)


def _computed(job: Job) -> dict[str, float]:
    """Return the seconds that a rank, on average, spends on each part of what the device computes."""
    by, found = factors(job), defaultdict[str, float](float)
    blocks = Counter("".join(stage_rows(job)))
    latency = next((name for name, size in (("TP", job.tp), ("CP", job.cp)) if size > 1), "EP")
    for block, count in blocks.items():
        share = count * job.num_microbatches / job.pp
        for times in _times(job, block):
            spent = PeakTimes(*(one * other for one, other in zip(times, by, strict=True)))
            for name, terms in _TERMS.items():
                found[name] += share * sum(getattr(spent, term) for term in terms)
            found[latency] += share * spent.latency
    return dict(found)


def _times(job: Job, block: str) -> list[PeakTimes]:
    """Return the terms of all that a rank's compute lane does for a block."""
    again = {*COMPUTE_PARTS} if "full" in job.recompute else {*job.recompute}
    found = []
    for name, work in actions(job, block).items():
        part, _, phase = name.rpartition("_")
        exchanged = part in ("dispatch", "combine")
        repeated = exchanged and phase == "f" and "full" in job.recompute and block in "td"
        if repeated or (not exchanged and (phase != "r" or part in again)):
            found.append(at_peak(work, job.cluster, job.precision))
    return found
