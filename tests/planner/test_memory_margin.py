"""An advised job leaves memory free for what the estimate does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.job_stages import stage_rows
from treadle.planner import SearchSpace, find_plan
from treadle.planner.job_estimate import JobEstimate, estimate_job
from treadle.planner.memory_margin import imbalance, leaves_margin, margin_bytes
from treadle.planner.moving_parts import moving_parts

QWEN = load_model("qwen3-30b-a3b")


def estimate(**given: object) -> JobEstimate:
    sizes = {"pp": 4, "ep": 8, "global_batch_size": 512, **given}
    job = Job(QWEN, load_cluster("h100:64"), **sizes)  # type: ignore[arg-type]
    return estimate_job(replace(job, layout=stage_rows(job)))


def test_fewer_experts_on_a_rank_are_less_even() -> None:
    shares = [imbalance(estimate(ep=ep).job) for ep in (2, 4, 8, 16)]
    assert shares == sorted(set(shares))
    assert imbalance(estimate(ep=1).job) == 0


def test_the_margin_grows_with_what_experts_save() -> None:
    assert margin_bytes(estimate(ep=16)) > margin_bytes(estimate(ep=8)) > 0.027 * estimate(ep=8).memory_bytes
    assert margin_bytes(estimate(recompute=("moe_act",))) < margin_bytes(estimate())


def test_norms_and_activations_are_recomputed_for_free() -> None:
    free = [moving_parts(estimate(recompute=names).job) for names in ((), ("layernorm",), ("layernorm", "moe_act"))]
    assert len(set(free)) == 1
    assert moving_parts(estimate(recompute=("layernorm", "moe")).job) > free[0]


@pytest.mark.slow
def test_the_advised_job_leaves_the_margin_where_one_as_fast_does() -> None:
    """The limit is a hair above the fastest job: next to it is one that recomputes norms."""
    space = SearchSpace(tp=(1,), pp=(4,), vpp=(6,), ep=(8,), micro_batch_size=(1,), schedules=("interleaved",))
    roomy = find_plan(QWEN, "h100:64", space=space)
    limit = roomy.fastest.memory_bytes + 1
    tight = find_plan(QWEN, "h100:64", space=space, memory_limit=limit)
    assert not leaves_margin(tight.fastest, limit)
    assert leaves_margin(tight.best, limit)
    assert tight.best.job.recompute
    assert "memory" in tight.reason
