"""Times of options that few jobs have: replicas that share nothing, whole layers recomputed, experts cut by TP."""

from __future__ import annotations

import pytest

from treadle.estimate import Job, estimate_costs, load_cluster, load_model
from treadle.estimate.block_parts import block_parts
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
