"""Moving parts of a job: what a person has to get right beside the model itself.

Jobs compare by these, in this order; the fewer, the simpler:

    1. a schedule that no public trainer runs
    2. offload
    3. recomputation: the largest module first, in the order of `_RECOMPUTED`; norms, activations and MLA's
       up-projection are free: a flag, and next to no time
    4. kinds of parallelism in use, TP, CP, PP, VPP, EP; one more where only one public trainer runs the schedule
       (wgrad split off, exchanges overlapped)
    5. what is sharded over replicas beside the optimizer: gradients, then parameters
    6. the bytes of a layer that are offloaded
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from treadle.estimate import Job
from treadle.estimate.host_copies import offloaded_bytes
from treadle.estimate.job import SHARDINGS
from treadle.schedules import family

_RECOMPUTED = (
    "layernorm",
    "mlp_act",
    "moe_act",
    "core_attn",
    "mla_up_proj",
    "shared_experts",
    "attn",
    "mlp",
    "moe",
    "full",
)
"""Modules from the smallest to the largest in what is computed twice."""


_FREE = ("layernorm", "mlp_act", "moe_act", "mla_up_proj")


class MovingParts(NamedTuple):
    """The moving parts of a job, in the order in which they compare."""

    untrained: bool
    offload: bool
    recompute: tuple[int, ...]
    kinds: int
    sharded: int
    offloaded_bytes: int


def moving_parts(job: Job) -> MovingParts:
    """Return the moving parts of a job.

    Example:
        >>> from treadle.estimate import load_cluster, load_model
        >>> job = Job(load_model("llama3-8b"), load_cluster("h100:8"), tp=2, pp=2, global_batch_size=8)
        >>> moving_parts(job).kinds
        2

    """
    trainers = family(job.schedule).trainers
    return MovingParts(
        not trainers,
        bool(job.offload),
        tuple(sorted((_RECOMPUTED.index(name) for name in job.recompute if name not in _FREE), reverse=True)),
        len(_kinds(job)) + (len(trainers) == 1),
        max(SHARDINGS.index(job.sharding), SHARDINGS.index(Job.sharding)),
        offloaded_bytes(job, "t"),
    )


def parts_left_out(job: Job, other: Job) -> str:
    """Return the moving parts that another job has and this one lacks, as text: "no VPP, no recompute attn"."""
    mine = set(_names(job))
    return ", ".join(f"no {name}" for name in _names(other) if name not in mine)


def _names(job: Job) -> Iterator[str]:
    trainers = family(job.schedule).trainers
    yield from _kinds(job)
    if len(trainers) < 2:
        yield job.schedule
    yield from (f"recompute {name}" for name in job.recompute if name not in _FREE)
    yield from (f"offload {name}" for name in job.offload)
    if job.sharding in ("gradients", "parameters"):
        yield f"{job.sharding} sharded"


def _kinds(job: Job) -> list[str]:
    sizes = {"TP": job.tp, "CP": job.cp, "PP": job.pp, "VPP": job.vpp, "EP": job.ep}
    return [name for name, size in sizes.items() if size > 1]
