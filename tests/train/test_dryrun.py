"""A dry run: what it says of a run that has not run, against what its parts say, and against a run that did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import treadle
from tests.support.devices import DEVICE_TYPE, device_of, drawn
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import OpKind
from treadle.models import ModelConfig, build_stages, loss_fn, tied_parameters, views_of_stages
from treadle.models.on_meta import packed
from treadle.runtime.model.meta_bytes import OpBytes
from treadle.simulator import measure
from treadle.train.fitted_costs import fit_step, write_costs
from treadle.train.footprint import BlockFootprint, ModelFootprint
from treadle.train.optim import ShardedOptimizer
from treadle.train.parallel import ParallelPlan
from treadle.train.run_config import ParallelConfig, TrainConfig, TrainingConfig
from treadle.train.run_dryrun import describe
from treadle.train.run_memory import RunMemory
from treadle.train.sweep import step_peaks

MODEL = ModelConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    moe_intermediate_size=16, num_experts=4, router_aux_loss_coef=0.01,
)  # fmt: skip
RUN = TrainConfig(
    model=MODEL,
    parallel=ParallelConfig(pp=2, ep=2, schedule="interleaved-overlap"),
    training=TrainingConfig(global_batch_size=16, micro_batch_size=2, seq_len=24),
)


def test_a_dry_run_says_what_is_where_and_how_to_learn_the_time(tmp_path: Path) -> None:
    dry = describe(replace(RUN, output=str(tmp_path)))
    assert dry.plan.rows == ("Et", "t", "t", "tL")
    assert dry.tokens_per_step == 16 * 24
    model = build_stages(MODEL, (MODEL.blocks,), {0: 0}, device="meta")[0]
    assert dry.num_parameters == sum(param.numel() for param in model.parameters())
    experts = 4 * 4 * 3 * 32 * 16
    assert dry.num_active == dry.num_parameters - experts + experts // 2
    for memory in dry.ranks:
        stages = build_stages(MODEL, dry.plan.rows, dry.plan.stages_of(memory.pp_rank), ep=2, device="meta")
        assert memory.parameters == 4 * sum(p.numel() for stage in stages.values() for p in stage.parameters())
        assert memory.total == sum(getattr(memory, part) for part in PARTS)
    text = str(dry)
    assert "0:Et 2:t" in text
    assert "1:t 3:tL" in text
    assert f"writes {tmp_path}/costs.toml" in text


PARTS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "messages")


def test_deepep_counts_by_itself_and_need_not_be_installed() -> None:
    parallel, training = replace(RUN.parallel, exchange="deepep"), replace(RUN.training, dtype="bfloat16")
    config = replace(RUN, parallel=parallel, training=training)
    program = RunMemory(config, ParallelPlan.of(config, 4)).program
    kinds = {program.op(index).kind for index in range(program.num_ops)}
    assert OpKind.DISPATCH_F in kinds
    assert not {OpKind.COUNTS, OpKind.HOST} & kinds
    dry, plain = describe(config), describe(replace(config, parallel=RUN.parallel))
    assert "schedule  interleaved-overlap, 2 stages a rank, tokens by DeepEP (memory: as by all_to_all)" in str(dry)
    assert [memory.parameters for memory in dry.ranks] == [memory.parameters for memory in plain.ranks]


def test_costs_of_an_earlier_run_predict_the_step(tmp_path: Path) -> None:
    config = replace(RUN, output=str(tmp_path))
    program = RunMemory(config, ParallelPlan.of(config, 4)).program
    layer = dict.fromkeys(
        ("attn_f", "mlp_f", "mlp_b", "attn_b", "mlp_w", "attn_w", "dispatch_f", "dispatch_b"), 2_000_000
    )
    ends = dict.fromkeys(("embed_f", "embed_b", "head_f", "head_b", "head_w"), 1_000_000)
    costs = replace(treadle.load_costs("deepseek-v3-h800"), layer=layer, ends=ends)
    trace = treadle.simulate(program, costs)
    write_costs(trace, tmp_path)
    dry = describe(config)
    assert dry.step_s == pytest.approx(trace.makespan * 1e-9)
    assert dry.bubble == pytest.approx(measure(trace).bubble)
    assert f"with {tmp_path}/costs.toml" in str(dry)
    (tmp_path / "other.toml").write_text((tmp_path / "costs.toml").read_text())
    elsewhere = replace(config, output=str(tmp_path / "elsewhere"), costs=str(tmp_path / "other.toml"))
    assert describe(elsewhere).step_s == dry.step_s
    with pytest.raises(ValueError, match=r"there is no file .*none\.toml"):
        describe(replace(config, costs=str(tmp_path / "none.toml")))


def test_fitted_costs_make_the_step_as_long_as_it_was() -> None:
    config = RUN
    costs = treadle.load_costs("deepseek-v3-h800")
    trace = treadle.simulate(RunMemory(config, ParallelPlan.of(config, 4)).program, costs)
    late = 2 * trace.start  # ops take as long as before, and as much again passes between them
    slow = replace(trace, start=late, end=late + trace.end - trace.start)
    assert treadle.simulate(slow.program, treadle.fit(slow)).makespan < 0.6 * slow.makespan
    fitted = fit_step(slow)
    assert treadle.simulate(slow.program, fitted).makespan == pytest.approx(slow.makespan, rel=1e-3)
    assert "for what is between ops" in fitted.about


@pytest.mark.slow
def test_memory_follows_the_configuration() -> None:
    plain = describe(RUN).ranks[0]
    again = describe(replace(RUN, parallel=replace(RUN.parallel, recompute=("attn", "mlp")))).ranks[0]
    assert again.activations < 0.6 * plain.activations
    away = describe(replace(RUN, parallel=replace(RUN.parallel, saved="offload"))).ranks[0]
    assert away.activations < plain.activations
    copies = describe(
        replace(RUN, parallel=replace(RUN.parallel, dp=2), training=replace(RUN.training, global_batch_size=32))
    ).ranks[0]
    assert copies.optimizer == pytest.approx(plain.optimizer / 2, rel=0.01)
    assert copies.parameters == plain.parameters
    low = describe(replace(RUN, training=replace(RUN.training, dtype="bfloat16"))).ranks[0]
    assert low.parameters == plain.parameters // 2
    assert low.gradients == plain.gradients
    assert low.optimizer == pytest.approx(plain.optimizer * 12 / 8, rel=0.01)  # moments, and masters
    muon = describe(replace(RUN, optimizer=replace(RUN.optimizer, name="muon"))).ranks[0]
    assert muon.optimizer < 0.7 * plain.optimizer
    tied = describe(replace(RUN, model=replace(MODEL, tie_word_embeddings=True), parallel=ParallelConfig()))
    assert tied.ranks[0].parameters == 4 * tied.num_parameters
    assert tied.ranks[0].gradients <= 4 * tied.num_parameters + 100


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-overlap", "dualpipev", "zb-h1"])
def test_the_sweep_over_a_step_finds_the_peak_that_the_simulator_finds(schedule: str) -> None:
    sizes = {"attn": 700, "mlp": 300}
    costs = replace(treadle.load_costs("deepseek-v3-h800"), saved_bytes=sizes)
    made = treadle.generate(schedule, pp=4, microbatches=8)
    rows = ("tt",) * made.placement.num_stages
    options = treadle.LoweringOptions(blocks=rows, by_layer=True, split=(), embedding=False, head=False, moe=True)
    trace = treadle.simulate(treadle.lower(made, costs, options), costs)
    ops = {
        OpKind.ATTN_F: OpBytes(700, 700), OpKind.ATTN_B: OpBytes(0, -700),
        OpKind.MLP_F: OpBytes(300, 300), OpKind.MLP_B: OpBytes(0, -300),
    }  # fmt: skip
    block = BlockFootprint("t", (), sizes, ops)
    peaks = step_peaks(trace, rows, ModelFootprint({"t": block}, 0))
    assert [peak.activations for peak in peaks] == list(measure(trace).peaks)
    assert all(peak.temporaries == 0 for peak in peaks)
    larger = {**ops, OpKind.MLP_B: OpBytes(10**6, -300)}
    block = replace(block, ops=larger)
    peaks = step_peaks(trace, rows, ModelFootprint({"t": block}, 0))
    assert all(peak.temporaries == 10**6 and peak.op.startswith("mlp_b") for peak in peaks)


@pytest.mark.slow
def test_a_run_holds_what_the_dry_run_said() -> None:
    dry = describe(RUN)
    told = check(run_ranks(4, held))
    for rank in told:
        memory = dry.ranks[rank["pp_rank"]]
        assert rank["parameters"] == memory.parameters
        assert rank["optimizer"] == pytest.approx(memory.optimizer, rel=0.01)
        assert rank["gradients"] == pytest.approx(memory.gradients, rel=0.02)  # flags, and rows of one length
    for pp_rank in range(2):  # over an expert group rows are balanced
        saved = np.mean([rank["saved"] for rank in told if rank["pp_rank"] == pp_rank])
        assert saved < dry.ranks[pp_rank].activations < 1.35 * saved  # and what passes from op to op


def held(rank: int) -> dict[str, Any]:
    """What a rank of the run has: parameters, gradients, optimizer state, and the most saved at once."""
    plan = ParallelPlan.of(RUN, 4)
    mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE_TYPE, (2, 1, 2), mesh_dim_names=("pp", "dp", "ep"))
    pp_rank = mesh.get_local_rank("pp")
    ep_rank, device = mesh.get_local_rank("ep"), device_of(rank)
    stages = build_stages(MODEL, plan.rows, plan.stages_of(pp_rank), ep=2, ep_rank=ep_rank, device=device)
    tied = tied_parameters(MODEL, plan.rows)
    pipe = treadle.Pipeline(stages, plan.schedule, mesh=mesh, loss_fn=loss_fn, tied=tied, saved="count", deadline_s=120)
    optimizer = ShardedOptimizer(pipe, views_of_stages(stages), RUN.optimizer)
    tokens = drawn(torch.randint, 0, MODEL.vocab_size, (8, 25), generator=torch.Generator().manual_seed(rank % 2))
    side = {
        "positions": torch.arange(24).repeat(8, 1),
        "documents": packed((8, 24)).split(plan.schedule.num_microbatches),
    }
    pipe.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), side=side)
    assert pipe.report is not None
    assert pipe.report.saved is not None
    params = [param for stage in stages.values() for param in stage.parameters()]
    found = {
        "pp_rank": pp_rank,
        "parameters": sum(param.nbytes for param in params),
        "gradients": sum(bucket.flat.nbytes for bucket in pipe.gradients.buckets if bucket.flat is not None),
        "optimizer": optimizer.state_bytes,
        "saved": pipe.report.saved.peak,
    }
    pipe.close()
    return found


@pytest.mark.slow
def test_a_run_of_a_trillion_parameters_on_2048_ranks_is_described() -> None:
    model = ModelConfig(
        vocab_size=129280, hidden_size=7168, num_hidden_layers=61, first_k_dense_replace=3, num_attention_heads=128,
        num_key_value_heads=16, head_dim=128, intermediate_size=18432, moe_intermediate_size=3072, num_experts=256,
        num_experts_per_tok=8, scoring="sigmoid", n_shared_experts=1, n_group=8, topk_group=4,
    )  # fmt: skip
    config = TrainConfig(
        model=model,
        parallel=ParallelConfig(pp=16, ep=64, dp=2, schedule="dualpipev", recompute=("attn",)),
        training=TrainingConfig(global_batch_size=8192, micro_batch_size=1, seq_len=4096, dtype="bfloat16"),
    )
    dry = describe(config)
    assert dry.num_parameters > 0.98e12
    assert dry.num_active < 0.07e12
    assert len(dry.ranks) == 16
    assert all(2**32 < memory.total < 2**40 for memory in dry.ranks)
