"""A plan for programs to read, and the texts that the terminal and the page share."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.estimate import Job
from treadle.estimate.cluster import GIB
from treadle.estimate.job_memory import MemoryEstimate
from treadle.folding.stragglers import StragglerStudy
from treadle.ir.blocks import write_layout
from treadle.planner.job_estimate import Alternative, JobEstimate, describe
from treadle.planner.judged_job import Change, JudgedJob
from treadle.planner.plan_files import untrainable
from treadle.planner.planned_step import PlannedStep
from treadle.planner.ranked_search import SearchResult
from treadle.planner.run_errors import run_errors
from treadle.schedules import family
from treadle.trainers import ReadJob

if TYPE_CHECKING:
    from treadle.planner.printed_plan import (
        ChangeJson,
        ChosenJson,
        JobJson,
        JudgedJson,
        MemoryJson,
        PlanJson,
        UncertaintyJson,
    )


def plan_object(
    found: SearchResult, chosen: PlannedStep, others: tuple[Alternative, ...], study: StragglerStudy | None = None
) -> PlanJson:
    """Return a dict for JSON: the chosen job, the front, and what other values of its knobs would cost."""
    job = chosen.estimate.job
    return {
        "model": job.model.name,
        "cluster": job.cluster.name,
        "gpus": job.cluster.num_gpus,
        "tokens_per_batch": job.global_batch_size * job.seq_len,
        "memory_limit_bytes": found.memory_limit,
        "candidates": found.num_candidates,
        "too_large": len(found.too_large),
        "simulated": found.num_simulated,
        "chosen": chosen_object(chosen),
        "reason": found.reason,
        "fastest": job_object(found.fastest),
        "without_offload": job_object(found.without_offload) if found.without_offload is not None else None,
        "front": [job_object(each) for each in found.front],
        "alternatives": [
            {
                "knob": other.knob,
                "value": other.value,
                "fits": other.fits,
                "slower": other.slower,
                "memory_bytes": other.estimate.memory_bytes,
                "reason": other.reason,
            }
            for other in others
        ],
        "unable": [{"schedule": name, "reason": reason} for name, reason in found.unable],
        "stragglers": study.as_dict() if study is not None else None,
    }


def chosen_object(chosen: PlannedStep) -> ChosenJson:
    """Return a job in full: its knobs, its step with the range, and its memory by part."""
    job = chosen.estimate.job
    return {
        **job_object(chosen.estimate),
        "step_s": chosen.step_s,
        "uncertainty": _uncertainty(chosen),
        "tokens_per_s_per_gpu": chosen.tokens_per_s_per_gpu,
        "tflops_per_gpu": chosen.flops_per_s_per_gpu / 1e12,
        "run_tokens": chosen.num_tokens,
        "run_days": chosen.days,
        "run_gpu_hours": chosen.gpu_hours,
        "mfu": chosen.mfu,
        "bubble": chosen.metrics.idle_share,
        "exposed_communication": chosen.exposed_share,
        "parts": [{"part": name, "seconds": seconds} for name, seconds in chosen.parts.items()],
        "clean": chosen.report.clean,
        "host_bytes": chosen.host_bytes,
        "untrainable": untrainable(job),
        "memory": [_memory_object(rank) for rank in chosen.estimate.memory],
    }


def judged_object(read: ReadJob, judged: JudgedJob, chosen: PlannedStep) -> JudgedJson:
    """Return a dict for JSON: the job of a trainer's file, and what to change first."""
    return {
        "trainer": read.trainer,
        "model": read.job.model.name,
        "cluster": read.job.cluster.name,
        "gpus": read.job.cluster.num_gpus,
        "memory_limit_bytes": judged.memory_limit,
        "fits": judged.fits,
        "job": chosen_object(chosen),
        "error": judged.error,
        "changes": [_change_object(each) for each in judged.changes],
        "pair": _change_object(judged.pair) if judged.pair is not None else None,
        "num_read": read.num_read,
        "unread": [{"setting": each.setting, "value": each.value, "matters": each.matters} for each in read.unread],
        "notes": list(read.notes),
    }


def _change_object(change: Change) -> ChangeJson:
    return {"settings": dict(change.settings), "step": change.step, "memory_bytes": change.memory_bytes}


def _uncertainty(chosen: PlannedStep) -> UncertaintyJson:
    errors = run_errors(chosen.estimate.job)
    return {
        "low_s": chosen.step_s * errors.low,
        "high_s": chosen.step_s * errors.high,
        "typical": errors.typical,
        "pair": errors.pair,
        "runs": errors.runs,
        "like": errors.like,
    }


