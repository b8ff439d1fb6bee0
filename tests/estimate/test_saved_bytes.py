"""What costs say that forwards save is what the memory estimate counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.activations import ActivationCut, block_activations
from treadle.estimate.cluster import PRESETS
from treadle.estimate.host_copies import host_bytes, module_bytes, offloaded_bytes
from treadle.estimate.job import OFFLOADED
from treadle.estimate.op_costs import estimate_costs


@pytest.mark.parametrize("name", ["deepseek-v3", "llama3-70b", "qwen3-30b-a3b", "gpt3-175b"])
@pytest.mark.parametrize("recompute", [(), ("attn",), ("mlp",), ("attn", "mlp")])
def test_parts_of_a_layer_add_up_to_it(name: str, recompute: tuple[str, ...]) -> None:
    model = load_model(name)
    job = Job(
        model, load_cluster("h800:64"), pp=4, ep=8 if model.is_moe else 1, global_batch_size=64, recompute=recompute
    )
    saved = estimate_costs(job).saved_bytes
    cut = ActivationCut.of(job, "p2p", fused_loss=True)
    for block, prefix in (("t", ""), ("d", "dense_")):
        if f"{prefix}attn" in saved:
            kept = sum(saved[f"{prefix}{part}{'_input' if part in recompute else ''}"] for part in ("attn", "mlp"))
            assert kept == pytest.approx(block_activations(cut, block).saved, abs=2)
    assert saved["head"] == block_activations(cut, "L").saved


def test_offload_takes_longer_where_gpus_share_a_link() -> None:
    model, alone = load_model("llama3-70b"), load_cluster("h800:64")
    shared = replace(alone, gpus_per_pcie=2)
    once, twice = (
        estimate_costs(Job(model, cluster, tp=8, pp=4, global_batch_size=64, offload=OFFLOADED)).message["offload"]
        for cluster in (alone, shared)
    )
    assert once < twice == pytest.approx(2 * once, rel=0.05)
    assert "offload" not in estimate_costs(Job(model, alone, tp=8, pp=4, global_batch_size=64)).message


@pytest.mark.parametrize("name", ["deepseek-v3", "llama3-70b", "qwen3-30b-a3b", "gpt3-175b"])
@pytest.mark.parametrize("recompute", [(), ("attn",), ("moe_act", "layernorm")])
def test_each_module_copies_its_own_inputs_and_all_of_them_the_layer(name: str, recompute: tuple[str, ...]) -> None:
    model = load_model(name)
    whole = Job(
        model,
        load_cluster("h800:64"),
        pp=4,
        ep=8 if model.is_moe else 1,
        global_batch_size=64,
        recompute=recompute,
        offload=OFFLOADED,
    )
    saved = block_activations(ActivationCut.of(whole, "p2p", fused_loss=True), "t").saved
    sizes = module_bytes(whole)
    assert sum(sizes.values()) == pytest.approx(saved, abs=len(sizes)) == offloaded_bytes(whole, "t")
    assert {"attn_norm", "mlp_norm"} <= set(sizes) <= set(OFFLOADED)
    assert ("moe_act" in sizes) == model.is_moe == ("mlp_act" not in sizes)
    small = replace(whole, offload=("mlp_norm", "attn_norm"))
    copied, all_of_it = (estimate_costs(job) for job in (small, whole))
    assert copied.saved_bytes["offload"] == sizes["mlp_norm"] + sizes["attn_norm"]
    assert copied.message["offload"] < all_of_it.message["offload"]
    assert host_bytes(small) < host_bytes(whole)
    assert host_bytes(replace(whole, offload=())) == 0


def test_every_preset_has_the_memory_of_its_host() -> None:
    for file in PRESETS.glob("*.toml"):
        cluster = load_cluster(file.stem)
        assert cluster.host_memory_bytes > cluster.memory_bytes / 2, file.stem
