"""The constants of a cluster that the simulated step of a job depends on, and which of them a run constrains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from treadle.estimate import Cluster, Job
from treadle.estimate.efficiency import EFFICIENCY
from treadle.estimate.rates import constant

_PLAIN = (
    "memory",
    "attention",
    "attention_narrow",
    "permute",
    "tp",
    "cp",
    "ep_nvlink",
    "ep_nic",
    "pp",
    "dp",
    "pcie",
    "latency_us",
    "optimizer",
    "step_us",
    "expert_us",
    "overlap_us",
    "dp_hidden",
)
_BETWEEN_DOMAINS = ("cp", "pp", "dp", "dp_hidden")
"""Shares of whichever link a message takes: NVLink inside a domain, NICs between domains."""


def constants_of(job: Job) -> tuple[str, ...]:
    """Return the constants that the step of a job may depend on, as [efficiency] names them.

    What differs by precision or graph has its own name, even where the cluster has one for all: its runs constrain it.

    Example:
        >>> from treadle.estimate import Job, load_cluster, load_model
        >>> job = Job(load_model("llama3-8b"), load_cluster("h100:8"), global_batch_size=8)
        >>> constants_of(job)[:3]
        ('gemm_bf16', 'grouped_bf16', 'launch_us_none')

    """
    kinds = (job.precision, "bf16")
    by_kind = [f"{name}_{kind}" for name in ("gemm", "grouped") for kind in kinds]
    by_kind += [f"cast_{job.precision}"] if job.precision != "bf16" else []
    return (*dict.fromkeys(by_kind), f"launch_us_{job.cuda_graph}", *_PLAIN)


def partners_of(job: Job) -> dict[str, str]:
    """Return what shares are hidden of: a step depends on the product of what shows and its partner."""
    return {"dp_hidden": "dp"}


def untold_by(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """Return the constants that a run uses and does not constrain for the cluster.

    A run inside one NVLink domain shows what NVLink does. In a cluster of several domains the same messages go over
    NICs.
    """
    inside = job.cluster.num_gpus <= cluster.nvlink_domain < cluster.num_gpus
    return _BETWEEN_DOMAINS if inside else ()


def base_of(key: str) -> str:
    """Return a constant without its precision or graph: gemm of gemm_fp8."""
    return key if key in EFFICIENCY else key.rpartition("_")[0]


def value_of(cluster: Cluster, key: str) -> float:
    """Return a constant by its name in [efficiency], wherever the cluster has it from."""
    base = base_of(key)
    return constant(cluster, base, key.removeprefix(base).removeprefix("_"))


def slower(key: str, value: float, factor: float) -> float:
    """Return a constant such that what it is about takes `factor` times as long.

    Example:
        >>> slower("gemm", 0.8, 2.0), slower("latency_us", 8.0, 2.0), slower("dp_hidden", 0.8, 0.5)
        (0.4, 16.0, 0.9)

    """
    if key.endswith("_hidden"):
        return max(0.0, 1 - (1 - value) * factor)
    return value * factor if _is_time(key) else value / factor


def how_much_slower(key: str, value: float, other: float) -> float:
    """Return the factor that makes another constant of this one: the inverse of `slower`.

    Example:
        >>> how_much_slower("gemm", 0.8, 0.4), how_much_slower("latency_us", 8.0, 16.0)
        (2.0, 2.0)

    """
    if key.endswith("_hidden"):
        return (1 - other) / (1 - value)
    return other / value if _is_time(key) else value / other


def _is_time(key: str) -> bool:
    """True if a larger constant takes longer, and is no share of a rate."""
    return base_of(key).endswith("_us")


def with_constants(cluster: Cluster, constants: Mapping[str, float] | Iterable[tuple[str, float]]) -> Cluster:
    """Return a cluster with other constants."""
    return replace(cluster, efficiency={**cluster.efficiency, **dict(constants)})