def _memory_object(rank: MemoryEstimate) -> MemoryJson:
    return {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
        "activations": rank.activations,
        "logits": rank.logits,
        "temporary": rank.temporary,
        "buffers": rank.buffers,
    }


def job_object(estimate: JobEstimate) -> JobJson:
    """Return a job's knobs, its step and its memory."""
    job = estimate.job
    assert job.layout is not None
    return {
        "schedule": job.schedule,
        "tp": job.tp,
        "cp": job.cp,
        "pp": job.pp,
        "vpp": job.vpp,
        "ep": job.ep,
        "dp": job.dp,
        "micro_batch_size": job.micro_batch_size,
        "microbatches": job.num_microbatches,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "precision": job.precision,
        "layout": write_layout(job.layout, dense=True),
        "recompute": list(job.recompute),
        "offload": list(job.offload),
        "sharding": job.sharding,
        "gradient_bytes": job.gradient_bytes,
        "moment_bytes": job.moment_bytes,
        "saved": job.saved,
        "cuda_graph": job.cuda_graph,
        "step_s": estimate.step_s,
        "memory_bytes": estimate.memory_bytes,
    }


def beside_texts(found: SearchResult) -> dict[str, str]:
    """Return what stands beside the advised job: the fastest, why it is not advised, and the best without offload."""
    beside = {}
    if found.reason:
        beside = {"why": found.reason, "fastest": f"{found.fastest.step_s:.3f} s: {describe(found.fastest.job)}"}
    searched = any(not each.job.offload for each in (*found.fitting, *found.too_large))
    if searched and (found.best.job.offload or found.fastest.job.offload):
        plain = found.without_offload
        beside["without offload"] = (
            f"{plain.step_s:.3f} s: {describe(plain.job)}" if plain is not None else "nothing fits"
        )
    return beside


def schedule_text(name: str) -> str | None:
    """Return a warning about a schedule that no public trainer runs, or None."""
    if family(name).trainers:
        return None
    return f"{name}: neither Megatron-LM nor torch.distributed.pipelining runs it"


def show_count(count: int) -> str:
    """Return a count with the largest prefix that leaves at most two decimals: 15T, 1.28M, 4,194,304."""
    for prefix, unit in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if count >= unit and count * 100 % unit == 0:
            return f"{count / unit:g}{prefix}"
    return f"{count:,}"


def step_text(chosen: PlannedStep) -> str:
    """Return the step with the range that holds 80 % of published runs like it."""
    errors = run_errors(chosen.estimate.job)
    low, high = (f"{chosen.step_s * factor:.3g}" for factor in (errors.low, errors.high))
    return f"{chosen.step_s:.3f} s, {low} to {high} ({errors.like}: {errors.runs} published runs)"


def batch_text(job: Job) -> str:
    """Say what a step trains on."""
    tokens = job.global_batch_size * job.seq_len
    return f"{tokens:,} tokens: {job.global_batch_size:,} sequences of {job.seq_len:,}, in {job.precision}"


def host_text(chosen: PlannedStep) -> str:
    """Return the host memory that offloading takes."""
    share = chosen.estimate.job.cluster.host_memory_bytes
    return f"up to {chosen.host_bytes / GIB:.1f} GiB per GPU, of its share of {share / GIB:.1f}"


def count_text(found: SearchResult) -> str:
    """Say how many jobs were considered, and what became of them."""
    others = found.num_simulated + len(found.too_large) < found.num_candidates
    return (
        f"{found.num_candidates:,} candidates: {len(found.too_large):,} do not fit into "
        f"{found.memory_limit / GIB:.1f} GiB, {found.num_simulated:,} simulated"
        + (", the rest pruned: a lower bound is already beaten" if others else "")
    )


def study_text(study: StragglerStudy) -> str:
    """Say which schedule slow GPUs slow down least, and which is the fastest with slow GPUs."""
    least, fastest = study.least_slowed.name, study.fastest.name
    if least == fastest:
        return f"{least} suffers least and is the fastest with slow GPUs"
    return f"{least} suffers least, {fastest} is the fastest with slow GPUs"


def commands(chosen: PlannedStep, directory: Path) -> list[str]:
    """Return the command lines that take the files of a plan: it is drawn and, if the trainer can, rehearsed."""
    train = shlex.quote(str(directory / "train.toml"))
    run = [f"python -m treadle.train --config {train} --dry-run"] if untrainable(chosen.estimate.job) is None else []
    return [f"treadle draw {shlex.quote(str(directory))}", *run]
