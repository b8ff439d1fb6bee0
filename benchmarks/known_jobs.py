"""Well-known training jobs beside a plan: `python benchmarks/known_jobs.py [--search]`.

For each job: does the published configuration fit, is its measured step inside the interval that a plan prints, and,
with `--search`, what a plan chooses for the same model, GPUs, batch and precision, and whether its choice and the
published configuration are within the error of each other. Megatron-Bridge's are rows of
`benchmarks/held_to/data/bridge.csv`; the others have their source beside them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from held_to.runs import PublishedRun, bridge_runs, model_of
from treadle.calibrate.calibration import planned
from treadle.estimate import Job, load_cluster
from treadle.estimate.flops import model_flops
from treadle.estimate.job_memory import OUTSIDE_BYTES
from treadle.estimate.job_stages import stage_rows
from treadle.planner import SearchSpace, find_plan
from treadle.planner.find_plan import usable_bytes
from treadle.planner.job_estimate import describe, estimate_candidate, with_light_stages
from treadle.planner.run_errors import run_errors
from treadle.planner.space import Candidate


class KnownJob(NamedTuple):
    """A published configuration, and the range of its measured tokens a second and GPU."""

    source: str
    job: Job
    slowest: float
    fastest: float
    limit: int = 0
    """Bytes that a GPU may hold; 0 for what a plan takes."""


def known_jobs() -> Iterator[KnownJob]:
    """Yield the jobs."""
    yield _llama("Llama 3 Herd, section 3.3: MFU 38 to 43 %", gpus=16_384)
    yield _llama("the same, half the GPUs", gpus=8_192)
    yield _deepseek()
    for model, gpu, gpus, release in (
        ("kimi-k2", "gb300", 256, "26.06"),
        ("qwen3-235b-a22b", "gb200", 256, "26.06"),
        ("qwen3-30b-a3b", "h100", 16, "26.06"),
        ("qwen3-30b-a3b", "gb300", 8, "26.06"),
        ("gpt-oss-120b", "gb200", 64, "26.06"),
        ("llama3-70b", "h100", 64, "26.04.01"),
        ("llama3-8b", "gb200", 8, "25.11"),
    ):
        yield _bridge(model, gpu, gpus, release)


def _llama(source: str, gpus: int) -> KnownJob:
    job = Job(
        model_of("llama3-405b"),
        load_cluster(f"h100:{gpus}"),
        tp=8,
        pp=16,
        vpp=7,  # the report does not name it
        global_batch_size=2048,
        seq_len=8192,
        schedule="interleaved",
    )
    flops = model_flops(job.model, job.seq_len) / job.seq_len
    cut = replace(job, layout=stage_rows(job))
    return KnownJob(source, cut, 0.38 * 989e12 / flops, 0.43 * 989e12 / flops)


def _deepseek() -> KnownJob:
    """14.8T tokens in 2.664M hours of H800: the whole run, with its breaks.

    BF16 moments, FP8 caches and what is recomputed are of sections 3.2 and 3.3. Which layers a stage has is not
    published: they are those that a plan takes. Its framework is its own: it is held to what CUDA and NCCL leave,
    without what torch's allocator reserves beyond what it allocates.
    """
    job = Job(
        model_of("deepseek-v3"),
        load_cluster("h800:2048"),
        pp=16,
        vpp=2,
        ep=64,
        global_batch_size=15_360,
        seq_len=4096,
        precision="fp8",
        schedule="dualpipe",
        recompute=("mla_up_proj", "layernorm", "moe_act"),
        dispatch="fp8",
        moment_bytes=2,
        saved="fp8",
    )
    tokens, limit = 14.8e12 / 2.664e6 / 3600, job.cluster.memory_bytes - OUTSIDE_BYTES
    stages = estimate_candidate(Candidate(job, balanced=True))
    if stages.memory_bytes > limit:
        stages = with_light_stages(stages)
    return KnownJob("DeepSeek-V3 report, section 1", stages.job, tokens, tokens, limit)


def _bridge(model: str, gpu: str, gpus: int, release: str) -> KnownJob:
    wanted = (model, gpu, gpus, release, "optimizer")
    runs = [run for run in bridge_runs() if _key(run) == wanted]
    job = runs[0].job
    tokens = [job.global_batch_size * job.seq_len / gpus / run.seconds for run in runs if run.job == job]
    return KnownJob(f"Megatron-Bridge {release}", job, min(tokens), max(tokens))


def _key(run: PublishedRun) -> tuple[str, str, int, str, str]:
    return run.job.model.name, run.gpu, run.job.cluster.num_gpus, run.release, run.job.sharding


def published(known: KnownJob) -> dict[str, float | bool]:
    """Print what a plan prints of the published configuration."""
    job, estimate = known.job, planned(known.job)
    errors = run_errors(job)
    tokens = job.global_batch_size * job.seq_len / job.cluster.num_gpus / estimate.step_s
    limit = known.limit or usable_bytes(job.cluster)
    fits = estimate.memory_bytes <= limit
    inside = tokens / errors.high <= known.fastest and known.slowest <= tokens / errors.low
    print(f"{job.model.name} on {job.cluster.name}: {describe(job)}, {job.precision} ({known.source})")
    print(
        f"    measured {known.slowest:,.0f} to {known.fastest:,.0f} tokens/s/GPU; printed {tokens:,.0f}, "
        f"{tokens / errors.high:,.0f} to {tokens / errors.low:,.0f}; "
        f"{estimate.memory_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB"
        f"{'' if fits else ': DOES NOT FIT'}{'' if inside else ': OUTSIDE'}",
        flush=True,
    )
    return {"fits": fits, "inside": inside, "printed": round(tokens), "measured": round(known.fastest)}


def searched(known: KnownJob) -> dict[str, float | bool | str]:
    """Print what a plan chooses."""
    job, start = known.job, time.perf_counter()
    found = find_plan(
        job.model,
        job.cluster,
        tokens_per_batch=job.global_batch_size * job.seq_len,
        seq_len=job.seq_len,
        space=SearchSpace(
            precision=(job.precision,),
            cuda_graph=(job.cuda_graph,),
            balanced=(True,),
            gradient_bytes=(job.gradient_bytes,),
        ),
    )
    best, errors = found.best, run_errors(job)
    ahead = planned(job).step_s / best.step_s - 1
    near = abs(ahead) <= max(errors.typical, errors.high - 1)
    print(
        f"    plan: {describe(best.job)}: {100 * ahead:+.1f} % faster; {time.perf_counter() - start:.0f} s", flush=True
    )
    return {"chosen": describe(best.job), "ahead": round(100 * ahead, 1), "within_error": near}


def main() -> None:
    """Print each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="Search each job too.")
    search, figures = parser.parse_args().search, {}
    for known in known_jobs():
        name = f"{known.job.model.name} {known.job.cluster.name}"
        figures[name] = published(known) | (searched(known) if search else {})
    counts = {key: sum(bool(each.get(key)) for each in figures.values()) for key in ("fits", "inside", "within_error")}
    print(json.dumps({**counts, "jobs": len(figures), "each": figures}))


if __name__ == "__main__":
    main()
