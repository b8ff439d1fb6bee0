"""DualPipe holds each stage on two ranks: they reduce gradients together, and a micro-batch meets a rank once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from treadle.estimate import Job, estimate_costs, load_cluster, load_model
from treadle.estimate.data_parallel import PARAM_BYTES, data_parallel_seconds
from treadle.estimate.group_messages import group_of
from treadle.estimate.job_memory import estimate_memory
from treadle.estimate.job_stages import rank_rows
from treadle.estimate.rates import constant

MODEL = replace(load_model("deepseek-v3"), num_hidden_layers=16, num_nextn_predict_layers=0, first_k_dense_replace=0)


def _job(schedule: str, **given: Any) -> Job:
    one = {"1f1b": 1, "interleaved": 2, "dualpipe": 2, "dualpipev": 2}[schedule]
    sizes = {"cluster": load_cluster("h800:64"), "pp": 8, "ep": 8, "global_batch_size": 256, **given}
    return Job(MODEL, schedule=schedule, vpp=one, **sizes)


def test_stages_are_those_of_the_placement() -> None:
    assert [_job(name).num_stages for name in ("1f1b", "interleaved", "dualpipe", "dualpipev")] == [8, 16, 8, 16]
    assert len({len(rank_rows(_job(name))) for name in ("1f1b", "dualpipe")}) == 1


@pytest.mark.parametrize("group", ["dp", "expert_dp"])
def test_both_holders_of_a_stage_are_in_its_group(group: str) -> None:
    two, one = group_of(_job("dualpipe"), group), group_of(_job("dualpipev"), group)
    assert two[0] == 2 * one[0]
    assert two[1] == one[1], "the other holder is in another domain"
    inside = _job("dualpipe", cluster=load_cluster("gb200:64"))
    assert group_of(inside, group) == (two[0], two[0])
    assert group_of(_job("dualpipe"), "ep") == group_of(_job("dualpipev"), "ep")


def test_one_pipeline_reduces_gradients_too() -> None:
    alone = {"cluster": load_cluster("h800:8"), "ep": 1, "global_batch_size": 32}
    two, one = _job("dualpipe", **alone), _job("1f1b", **alone)
    assert two.dp == one.dp == 1
    assert "reduce_grad" in estimate_costs(two).message
    assert "reduce_grad" not in estimate_costs(one).message
    assert "gather_params" in estimate_costs(two).step
    assert "gather_params" not in estimate_costs(one).step
    half = 1e9 * (two.gradient_bytes + PARAM_BYTES) / 2 / two.cluster.nvlink_bandwidth / constant(two.cluster, "dp")
    assert data_parallel_seconds(two, 1e9, 0, two.gradient_bytes + PARAM_BYTES) == pytest.approx(half)


def test_optimizer_state_of_all_stages_is_held_once() -> None:
    two, one = _job("dualpipe"), _job("1f1b")
    held = [sum(rank.optimizer for rank in estimate_memory(job)) for job in (two, one)]
    assert held[0] == pytest.approx(held[1], rel=1e-3)
    twice = [sum(rank.parameters for rank in estimate_memory(job)) for job in (two, one)]
    assert twice[0] == pytest.approx(2 * twice[1], rel=1e-3)


def test_recomputed_layers_are_a_share_of_a_stage() -> None:
    job = _job("dualpipe", recompute=("full",), recompute_layers=1)
    plain, inlined = estimate_costs(job).layer, estimate_costs(job, inline_recompute=True).layer
    assert inlined["mlp_b"] == plain["mlp_b"] + round(plain["mlp_r"] / 2), "one of two layers"
