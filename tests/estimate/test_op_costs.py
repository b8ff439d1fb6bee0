"""Costs of a job's ops: what a step of them takes, what recomputation and copies add, and that files keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import treadle
from treadle.costs import parse
from treadle.costs.costs import dump
from treadle.estimate import Job, estimate_costs, estimate_memory, load_cluster, load_model
from treadle.estimate.job import OFFLOADED
from treadle.estimate.job_stages import stage_rows
from treadle.estimate.rates import constant
from treadle.ir.ops import OpKind
from treadle.lowering import LoweringOptions, lower
from treadle.simulator import simulate


def dense(**changes: object) -> Job:
    model = replace(load_model("llama3-70b"), num_hidden_layers=24)
    job = Job(model, load_cluster("h100:64"), tp=4, pp=4, global_batch_size=128, seq_len=8192)
    return replace(job, **changes)  # type: ignore[arg-type]


def moe(**changes: object) -> Job:
    model = replace(load_model("deepseek-v3"), num_hidden_layers=16, first_k_dense_replace=1)
    job = Job(model, load_cluster("h100:64"), ep=8, pp=4, global_batch_size=256, precision="fp8")
    return replace(job, **changes)  # type: ignore[arg-type]


def simulated(job: Job, **options: object) -> float:
    costs = estimate_costs(job)
    schedule = treadle.generate(job.schedule, pp=job.pp, vpp=job.vpp, microbatches=job.num_microbatches)
    lowered = lower(
        schedule,
        costs,
        LoweringOptions(blocks=stage_rows(job), by_layer=True, moe=job.model.is_moe, **options),  # type: ignore[arg-type]
    )
    return float(simulate(lowered, costs).makespan / 1e9)


def test_recomputing_half_of_the_layers_adds_half() -> None:
    whole, half = dense(recompute=("full",)), dense(recompute=("full",), recompute_layers=3)
    plain = estimate_costs(half).layer
    for job, share in ((whole, 1), (half, 2)):
        inlined = estimate_costs(job, inline_recompute=True).layer
        assert inlined["mlp_b"] == plain["mlp_b"] + round(plain["mlp_r"] / share)


def test_each_microbatch_more_takes_the_time_of_the_slowest_rank() -> None:
    few, many = dense(global_batch_size=128), dense(global_batch_size=256)
    costs = estimate_costs(few)
    slowest = max(sum(costs.of_block(block) for block in row) for row in stage_rows(few)) / 1e9
    more = many.num_microbatches - few.num_microbatches
    assert simulated(many) - simulated(few) == pytest.approx(more * slowest, rel=0.01)


@pytest.mark.parametrize("job", [dense(), moe()])
def test_costs_survive_their_file(job: Job) -> None:
    costs = estimate_costs(job)
    assert parse(dump(costs)) == costs


def test_layout_with_heavier_end_is_slower() -> None:
    even = dense()
    heavier = dense(layout=("E" + "t" * 5, "t" * 6, "t" * 6, "t" * 7 + "L"))
    assert simulated(heavier) > 1.1 * simulated(even)


def test_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="computes in bf16, fp8, got nvfp4; take bf16 or another GPU, or add its rate"):
        estimate_costs(dense(precision="nvfp4"))


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("zb-v", 2), ("v-half", 2), ("dualpipev", 2)])
def test_optimizer_steps_the_parameters_that_memory_holds(schedule: str, vpp: int) -> None:
    """Where a rank has embedding and head in one parameter, it is stepped once."""
    tied = replace(load_model("llama3-8b"), tie_word_embeddings=True)
    job = Job(tied, load_cluster("h100:16"), tp=4, pp=4, vpp=vpp, schedule=schedule, global_batch_size=64)
    held = max(rank.parameters for rank in estimate_memory(job)) / 2
    cluster = job.cluster
    seconds = estimate_costs(job).step["optimizer"] / 1e9 - 1e-6 * constant(cluster, "step_us")
    stepped = seconds * cluster.memory_bandwidth * constant(cluster, "optimizer") / 30
    assert stepped == pytest.approx(held, rel=1e-3)


def test_costs_say_what_parts_save_and_what_copies_of_it_take() -> None:
    job = moe(offload=OFFLOADED)
    costs = estimate_costs(job)
    saved = costs.saved_bytes["attn"] + costs.saved_bytes["mlp"]
    latency = 1e-6 * constant(job.cluster, "latency_us")
    seconds = saved / (job.cluster.pcie_bandwidth * constant(job.cluster, "pcie")) + latency
    assert costs.message["offload"] == costs.message["onload"] == pytest.approx(1e9 * seconds, abs=1)
    assert costs.message_bytes(OpKind.OFFLOAD) == saved
    assert costs.unsaved("EmL") == ()
    assert "offload" not in estimate_costs(moe()).message


def test_sharded_parameters_are_gathered_by_layer_and_what_takes_longer_than_the_layer_shows() -> None:
    def layer(cluster: str, sharding: str) -> dict[str, int]:
        job = Job(load_model("llama3-70b"), load_cluster(cluster), global_batch_size=64, sharding=sharding)
        return dict(estimate_costs(job).layer)

    plain, fast, slow = (layer("h100:8", "optimizer"), layer("h100:8", "parameters"), layer("h100:64", "parameters"))
    assert plain["mlp_f"] < fast["mlp_f"] < slow["mlp_f"]
    assert plain["mlp_b"] < layer("h100:8", "gradients")["mlp_b"] < fast["mlp_b"] < slow["mlp_b"]
    assert layer("h100:8", "gradients")["mlp_f"] == plain["mlp_f"]
    job = Job(load_model("llama3-70b"), load_cluster("h100:8"), global_batch_size=64, sharding="parameters")
    whole, cut = estimate_costs(replace(job, sharding="optimizer")), estimate_costs(job)
    assert "gather_params" in whole.step
    assert "gather_params" not in cut.step
    assert cut.message["reduce_grad"] < whole.message["reduce_grad"] / 10


def test_the_host_limits_a_layer_and_is_not_added_to_it() -> None:
    """A small layer takes as long as its launches, a large one as long as its kernels."""

    def layer(launch_us: float, seq_len: int, micro_batch_size: int) -> float:
        cluster = load_cluster("b200:8")
        cluster = replace(cluster, efficiency={**cluster.efficiency, "launch_us_none": launch_us})
        model, size = load_model("qwen3-30b-a3b"), micro_batch_size
        job = Job(model, cluster, ep=8, micro_batch_size=size, global_batch_size=64, seq_len=seq_len)
        found = estimate_costs(job).layer
        return sum(time for name, time in found.items() if not name.endswith("_r"))

    assert layer(100.0, 512, 1) == pytest.approx(2 * layer(50.0, 512, 1), rel=0.02)
    assert layer(50.0, 4096, 8) == pytest.approx(layer(25.0, 4096, 8), rel=0.02)
