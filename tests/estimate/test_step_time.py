"""The closed form of a step, held to simulating the same costs, and to what any right estimate does."""

from __future__ import annotations

from dataclasses import replace

import pytest

import treadle
from treadle.costs import parse
from treadle.costs.costs import dump
from treadle.estimate import Job, StepEstimate, estimate_costs, estimate_step, load_cluster, load_model
from treadle.estimate.rates import constant
from treadle.estimate.stages import stage_rows
from treadle.estimate.step_time import ring_seconds
from treadle.ir.program import OpKind
from treadle.plan import LoweringOptions, lower
from treadle.schedules import SCHEDULES
from treadle.simulate import simulate


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


def parts(estimate: StepEstimate) -> float:
    names = "compute recompute exposed_tp exposed_ep exposed_pp bubble data_parallel optimizer other"
    return float(sum(getattr(estimate, name) for name in names.split()))


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "interleaved-overlap"])
def test_closed_form_is_near_simulation_of_dense_model(schedule: str) -> None:
    job = dense(schedule=schedule, vpp=(*SCHEDULES[schedule].vpps, 2)[0])
    assert estimate_step(job).seconds == pytest.approx(simulated(job), rel=0.06)


def test_closed_form_bounds_simulation_of_experts_from_above() -> None:
    """Weight halves run beside exchanges in the program, and the closed form counts exchanges in full."""
    job = moe(schedule="interleaved", vpp=2)
    assert simulated(job) < estimate_step(job).seconds < 1.5 * simulated(job)


@pytest.mark.parametrize("job", [dense(), dense(recompute=("full",), recompute_layers=2), moe(a2a_overlap=True)])
def test_parts_add_up(job: Job) -> None:
    estimate = estimate_step(job)
    assert parts(estimate) == pytest.approx(estimate.seconds)
    assert 0 < estimate.mfu < 1


def test_recomputation_adds_what_the_program_adds() -> None:
    plain, again = dense(), dense(recompute=("attn", "mlp"))
    added = estimate_step(again).seconds - estimate_step(plain).seconds
    assert added == pytest.approx(simulated(again, recompute=("attn", "mlp")) - simulated(plain), rel=0.05)


def test_recomputing_half_of_the_layers_adds_half() -> None:
    whole, half = dense(recompute=("full",)), dense(recompute=("full",), recompute_layers=3)
    assert estimate_step(half).recompute == pytest.approx(estimate_step(whole).recompute / 2)
    inlined = estimate_costs(half, inline_recompute=True).layer
    plain = estimate_costs(half).layer
    assert inlined["mlp_b"] == plain["mlp_b"] + round(plain["mlp_r"] / 2)


def test_more_microbatches_cost_the_slowest_rank_each() -> None:
    few, many = dense(global_batch_size=128), dense(global_batch_size=256)
    steady = [estimate_step(job).seconds - estimate_step(job).bubble for job in (few, many)]
    last = estimate_step(few)
    fixed = last.data_parallel + last.optimizer + last.other
    assert steady[1] - fixed == pytest.approx(2 * (steady[0] - fixed))


@pytest.mark.parametrize("job", [dense(), moe()])
def test_costs_survive_their_file(job: Job) -> None:
    costs = estimate_costs(job)
    assert parse(dump(costs)) == costs


def test_layout_with_heavier_end_is_slower() -> None:
    even = dense()
    heavier = dense(layout=("E" + "t" * 5, "t" * 6, "t" * 6, "t" * 7 + "L"))
    assert estimate_step(heavier).slowest_rank == 3
    assert estimate_step(heavier).seconds > 1.1 * estimate_step(even).seconds


def test_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="computes in bf16, fp8, got nvfp4; take --precision bf16 or another GPU"):
        estimate_step(dense(precision="nvfp4"))


def test_costs_say_what_parts_save_and_what_copies_of_it_take() -> None:
    job = moe(offload=True)
    costs = estimate_costs(job)
    saved = costs.saved_bytes["attn"] + costs.saved_bytes["mlp"]
    latency = 1e-6 * constant(job.cluster, "latency_us")
    seconds = saved / (job.cluster.pcie_bandwidth * constant(job.cluster, "pcie")) + latency
    assert costs.message["offload"] == costs.message["onload"] == pytest.approx(1e9 * seconds, abs=1)
    assert costs.message_bytes(OpKind.OFFLOAD) == saved
    assert costs.unsaved("EmL") == ()
    assert "offload" not in estimate_costs(moe()).message


def test_more_replicas_take_longer_rings_until_buckets_grow() -> None:
    """Buckets are 40 million parameters up to 40 ranks; beyond, a ring has more ranks and as many fewer buckets."""
    whole = dense(tp=1, pp=1, global_batch_size=2048)
    jobs = [replace(whole, cluster=load_cluster(f"h100:{gpus}")) for gpus in (1, 8, 32, 512, 1024)]
    rings = [ring_seconds(job, 1e9) for job in jobs]
    assert rings[0] == 0
    assert rings[1] < rings[2] < rings[3]
    assert rings[4] == pytest.approx(rings[3], rel=0.01)
