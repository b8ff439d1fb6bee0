"""Stages of an overlapped schedule: exchanges run beside what is computed, so a layer takes the longer of both."""

from __future__ import annotations

from dataclasses import replace

from treadle.estimate import Job, load_cluster, load_model
from treadle.planner.job_estimate import estimate_candidate
from treadle.planner.space import Candidate

_JOB = Job(
    load_model("deepseek-v3"),
    load_cluster("h800:2048"),
    pp=16,
    vpp=2,
    ep=64,
    global_batch_size=15_360,
    precision="fp8",
    schedule="dualpipe",
)


def test_head_and_mtp_count_for_more_layers_where_exchanges_are_hidden() -> None:
    """With exchanges added to a layer, the last stage would get a layer beside the MTP block and the head."""
    balanced = estimate_candidate(Candidate(_JOB, balanced=True)).simulated()
    serial = ("Edddtt", "ttt", *("tttt",) * 13, "tmL")
    other = estimate_candidate(Candidate(replace(_JOB, layout=serial))).simulated()
    assert balanced.job.layout is not None
    assert balanced.job.layout[-1] == "mL"
    assert balanced.step_s < 0.95 * other.step_s
