"""Memory of ranks: held to published measurements, to counts by hand, and to what every cut must leave unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from held_to import simumax_memory
from treadle.estimate import Job, MemoryEstimate, MemoryOptions, ModelShape, estimate_memory, load_cluster, load_model
from treadle.estimate.activations import OPERAND_BYTES, ActivationCut, block_activations
from treadle.estimate.job import OFFLOADED
from treadle.estimate.job_stages import rank_rows
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.parameter_counts import block_parameters, chunk_weights, count_parameters, rank_parameters
from treadle.ir.blocks import parse_layout

DENSE = ModelShape("dense", hidden_size=1024, num_hidden_layers=8, vocab_size=32768, num_attention_heads=16)
MOE = replace(
    DENSE, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512, n_shared_experts=1, first_k_dense_replace=1
)
MODELS = {"dense": DENSE, "moe": MOE}


def _job(model: ModelShape = DENSE, **given: Any) -> Job:
    return Job(**{"model": model, "cluster": load_cluster("h100:8"), "global_batch_size": 64, "seq_len": 2048, **given})


def _saved(job: Job, block: str) -> int:
    return block_activations(ActivationCut.of(job, "p2p", fused_loss=True), block).saved


def _activations(memory: MemoryEstimate) -> int:
    return memory.activations + memory.logits


def test_published_peaks_without_a_fitted_constant() -> None:
    figures = simumax_memory.run()
    assert figures["simumax_memory_median"] < 0.05
    assert figures["simumax_memory_max"] < 0.25
    assert len(simumax_memory.predictions()) == 43


def test_both_stages_of_the_published_runs() -> None:
    assert max(abs(each.error) for each in simumax_memory.stages()) < 0.003


@pytest.mark.parametrize(("recompute", "published_mib", "within"), [((), 68_704, 0.005), (("full",), 60_154, 0.025)])
def test_a_published_run_of_two_chunks_with_mtp(recompute: tuple[str, ...], published_mib: int, within: float) -> None:
    """Megatron-LM pull request 6311: 14 layers of DeepSeek-V3 and MTP on 64 H100, most allocated of all ranks."""
    job = Job(
        replace(load_model("deepseek-v3"), num_hidden_layers=14),
        load_cluster("h100:64"),
        pp=4,
        vpp=2,
        ep=16,
        global_batch_size=256,
        seq_len=2048,
        schedule="interleaved",
        layout=parse_layout("Ett|(tt|)*6mL"),
        recompute=recompute,
    )
    ranks = estimate_memory(job, MemoryOptions(fused_cross_entropy=False))
    assert max(rank.total for rank in ranks) / 2**20 == pytest.approx(published_mib, rel=within)


def test_kimi_k2_has_the_published_states() -> None:
    """BF16 parameters and FP32 gradients: 6 TB a group of 256 GPUs. States: about 30 GB a GPU (arXiv 2507.20534)."""
    job = Job(load_model("kimi-k2"), load_cluster("h800:2048"), pp=16, ep=16, global_batch_size=2048)
    ranks = estimate_memory(job)
    held = [16 * (rank.parameters + rank.gradients) for rank in ranks]
    experts = sum(each.experts for each in rank_parameters(job)) * 16 * 6
    assert experts == pytest.approx(6.1e12, rel=0.01)
    assert sum(held) / 6.1e12 == pytest.approx(1, abs=0.2), "and those that every rank of a stage has"
    assert sum(rank.states for rank in ranks) / 16 / 1e9 == pytest.approx(33, abs=3)


def test_a_dense_layer_saves_what_is_counted_by_hand() -> None:
    tokens, width = 2048, 4 * 1024
    hidden = tokens * 1024 * 2
    norms = 2 * (2 * hidden + tokens * 4)
    attention = 4 * hidden + tokens * 16 * 4
    assert _saved(_job(), "t") == norms + attention + 3 * tokens * width * 2
    assert _saved(_job(replace(DENSE, gated_mlp=False)), "t") == norms + attention + 2 * tokens * width * 2


def test_a_layer_with_experts_saves_what_is_counted_by_hand() -> None:
    tokens, routed = 2048, 2 * 2048
    hidden = tokens * 1024 * 2
    attention_and_norms = 8 * hidden + tokens * (16 * 4 + 2 * 4)
    experts = routed * (1024 * 2 + 4 + 3 * 512 * 2)
    shared, router = tokens * 3 * 512 * 2, tokens * 16 * 11
    assert _saved(_job(MOE), "t") == attention_and_norms + experts + shared + router


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_tensor_and_context_parallelism_cut_activations_alike(model: ModelShape) -> None:
    whole = _saved(_job(model), "t")
    assert _saved(_job(model, tp=4), "t") == pytest.approx(whole / 4)
    assert _saved(_job(model, cp=4), "t") == pytest.approx(whole / 4)
    assert _saved(_job(model, tp=4, sequence_parallel=False), "d") > _saved(_job(model, tp=4), "d")
    assert _saved(_job(model, seq_len=1024, micro_batch_size=2), "t") == whole


def test_an_exchange_of_heads_saves_attention_twice() -> None:
    job = _job(cp=2)
    ring, heads = (estimate_memory(job, MemoryOptions(cp_comm_type=kind))[0] for kind in ("p2p", "a2a"))
    assert heads.activations - ring.activations == 8 * 1024 * 1024 * 2


@pytest.mark.parametrize("cut", [{"tp": 4}, {"tp": 2, "pp": 2}, {"ep": 8}, {"ep": 4, "tp": 2}, {"ep": 2, "etp": 2}])
def test_ranks_hold_the_whole_model_between_them(cut: dict[str, int]) -> None:
    job = _job(MOE, **cut)
    stages = rank_parameters(job)
    whole = [block_parameters(ModelCut(MOE), block) for block in MOE.blocks]
    assert sum(stage.experts for stage in stages) * job.ep * job.etp == sum(each.experts for each in whole)
    copied = sum(each.norms for each in whole) + 7 * MOE.num_experts * MOE.hidden_size  # norms and routers
    dense = sum(each.dense for each in whole)
    assert sum(stage.dense for stage in stages) * job.tp == dense + (job.tp - 1) * copied


def test_a_tied_head_on_another_rank_is_a_copy() -> None:
    tied = replace(DENSE, tie_word_embeddings=True)
    assert sum(each.dense for each in rank_parameters(_job(tied))) == count_parameters(tied)
    assert sum(each.dense for each in rank_parameters(_job(tied, pp=2))) == count_parameters(DENSE)


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe", 2)])
def test_times_and_memory_count_the_same_parameters(schedule: str, vpp: int) -> None:
    """What is reduced and stepped is what is held, but for norms; a tied head beside its embedding is held once."""
    job = _job(replace(DENSE, tie_word_embeddings=True), pp=2, vpp=vpp, schedule=schedule)
    cut = ModelCut.of(job)
    for held, weights, rows in zip(rank_parameters(job), chunk_weights(job), rank_rows(job), strict=True):
        norms = sum(block_parameters(cut, block).norms for block in "".join(rows))
        assert sum(dense for dense, _ in weights) == held.dense - norms


def test_an_mtp_block_brings_an_embedding_to_its_rank() -> None:
    mtp = replace(DENSE, num_nextn_predict_layers=1)
    vocabulary = DENSE.vocab_size * DENSE.hidden_size
    one, two = (sum(each.dense for each in rank_parameters(_job(mtp, pp=pp))) for pp in (1, 2))
    assert one == count_parameters(mtp, mtp=True)
    assert two == one + vocabulary
    last = estimate_memory(_job(mtp, pp=2))[-1]
    assert last.logits == 2 * estimate_memory(_job(pp=2))[-1].logits


def test_states_follow_what_is_cut_over_replicas() -> None:
    none, optimizer, gradients, parameters = (
        estimate_memory(_job(sharding=kind))[0] for kind in ("none", "optimizer", "gradients", "parameters")
    )
    count = none.parameters // 2
    assert (none.gradients, none.optimizer) == (4 * count, 12 * count)
    assert optimizer == none._replace(optimizer=12 * count // 8)
    largest = block_parameters(ModelCut(DENSE), "L").total
    assert gradients.gradients == 4 * (count // 8 + largest)
    assert parameters.parameters == pytest.approx(2 * (count / 8 + 2 * largest))
    assert estimate_memory(_job(gradient_bytes=2))[0].gradients == 2 * count


def test_experts_are_cut_over_their_own_replicas() -> None:
    job = _job(MOE, ep=4)
    (held,) = rank_parameters(job)
    (memory,) = estimate_memory(job)
    assert memory.optimizer == 12 * held.dense // 8 + 12 * held.experts // 2


def test_a_larger_micro_batch_saves_as_much_more() -> None:
    once, twice = (estimate_memory(_job(pp=2, micro_batch_size=size)) for size in (1, 2))
    for less, more in zip(once, twice, strict=True):
        assert _activations(more) == 2 * _activations(less)
        assert more.states == less.states


def test_depth_of_the_pipe_decides_what_ranks_hold() -> None:
    layer = _saved(_job(pp=4), "t")
    first, second, third, _ = estimate_memory(_job(pp=4))
    assert [rank.activations // (2 * layer) for rank in (first, second, third)] == [4, 3, 2]
    few = estimate_memory(_job(pp=4, global_batch_size=2 * 2))
    assert few[0].activations == 2 * 2 * layer


def test_schedules_that_save_memory_do() -> None:
    def most(schedule: str, vpp: int) -> int:
        return max(_activations(rank) for rank in estimate_memory(_job(pp=4, vpp=vpp, schedule=schedule)))

    one, v_half, v_min = most("1f1b", 1), most("v-half", 2), most("v-min", 2)
    assert v_min < v_half < one < most("interleaved", 2) < most("gpipe", 1)


def test_a_split_backward_keeps_inputs_and_output_gradients() -> None:
    cut = ActivationCut.of(_job(), "p2p", fused_loss=True)
    hidden, width = cut.hidden, 2048 * 4096 * 2
    inputs = 2 * hidden + hidden + width  # two norms' outputs, attention's output, the activation's
    gradients = 3 * hidden + hidden + 2 * width + hidden  # of qkv, projection, fc1, fc2
    assert block_activations(cut, "t").split == inputs + gradients


PARTS: dict[str, dict[str, float]] = {
    "dense": {"layernorm": 2, "attn": 5, "mlp": 1 + 12, "core_attn": 0, "mlp_act": 4, "moe": 0},
    "moe": {"layernorm": 2, "moe_act": 1, "shared_experts": 1.5, "mlp": 1.5 + 3, "moe": 2 + 3 + 1.5},
}
"""What is freed, in hidden states of a layer; smaller tensors come on top."""


@pytest.mark.parametrize(("model", "part"), [(model, part) for model, parts in PARTS.items() for part in parts])
def test_what_is_computed_again_is_not_saved(model: str, part: str) -> None:
    job = _job(MODELS[model])
    freed = _saved(job, "t") - _saved(replace(job, recompute=(part,)), "t")
    hidden = job.tokens * 1024 * 2
    assert freed / hidden == pytest.approx(PARTS[model][part], abs=0.12)
    before, after = (estimate_memory(each)[0] for each in (job, replace(job, recompute=(part,))))
    assert after.total <= before.total


def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    hidden, layer = 2048 * 1024 * 2, _saved(_job(), "t")
    head = _saved(_job(), "L")
    every, three = (estimate_memory(_job(recompute=("full",), recompute_layers=layers, pp=1))[0] for layers in (0, 3))
    assert _activations(every) == 8 * hidden + head
    assert _activations(three) == 3 * hidden + 5 * layer + head
    assert every.temporary >= layer - hidden - head, "the layer that is computed again is there once"


def test_offload_leaves_two_cells() -> None:
    held = estimate_memory(_job(pp=4, offload=OFFLOADED))
    kept = estimate_memory(_job(pp=4))
    cell = 2 * _saved(_job(pp=4), "t")
    assert held[0].activations == 2 * cell < kept[0].activations
    assert held[3] == kept[3], "the last rank holds one micro-batch anyway"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipev"])
@pytest.mark.parametrize("recompute", [(), ("attn", "mlp")])
def test_offload_takes_what_a_simulation_says_is_held(schedule: str, recompute: tuple[str, ...]) -> None:
    """Beside it, what is computed needs its room."""
    vpp = 2 if schedule == "dualpipev" else 1
    job = _job(MOE, pp=4, vpp=vpp, ep=2, schedule=schedule, recompute=recompute, offload=OFFLOADED, precision="fp8")
    kept = estimate_memory(replace(job, offload=()))
    assert estimate_memory(job, held=(1 << 50,) * 4) == kept, "copies that never end"
    none, some, more = (estimate_memory(job, held=(size,) * 4) for size in (0, 1 << 20, 1 << 24))
    for least, one, other, most in zip(none, some, more, kept, strict=True):
        assert least.temporary > 0 or least.activations > 0
        assert least.total <= one.total <= other.total <= most.total
        assert one.total - least.total <= 1 << 20


def test_weight_halves_wait_with_output_gradients_that_nothing_offloads() -> None:
    """Where many experts see each token, these are more than all that was saved."""
    model = replace(load_model("deepseek-v3"), num_hidden_layers=8, first_k_dense_replace=0, num_nextn_predict_layers=0)
    cluster = load_cluster("h800:64")
    jobs = [
        Job(model, cluster, pp=4, ep=16, schedule=schedule, global_batch_size=128, offload=OFFLOADED)
        for schedule in ("1f1b", "zb-h1")
    ]
    whole, split = (estimate_memory(job, held=(0,) * 4) for job in jobs)
    cut = ActivationCut.of(jobs[1], "p2p", fused_loss=True)
    assert whole[3].activations + whole[3].logits == block_activations(cut, "L").saved, "a head is not offloaded"
    layer = block_activations(cut, "t")
    waiting = split[1].activations / (2 * layer.split)  # layers
    assert waiting == pytest.approx(round(waiting))
    assert waiting >= 1
    assert layer.split > layer.saved
    assert whole[1].activations == 0
    assert split[1].total < estimate_memory(replace(jobs[1], offload=()))[1].total


def test_lower_precision_saves_smaller_inputs_of_products() -> None:
    sizes = [_saved(_job(precision=precision), "t") for precision in ("bf16", "mxfp8", "fp8", "nvfp4")]
    assert sizes == sorted(sizes, reverse=True)
    inputs = 2048 * (2 * 1024 + 4096)  # norms' outputs and the activation's; attention's output stays in BF16
    assert sizes[0] - sizes[2] == inputs * (OPERAND_BYTES["bf16"] - OPERAND_BYTES["fp8"])


def test_a_loss_that_is_not_fused_keeps_more() -> None:
    fused, apart = (estimate_memory(_job(), MemoryOptions(fused_cross_entropy=kind))[0] for kind in (True, False))
    logits = 2048 * 32768
    assert (fused.logits, apart.logits) == (2 * logits, 4 * logits)
    assert apart.temporary - fused.temporary == 2 * logits


def test_a_rank_with_experts_peaks_as_tokens_come_back() -> None:
    job = _job(MOE, pp=2, ep=4)
    first, _ = estimate_memory(job)
    routed = 2 * 2048 * 1024 * 2
    assert first.temporary == 4 * routed + 2048 * 1024 * 2


def test_options_and_blocks_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="cp_comm_type is p2p or a2a, got 'ring'"):
        MemoryOptions(cp_comm_type="ring")
    with pytest.raises(ValueError, match=r"gradient_bytes is 4 \(FP32\) or 2 \(BF16\), got 8"):
        _job(gradient_bytes=8)
    with pytest.raises(ValueError, match="blocks are E, t, d, m and L, got 'x'"):
        _saved(_job(), "x")
    with pytest.raises(ValueError, match="blocks are E, t, d, m and L, got 'x'"):
        block_parameters(ModelCut(DENSE), "x")
    with pytest.raises(ValueError, match="8 layers cannot be cut into 16 stages"):
        estimate_memory(_job(pp=4, vpp=4, schedule="interleaved"))


def test_an_overlapped_forward_saves_as_its_backward_frees() -> None:
    """With one rank two micro-batches overlap, and little more than one is alive."""
    model = load_model("qwen3-30b-a3b")
    job = Job(model, load_cluster("b200:8"), ep=8, global_batch_size=64, schedule="1f1b")
    alone, overlapped = (
        estimate_memory(replace(job, schedule=name))[0].activations for name in ("1f1b", "interleaved-overlap")
    )
    assert alone < overlapped < 1.1 * alone
