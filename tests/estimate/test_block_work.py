"""The work of blocks: held to counts by hand and to what every cut must leave unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.activations import ActivationCut, block_activations
from treadle.estimate.block_work import actions, block_work
from treadle.estimate.flops import model_flops
from treadle.estimate.group_messages import exchange, gather, group_of
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.parameter_counts import block_parameters
from treadle.estimate.work import BF16, FP32, Gemm, OpWork


def dense(**changes: object) -> Job:
    job = Job(load_model("llama3-70b"), load_cluster("h100:64"), global_batch_size=64, seq_len=8192)
    return replace(job, **changes)  # type: ignore[arg-type]


def moe(**changes: object) -> Job:
    job = Job(load_model("deepseek-v3"), load_cluster("gb200:256"), ep=64, global_batch_size=256)
    return replace(job, **changes)  # type: ignore[arg-type]


def forward_flops(job: Job, block: str) -> float:
    return sum(part.f.flops for part in block_work(job, block).values())


def test_dense_layer_does_two_flops_a_parameter_and_token() -> None:
    job = dense()
    parts = block_work(job, "t")
    parameters, experts = block_parameters(ModelCut.of(job), "t").weights
    assert experts == 0
    assert parameters == 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    attention = parts["attn"].f.attention_flops
    assert attention == 4 * 128 * 64 * 8192 * 8193 / 2
    assert forward_flops(job, "t") == 2 * parameters * 8192 + attention


def test_experts_take_each_token_as_often_as_it_is_routed() -> None:
    job = moe()
    (up, down) = block_work(job, "t")["mlp"].f.grouped
    assert up == Gemm(4096 * 8 / 4, 2 * 2048, 7168, 4)
    assert down == Gemm(4096 * 8 / 4, 7168, 2048, 4)
    assert block_parameters(ModelCut.of(job), "t").experts == 4 * 3 * 7168 * 2048


@pytest.mark.parametrize("cut", [{"tp": 4}, {"tp": 8}, {"cp": 4}, {"tp": 2, "cp": 2}])
def test_ranks_of_a_cut_do_the_flops_of_one_rank(cut: dict[str, int]) -> None:
    whole, parts = dense(), dense(**cut)
    ranks = parts.tp * parts.cp
    for block in "tEL":
        for name, work in actions(whole, block).items():
            assert actions(parts, block)[name].flops * ranks == pytest.approx(work.flops), name


def test_dgrad_and_wgrad_do_as_much_as_forward() -> None:
    for part in block_work(moe(), "t").values():
        products = sum(gemm.flops for gemm in part.f.gemms + part.f.grouped)
        assert sum(gemm.flops for gemm in part.b.gemms + part.b.grouped) == products
        assert sum(gemm.flops for gemm in part.w.gemms + part.w.grouped) == products


@pytest.mark.parametrize(
    "piece", ["core_attn", "mla_up_proj", "layernorm", "moe_act", "moe", "shared_experts", "mlp_act"]
)
def test_recomputed_piece_adds_to_dgrad_only(piece: str) -> None:
    plain, again = actions(moe(), "t"), actions(moe(recompute=(piece,)), "t")
    changed = {name for name in plain if plain[name] != again[name]}
    assert changed == {"attn_b" if piece in ("core_attn", "mla_up_proj", "layernorm") else "mlp_b"}


def _again(job: Job, block: str, part: str) -> OpWork:
    return block_work(job, block)[part].again


@pytest.mark.parametrize("block", ["t", "d"])
def test_both_norms_of_a_layer_are_recomputed(block: str) -> None:
    job = moe(recompute=("layernorm",))
    assert _again(job, block, "attn").vector_bytes == 2 * (BF16 + BF16) * job.tokens * job.model.hidden_size
    freed = 2 * job.tokens * (BF16 * job.model.hidden_size + FP32)
    assert _freed(job, block) == freed, "memory frees the output and the factor of two"


def test_activation_of_shared_experts_is_recomputed() -> None:
    job = moe(recompute=("mlp_act",))
    width = job.model.n_shared_experts * job.model.moe_intermediate_size
    assert _again(job, "t", "mlp") == OpWork(vector_bytes=3 * BF16 * job.tokens * width)
    assert _freed(job, "t") == BF16 * job.tokens * width, "memory frees its output"
    none = moe(model=replace(job.model, n_shared_experts=0), recompute=("mlp_act",))
    assert _again(none, "t", "mlp") == OpWork()


def test_a_recomputed_moe_layer_has_its_shared_experts() -> None:
    both, routed, shared = (moe(recompute=each) for each in (("moe",), ("moe_act",), ("shared_experts",)))
    assert _again(both, "t", "mlp").gemms == _again(shared, "t", "mlp").gemms != ()
    assert _again(both, "t", "mlp").vector_bytes == sum(
        _again(each, "t", "mlp").vector_bytes for each in (routed, shared)
    )
    assert _again(moe(recompute=("shared_experts", "mlp_act")), "t", "mlp") == _again(shared, "t", "mlp")


def _freed(job: Job, block: str) -> int:
    """Bytes that a block saves no more."""
    plain, again = (ActivationCut.of(each, "p2p", fused_loss=True) for each in (replace(job, recompute=()), job))
    return block_activations(plain, block).saved - block_activations(again, block).saved


def test_windowed_layers_attend_to_their_window_only() -> None:
    model = load_model("gpt-oss-120b")
    job = Job(model, load_cluster("h100:64"), global_batch_size=64, seq_len=1024)
    keys = [sum(min(place + 1, width) for place in range(1024)) for width in (1024, 128)]
    assert block_work(job, "t")["attn"].f.attention_flops == 4 * 64 * 64 * sum(keys) / 2


def test_groups_lie_where_ranks_are_numbered() -> None:
    job = dense(tp=4, cp=2, pp=2)
    assert group_of(job, "tp") == (4, 4)
    assert group_of(job, "cp") == (2, 2)
    assert group_of(job, "dp") == (8, 2)
    assert group_of(dense(tp=8, cp=2), "cp") == (2, 1)


def test_a_group_is_spread_evenly_over_domains_that_it_does_not_fill() -> None:
    """A domain of 72 GPUs holds 9 ranks of tp 8; a dp of 64 has 8 in each of 8 domains, not 9 in each of 7.1."""
    dp = dense(cluster=load_cluster("gb200:512"), tp=8, global_batch_size=512)
    assert group_of(dp, "dp") == (64, 8)
    (gathered,) = gather(dp, "dp", 6400.0)
    assert (gathered.nvlink_bytes, gathered.nic_bytes) == (6400 * 7 / 8, 6400 / 8 * 7 / 8)
    ep = moe(cluster=load_cluster("gb200:512"), ep=128, global_batch_size=512)
    assert group_of(ep, "ep") == (128, 64)
    (sent,) = exchange(ep, 1.0)
    assert sent.nic_bytes == 2 * (1 - 0.5**ep.model.num_experts_per_tok) * 0.5
    assert group_of(dense(cluster=load_cluster("h100:24"), global_batch_size=24), "dp") == (24, 8)


def test_gather_sends_all_but_its_own_share() -> None:
    (inside,) = gather(dense(tp=8), "tp", 800.0)
    assert inside.inside
    assert inside.nvlink_bytes == 700
    (across,) = gather(dense(), "dp", 6400.0)
    assert across.nic_bytes == 6400 / 8 * (1 - 8 / 64)


def test_token_crosses_once_to_each_domain_of_its_experts() -> None:
    job = moe(model=replace(moe().model, n_group=0, topk_group=0))
    job = replace(job, cluster=replace(job.cluster, nvlink_domain=8))
    (message,) = exchange(job, 100.0)
    assert message.nic_bytes < 100 * 8
    assert message.nic_bytes == pytest.approx(100 * 7 * (1 - (7 / 8) ** 8))
    assert exchange(replace(job, ep=1), 100.0) == ()


def test_whole_graphs_leave_no_launch() -> None:
    for block in "tdEmL":
        assert all(work.launches == 0 for work in actions(moe(cuda_graph="whole"), block).values())
        assert any(work.launches > 0 for work in actions(moe(cuda_graph="partial"), block).values())


@pytest.mark.parametrize("job", [dense(tp=4, pp=2), moe(), moe(pp=2, ep=32)])
def test_work_of_all_blocks_is_what_the_model_needs(job: Job) -> None:
    forward = sum(forward_flops(job, block) for block in job.model.blocks) * job.tp * job.cp
    causal = 1 + 1 / job.seq_len  # a token looks at itself
    assert 3 * forward == pytest.approx(model_flops(job.model, job.seq_len), rel=causal - 1 + 1e-6)


def test_routing_to_groups_crosses_to_fewer_domains() -> None:
    limited = moe(cluster=load_cluster("h800:256"))
    free = replace(limited, model=replace(limited.model, n_group=0, topk_group=0))
    ((one,), (two,)) = (exchange(job, 1000.0) for job in (limited, free))
    met = [places * (1 - (1 - 1 / places) ** 8) for places in (4, 8)]  # of 8 draws, in 4 of 8 hosts or in all
    assert one.nic_bytes == pytest.approx(1000 * met[0] * 7 / 8)
    assert two.nic_bytes == pytest.approx(1000 * met[1] * 7 / 8)
    assert one.nvlink_bytes < two.nvlink_bytes


def test_tokens_are_dispatched_in_fp8_and_combined_in_bf16() -> None:
    plain, fp8 = (block_work(moe(dispatch=kind), "t") for kind in ("bf16", "fp8"))

    def sent(work: OpWork) -> float:
        return sum(message.size_bytes for message in work.messages)

    share = (1 + 4 / 128) / 2
    assert sent(fp8["dispatch"].f) == pytest.approx(share * sent(plain["dispatch"].f), rel=1e-6)
    assert sent(fp8["combine"].b) == pytest.approx(share * sent(plain["combine"].b), rel=1e-6)
    assert sent(fp8["dispatch"].b) == sent(plain["dispatch"].b)
    assert sent(fp8["combine"].f) == sent(plain["combine"].f)
    with pytest.raises(ValueError, match=r"dispatch is .*fp8.*, got 'fp4'"):
        moe(dispatch="fp4")
