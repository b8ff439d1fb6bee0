"""Small jobs to measure, and clusters that are other than their preset says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from treadle.calibrate.calibration import planned
from treadle.calibrate.runs_file import MeasuredRun
from treadle.estimate import Cluster, Job, ModelShape, load_cluster, load_model
from treadle.estimate.job_stages import stage_rows


@cache
def tiny(name: str, layers: int = 4) -> ModelShape:
    """A preset with few layers."""
    return replace(load_model(name), num_hidden_layers=layers, name=f"{name}-{layers}")


def make_job(cluster: Cluster, model: str = "llama3-8b", **given: Any) -> Job:
    """A job of a preset with four layers, cut evenly."""
    job = Job(tiny(model), cluster, **{"global_batch_size": 64, "cuda_graph": "partial", **given})
    return replace(job, layout=stage_rows(job))


def dense_jobs(cluster: Cluster) -> list[Job]:
    """Jobs that differ in what they spend time on."""
    cuts: list[dict[str, Any]] = [{"tp": tp, "pp": pp} for tp in (1, 2, 4) for pp in (1, 2)]
    shapes: list[dict[str, Any]] = [{"seq_len": 2048, "micro_batch_size": 2}, {"seq_len": 8192}, {"seq_len": 16384}]
    return [make_job(cluster, **cut, **shape) for cut in cuts for shape in shapes]


def on(cluster: Cluster, job: Job) -> Job:
    """A job on another cluster of its size."""
    return replace(job, cluster=replace(cluster, num_gpus=job.cluster.num_gpus))


def measure(job: Job, truth: Cluster, factor: float = 1.0) -> MeasuredRun:
    """A run of the job, whose step is what the simulator says for the true cluster, times a factor."""
    return MeasuredRun(job, factor * planned(on(truth, job)).step_s, "run", 2)


def measure_all(jobs: Sequence[Job], truth: Cluster, factors: Sequence[float]) -> list[MeasuredRun]:
    """Runs of jobs, each with its factor."""
    return [measure(job, truth, factor) for job, factor in zip(jobs, factors, strict=True)]


def h100(num_gpus: int = 16, constants: Mapping[str, float] = MappingProxyType({})) -> Cluster:
    """The preset with some constants replaced."""
    cluster = load_cluster(f"h100:{num_gpus}")
    return replace(cluster, efficiency={**cluster.efficiency, **constants})
