"""Times of options that few jobs have: replicas that share nothing, whole layers recomputed, experts cut by TP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.estimate import Job, estimate_costs, load_cluster, load_model
from treadle.estimate.activations import ActivationCut, block_activations
from treadle.estimate.block_parts import block_parts
from treadle.estimate.job_memory import estimate_memory
from treadle.estimate.model_cut import ModelCut

LLAMA, QWEN = load_model("llama3-8b"), load_model("qwen3-30b-a3b")


def test_replicas_that_share_nothing_all_reduce_and_gather_nothing() -> None:
    """DDP: an all-reduce moves twice what a reduce-scatter does, and each replica has its parameters."""
    ours, ddp = (
        estimate_costs(Job(LLAMA, load_cluster("h100:16"), tp=2, global_batch_size=8, sharding=sharding))
        for sharding in ("optimizer", "none")
    )
    assert ddp.message["reduce_grad"] == pytest.approx(2 * ours.message["reduce_grad"], rel=1e-6)
    assert "gather_params" in ours.step
    assert "gather_params" not in ddp.step


@pytest.mark.parametrize("seq_len", [512, 8192])
def test_a_dense_layer_recomputed_whole_takes_what_both_its_parts_take(seq_len: int) -> None:
    """Where the host binds (512 tokens) as where the device does."""
    whole, parts = (
        estimate_costs(
            Job(LLAMA, load_cluster("h100:8"), global_batch_size=8, seq_len=seq_len, recompute=recompute),
            inline_recompute=True,
        )
        for recompute in (("full",), ("attn", "mlp"))
    )
    of_step = [sum(time for name, time in each.layer.items() if not name.endswith("_r")) for each in (whole, parts)]
    assert of_step[0] == pytest.approx(of_step[1], rel=1e-6)


def test_experts_cut_by_tensor_parallelism_gather_and_scatter() -> None:
    """Megatron-LM's token_dispatcher: gathered before the GEMMs of experts, reduce-scattered after them."""
    experts = block_parts(ModelCut(QWEN, tp=2, etp=2, ep=4, tokens=4096), "t")["mlp"][0]
    found = [(each.kind, each.forward, each.backward) for each in experts.collectives]
    assert found == [("all_gather", 1, 1), ("reduce_scatter", 1, 1)]
    assert len({each.size_bytes for each in experts.collectives}) == 1


def test_moments_in_bf16_take_half_the_memory_and_less_of_the_optimizer() -> None:
    full, half = (Job(LLAMA, load_cluster("h100:16"), global_batch_size=16, moment_bytes=size) for size in (4, 2))
    with_full, with_half = (estimate_memory(job)[0].optimizer for job in (full, half))
    assert with_half / with_full == pytest.approx((4 + 2 * 2) / (4 + 2 * 4), rel=1e-6)
    assert estimate_costs(half).step["optimizer"] < estimate_costs(full).step["optimizer"]
    with pytest.raises(ValueError, match=r"moment_bytes is 4 \(FP32\) or 2 \(BF16\), got 1"):
        replace(full, moment_bytes=1)


def test_caches_in_fp8_are_those_of_deepseek_v3() -> None:
    """Inputs of activations and of attention's output projection, with an FP32 scale for each 128 elements."""
    shape = load_model("deepseek-v3")
    plain = Job(shape, load_cluster("h800:64"), ep=64, global_batch_size=64, precision="fp8")
    saved = [
        block_activations(ActivationCut.of(replace(plain, saved=kind), "p2p", fused_loss=True), "t").saved
        for kind in ("bf16", "fp8")
    ]
    elements = 4096 * 128 * 128 + 2 * 2048 * (8 + 1) * 4096  # attention's output; fc1 of 8 routed experts and 1 shared
    assert saved[0] - saved[1] == pytest.approx(elements * (2 - 1 - 4 / 128), rel=1e-6)
