"""What is uncertain about a plan, by source: what published runs bound, and what no run backs."""

from __future__ import annotations

from typing import NamedTuple

from treadle.estimate import Job
from treadle.estimate.cluster import GIB
from treadle.planner.memory_margin import imbalance, margin_bytes
from treadle.planner.plan_report import schedule_text
from treadle.planner.planned_step import PlannedStep
from treadle.planner.run_errors import RunErrors, graphs_text


class Doubt(NamedTuple):
    """A source of uncertainty. Those that the interval of the step covers come from published runs."""

    source: str
    text: str
    covered: bool = False


def doubts(chosen: PlannedStep, errors: RunErrors, memory_limit: int) -> tuple[Doubt, ...]:
    """Return what is uncertain about a chosen job, what is covered by the interval of its step first."""
    job, free = chosen.estimate.job, memory_limit - chosen.estimate.memory_bytes
    unrun = schedule_text(job.schedule)
    found = [
        Doubt("step time", _runs_text(errors), covered=True),
        Doubt(
            "memory",
            f"counted as Megatron-core with Transformer Engine allocates it; the fullest rank leaves {free / GIB:.1f} "
            f"GiB of the limit, and the limit leaves {(job.cluster.memory_bytes - memory_limit) / GIB:.1f} GiB of the "
            "GPU to CUDA, NCCL and torch's allocator",
        ),
    ]
    if not errors.on_gpu:
        text = (
            f"no published run of this kind is on {job.cluster.gpu or job.cluster.name} {graphs_text(job.cuda_graph)}"
        )
        found.append(Doubt("constants", f"{text}: achieved rates and range are those of the nearest"))
    if unrun is not None:
        found.append(Doubt("schedule", unrun))
    if job.sharding == "parameters":
        found.append(Doubt("sharding", "published runs that shard parameters (FSDP) are not among those of the range"))
    if job.recompute:
        text = f"{recomputed_text(job)}: their forwards' time once more, which few published runs back"
        found.append(Doubt("recompute", text))
    if job.offload:
        found.append(
            Doubt("offload", "no published run here offloads: its time is bandwidth between GPU and host alone")
        )
    if job.model.is_moe:
        text = "every expert gets the same share of tokens; unbalanced routing takes longer"
        if over := imbalance(job):
            more = margin_bytes(chosen.estimate) / GIB
            text += f"; {over:.0%} more tokens on a rank, and the estimate's error, need {more:.1f} GiB more memory"
        found.append(Doubt("experts", text))
    return (
        *found,
        Doubt("network", "other jobs on the same switches, and slow or failing GPUs, are not in the step"),
        Doubt("cost", "GPU-hours are of steps alone: restarts, checkpoints, evaluation and data loading add to them"),
    )


def recomputed_text(job: Job) -> str:
    """Return the parts of layers that a job recomputes, in words."""
    return "whole layers" if "full" in job.recompute else " and ".join(job.recompute)


def _runs_text(errors: RunErrors) -> str:
    return (
        f"{errors.like}: 80 % of {errors.runs:,} published runs took {errors.low - 1:+.0%} to {errors.high - 1:+.0%} "
        f"against the step that their command printed, each with its own configuration left out of the fit; half are "
        f"within {errors.typical:.1%}"
    )
