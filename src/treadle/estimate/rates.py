"""Work to seconds: on the device the sum of its terms at peak rates, each divided by an achieved share; on the host
what it launches. `treadle.estimate.op_costs` takes the longer of both, block by block.

A GEMM takes its FLOPs at the peak rate and its bytes at the memory's: small or narrow GEMMs achieve less
of the peak because they move more bytes a FLOP. A share above 1 means that a part of that time is hidden by other
work. A cluster's [efficiency] section replaces the defaults of `treadle.estimate.efficiency`, entry by entry.
"""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from treadle.estimate.cluster import Cluster, family_of
from treadle.estimate.efficiency import EFFICIENCY
from treadle.estimate.job import Job
from treadle.estimate.work import BF16, OpWork

NARROW_HEAD = 64
"""Heads that are no wider have a share of attention's peak rate of their own."""

_ELEMENT = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5625}
"""Bytes of an element, with its share of a scale."""


class PeakTimes(NamedTuple):
    """Seconds of some work at peak rates, term by term; `latency` is a count."""

    gemm: float = 0.0
    gemm_bf16: float = 0.0
    """GEMMs that stay BF16 whatever the job's precision: the head, the router."""

    gemm_bytes: float = 0.0
    grouped: float = 0.0
    grouped_bytes: float = 0.0
    attention: float = 0.0
    vector: float = 0.0
    cast: float = 0.0
    permute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep_nvlink: float = 0.0
    ep_nic: float = 0.0
    latency: float = 0.0


def at_peak(work: OpWork, cluster: Cluster, precision: str) -> PeakTimes:
    """Return the seconds of some work at peak rates."""
    rate, bf16 = cluster.peak(precision), cluster.peak("bf16")
    memory, element = cluster.memory_bandwidth, _ELEMENT[precision]
    gemm = gemm_bf16 = gemm_bytes = grouped = grouped_bytes = 0.0
    for each in work.gemms:
        if each.precision and each.precision != precision:
            gemm_bf16 += each.flops / bf16
            gemm_bytes += each.moved_bytes(BF16) / memory
        else:
            gemm += each.flops / rate
            gemm_bytes += each.moved_bytes(element) / memory
    for each in work.grouped:
        grouped += each.flops / rate
        grouped_bytes += each.moved_bytes(element) / memory
    links = {"tp": 0.0, "cp": 0.0, "etp": 0.0}
    ep_nvlink = ep_nic = 0.0
    for message in work.messages:
        if message.group == "ep":
            ep_nvlink += message.nvlink_seconds(cluster)
            ep_nic += message.nic_seconds(cluster)
        else:
            links[message.group] += message.seconds(cluster)
    return PeakTimes(
        gemm,
        gemm_bf16,
        gemm_bytes,
        grouped,
        grouped_bytes,
        work.attention_flops / bf16,
        work.vector_bytes / memory,
        work.cast_bytes / memory,
        work.permuted_bytes / memory,
        links["tp"] + links["etp"],
        links["cp"],
        ep_nvlink,
        ep_nic,
        float(len(work.messages)),
    )


def constant(cluster: Cluster, name: str, precision: str = "") -> float:
    """Return a constant: the cluster's, by precision if it has it, or the default.

    Example:
        >>> from treadle.estimate import load_cluster
        >>> constant(load_cluster("h800:8"), "pcie")
        0.85

    """
    key = constant_key(cluster, name, precision)
    return cluster.efficiency[key] if key in cluster.efficiency else EFFICIENCY[key][0]


def constant_key(cluster: Cluster, name: str, precision: str = "") -> str:
    """Return the name under which a constant is found in [efficiency], or in the defaults.

    Example:
        >>> from treadle.estimate import load_cluster
        >>> constant_key(load_cluster("h800:8"), "gemm", "mxfp8"), constant_key(load_cluster("a100:8"), "gemm", "bf16")
        ('gemm_fp8', 'gemm')

    """
    family = family_of(precision)
    for key in (f"{name}_{precision}", f"{name}_{family}", name):
        if key in cluster.efficiency:
            return key
    for key in (f"{name}_{family}", name):
        if key in EFFICIENCY:
            return key
    raise KeyError(name)


def factors(job: Job) -> PeakTimes:
    """Return what multiplies each term of `PeakTimes`: one over the achieved share, or seconds of one."""
    cluster, precision = job.cluster, job.precision

    def over(name: str, by: str = "") -> float:
        return 1.0 / constant(cluster, name, by)

    memory = over("memory")
    return PeakTimes(
        over("gemm", precision),
        over("gemm", "bf16"),
        memory,
        over("grouped", precision),
        memory,
        over("attention_narrow" if job.model.head_dim <= NARROW_HEAD and not job.model.is_mla else "attention"),
        memory,
        over("cast", precision),
        over("permute"),
        over("tp"),
        over("cp"),
        over("ep_nvlink"),
        over("ep_nic"),
        1e-6 * constant(cluster, "latency_us"),
    )


def seconds(times: PeakTimes, by: PeakTimes) -> float:
    """Return the seconds of some work: its terms, each times its factor."""
    return float(sum(map(mul, times, by)))


def host_seconds(work: OpWork, job: Job, *, overlapped: bool = False) -> float:
    """Return the seconds that the host takes to launch some work; `overlapped`: under a schedule that is."""
    launch, expert = constant(job.cluster, "launch_us", job.cuda_graph), constant(job.cluster, "expert_us")
    launch += constant(job.cluster, "overlap_us") if overlapped else 0.0
    return 1e-6 * (work.launches * launch + work.expert_launches * expert)
