"""Clusters and jobs that make no sense are refused; the message says what is allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.estimate import Job, estimate_costs, load_cluster, load_model
from treadle.estimate.efficiency import NAMES
from treadle.estimate.rates import constant

LLAMA, MOE = load_model("llama3-70b"), load_model("qwen3-30b-a3b")


def _job(**given: Any) -> Job:
    return Job(**{"model": LLAMA, "cluster": load_cluster("h100:64"), "global_batch_size": 64, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": 0}, "tp is a whole number from 1, got 0"),
        ({"pp": 2.0}, r"pp is a whole number from 1, got 2\.0"),
        ({"recompute_layers": -1}, "recompute_layers is a whole number from 0, got -1"),
        ({"precision": "fp16"}, "precision is one of bf16, .*, got 'fp16'"),
        ({"cuda_graph": "all"}, "cuda_graph is one of none, partial, whole, got 'all'"),
        ({"sharding": "optimiser"}, "sharding is one of .* did you mean 'optimizer'?"),
        ({"recompute": "full"}, r"recompute is a tuple of modules, got 'full'; write \('full',\)"),
        ({"recompute": ("core",)}, "recompute is one of .*, got 'core'"),
        ({"recompute": ("full", "moe_act")}, "give either full or parts"),
        ({"recompute_layers": 2}, "recompute_layers is for recompute full"),
        ({"tp": 3}, "tp x cp x pp is 3 and does not divide 64 GPUs"),
        ({"global_batch_size": 65}, "the nearest is 64"),
        ({"ep": 8}, "llama3-70b has no experts, got ep=8 etp=1; leave both 1"),
        ({"model": MOE, "ep": 12, "cluster": load_cluster("h100:48"), "global_batch_size": 48}, "ep divides .*is 8"),
        ({"model": MOE, "ep": 24}, r"ep x etp \(24 x 1\) does not divide the 64 ranks"),
        ({"model": replace(LLAMA, num_attention_heads=60, num_key_value_heads=6, head_dim=128), "tp": 8}, "is 6"),
        ({"tp": 32, "model": replace(LLAMA, intermediate_size=28688)}, "tp divides intermediate_size .*is 22"),
        ({"cp": 8, "seq_len": 4104}, r"2 x cp divides seq_len \(4104\), got 16; the next smaller that does is 12"),
        ({"tp": 8, "seq_len": 4100}, r"cp x tp divides seq_len x micro_batch_size \(4100\), got 8"),
        ({"layout": ("Ett", "tL")}, "a layout of llama3-70b has 80 layers and 0 MTP blocks, got 3 and 0"),
        ({"layout": ("tE", "tL")}, "the first block is E"),
    ],
)
def test_jobs_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _job(**given)


def test_first_layers_of_a_layout_become_the_dense_ones() -> None:
    model = replace(load_model("deepseek-v3"), num_hidden_layers=5)
    job = _job(model=model, layout=("Ett", "tttmL"), pp=2)
    assert job.layout == ("Edd", "dttmL")


def test_clusters_that_cannot_be(tmp_path: Path) -> None:
    for text, message in (
        ('gpu = "h100"\nnum_gpus = 0', "num_gpus of a cluster is a whole number from 1, got 0"),
        ('gpu = "h100"\nnic_bandwidth = -1.0', "nic_bandwidth of a cluster is a number above 0, got -1.0"),
        ('gpu = "h100"\n[peak_flops]\nfp4 = 1e15', "peak_flops has rates for bf16, .* got fp4"),
        ('gpu = "h100"\n[peak_flops]\nbf16 = "fast"', r"peak_flops\.bf16 of a cluster is a number above 0, got 'fast'"),
        ('gpu = "h100"\nnic_bandwidth = 400', r"is bytes a second, from .* got 400; 400 Gb/s are 5e\+10"),
        ('gpu = "h100"\nnic_bandwidth = 400e9', r"got 4e\+11; 4e\+11 bits a second are 5e\+10"),
        ('gpu = "h100"\nnvlink_bandwidth = 450', r"got 450; 450 GB/s are 4\.5e\+11"),
        ('gpu = "h100"\npcie_bandwidth = 64', r"got 64; 64 GB/s are 6\.4e\+10"),
        ('gpu = "h100"\nmemory_bandwidth = 3.35', r"got 3\.35; 3\.35 TB/s are 3\.35e\+12"),
        ('gpu = "h100"\nmemory_bandwidth = 3350', r"got 3350; 3350 GB/s are 3\.35e\+12"),
        ('gpu = "h100"\nmemory_gib = 81920', r"is GiB, from 1 to 4096, got 81920; 81920 MiB are 80"),
        ('gpu = "h100"\nmemory_gib = 80e9', r"got 8e\+10; 8e\+10 bytes are 74\.5"),
        ('gpu = "h100"\n[peak_flops]\nbf16 = 989', r"got 989; 989 TFLOP/s are 9\.89e\+14"),
        ('gpu = "h100"\nnum_gpus = 16\nnvlink_domain = 7', r"divides num_gpus \(16\), got 7; .* that does is 4"),
        ('gpu = "h100"\nnic = 1', "nic is no field of a cluster; did you mean 'nic_bandwidth'?"),
        ("num_gpus = 8", "lacks nvlink_domain, memory_gib, .*; give them, or gpu = a preset"),
        ('gpu = "h1000"', r"cluster\.toml: gpu is one of a100, .*got 'h1000'; no other chip has its rates"),
        ('gpu = "h100"\n[efficiency]\ndp = 0', r"efficiency\.dp of a cluster is a number above 0, up to 10, got 0"),
        (
            'gpu = "h100"\n[efficiency]\ngemm_fp8 = inf',
            r"efficiency\.gemm_fp8 of a cluster is a number above 0, up to 2, got inf",
        ),
        ('gpu = "h100"\n[efficiency]\ntp = nan', r"efficiency\.tp of a cluster is a number above 0, up to 10, got nan"),
        (
            'gpu = "h100"\n[efficiency]\ntp = "all"',
            r"efficiency\.tp of a cluster is a number above 0, up to 10, got 'all'",
        ),
        ('gpu = "h100"\n[efficiency]\ndp_hidden = 1.1', r"efficiency\.dp_hidden of .* from 0 to 1, got 1.1"),
        (
            'gpu = "h100"\n[efficiency]\nstep_us = -1',
            r"efficiency\.step_us of a cluster is a number from 0 to 1e\+08, got -1",
        ),
        ('gpu = "h100"\n[efficiency]\ngemm = 5', r"efficiency\.gemm of .* up to 2, got 5; 1 is the whole peak rate"),
        ('gpu = "h100"\n[efficiency]\ncp = 50', r"efficiency\.cp of a cluster is a number above 0, up to 10, got 50"),
        ('gpu = "h100"\n[efficiency]\ngem = 0.5', r"gem is no constant of \[efficiency\]; did you mean 'gemm'?"),
        ('gpu "h100"', r"cluster\.toml:1: not TOML: .*line 1, column 5"),
        ('gpu = "h100"\npeak_flops = 989e12', r"peak_flops of a cluster is a section, got 9.*write \[peak_flops\]"),
        ('gpu = "h100"\nefficiency = 0.5', r"efficiency of a cluster is a section, got 0\.5; write \[efficiency\]"),
        ('gpu = "h100"\n[num_gpus]\nours = 8', r"num_gpus of a cluster is a value, got a section; write num_gpus ="),
        ('gpu = "h100"\nname = 3', r'name of a cluster is text in quotes, got 3; write name = "3"'),
        ("gpu = 100", r'gpu of a cluster is text in quotes, got 100; write gpu = "100"'),
    ):
        file = tmp_path / "cluster.toml"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_cluster(file)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("sliding_window = 128", r"give sliding_window and num_windowed_layers, or neither, got 128 and 0"),
        ("num_windowed_layers = 2", r"give sliding_window and num_windowed_layers, or neither, got 0 and 2"),
        ("num_experts_per_tok = 2", r"num_experts_per_tok is about experts, and the model has none; give num_experts"),
        ("moe_intermediate_size = 64", r"moe_intermediate_size is about experts"),
        ("n_shared_experts = 1", r"n_shared_experts is about experts"),
        ("first_k_dense_replace = 1", r"first_k_dense_replace is about experts"),
        ("v_head_dim = 64", r"v_head_dim is about MLA, and attention is GQA; give kv_lora_rank"),
        ("name = 5", r"name is a text, got 5"),
    ],
)
def test_models_with_a_field_that_says_nothing_by_itself(more: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    sizes = "hidden_size = 64\nnum_hidden_layers = 4\nvocab_size = 320\nnum_attention_heads = 4\n"
    file.write_text(sizes + more, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_model(file)


def test_clusters_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.toml$"):
        load_cluster(tmp_path / "none.toml")
    with pytest.raises(ValueError, match=r"one of a100, .*\(h100:2048\), got 'h200'; no other chip has its rates"):
        load_cluster("h200:64")


def test_names_say_how_many_gpus_there_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text, name in (
        ('gpu = "h100"', "8 mine"),
        ('gpu = "h100"\nname = "ours"', "ours, 8 GPUs"),
        ('gpu = "h100"\nname = "ours"\nnum_gpus = 16', "ours"),
    ):
        file.write_text(text, encoding="utf-8")
        assert load_cluster(file).name == name
    assert [load_cluster(name).name for name in ("h100", "gb200", "h100:2048")] == ["8 h100", "72 gb200", "2,048 h100"]


def test_every_constant_of_efficiency_is_allowed() -> None:
    everything = dict.fromkeys(NAMES, 0.5)
    assert replace(load_cluster("h100"), efficiency=everything).efficiency == everything
    nothing_hidden = {"dp_hidden": 0.0, "step_us": 0}
    costs = estimate_costs(_job(cluster=replace(load_cluster("h100:64"), efficiency=nothing_hidden)))
    assert costs.step["gather_params"] > estimate_costs(_job()).step["gather_params"] > 0


@pytest.mark.parametrize("gpu", ["h100", "h800", "h20"])
def test_hopper_has_no_mxfp8(gpu: str) -> None:
    """Transformer Engine: "Device compute capability 10.0 or higher required for MXFP8 execution"."""
    with pytest.raises(ValueError, match=r"computes in bf16, fp8, got mxfp8; take bf16 or another GPU"):
        load_cluster(gpu).peak("mxfp8")


def test_each_precision_has_its_own_rate() -> None:
    cluster = load_cluster("b200")
    assert cluster.peak("mxfp8") == cluster.peak("fp8") == cluster.peak_flops["fp8"]
    assert replace(cluster, peak_flops={**cluster.peak_flops, "mxfp8": 1e15}).peak("mxfp8") == 1e15
    with pytest.raises(ValueError, match=r"computes in fp8, got bf16; add its rate to \[peak_flops\]"):
        replace(cluster, peak_flops={"fp8": 1e15}).peak("bf16")


def test_a_cluster_file_replaces_entries_of_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('gpu = "gb200"\nnum_gpus = 144\n[peak_flops]\nbf16 = 2e15', encoding="utf-8")
    mine = load_cluster(file)
    assert (mine.name, mine.num_gpus, mine.nvlink_domain) == ("mine", 144, 72)
    assert mine.peak_flops == {"bf16": 2e15, "fp8": 5e15, "mxfp8": 5e15, "nvfp4": 1e16}


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["gemm", "grouped", "cast"])
def test_a_file_replaces_all_kinds_of_a_constant_of_its_preset(name: str, precision: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'gpu = "b200"\n[efficiency]\n{name} = 0.1', encoding="utf-8")
    assert constant(load_cluster(file), name, precision) == 0.1
    file.write_text(f'gpu = "b200"\n[efficiency]\n{name} = 0.1\n{name}_{precision} = 0.2', encoding="utf-8")
    assert constant(load_cluster(file), name, precision) == 0.2


def test_a_file_replaces_nothing_that_it_does_not_say(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('gpu = "b200"\n[efficiency]\nlaunch_us = 7', encoding="utf-8")
    mine, preset = load_cluster(file), load_cluster("b200")
    assert {constant(mine, "launch_us", graph) for graph in ("none", "partial", "whole")} == {7}
    assert constant(mine, "gemm", "fp8") == constant(preset, "gemm", "fp8") == preset.efficiency["gemm_fp8"]


def test_a_slow_gemm_in_a_file_makes_a_step_longer(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('gpu = "h100"\nnum_gpus = 64\n[efficiency]\ngemm = 0.1', encoding="utf-8")
    slow, preset = (estimate_costs(_job(cluster=each, tp=8)) for each in (load_cluster(file), load_cluster("h100:64")))
    assert slow.of_block("t") > 2 * preset.of_block("t")


def test_a_domain_may_be_used_in_part(tmp_path: Path) -> None:
    """Racks of 72 are often used 64 at a time; less than one domain has no rest."""
    file = tmp_path / "mine.toml"
    file.write_text('gpu = "h100"\nnum_gpus = 16\nnvlink_domain = 32', encoding="utf-8")
    assert load_cluster(file).nvlink_domain == 32
    assert (load_cluster("gb200:256").nvlink_domain, load_cluster("gb200:64").nvlink_domain) == (72, 72)


def test_a_precision_that_is_none_is_told_from_one_that_a_gpu_has_not() -> None:
    with pytest.raises(ValueError, match=r"one of bf16, fp8, mxfp8, nvfp4, got 'fp4'; .* 8 a100 computes in bf16$"):
        load_cluster("a100").peak("fp4")
    with pytest.raises(ValueError, match=r"^8 h100 computes in bf16, fp8, got nvfp4; take bf16 or another GPU"):
        load_cluster("h100").peak("nvfp4")


@pytest.mark.parametrize("name", ["mi300x", "nope", "tpu"])
def test_a_name_that_is_far_from_all_is_no_guess(name: str) -> None:
    with pytest.raises(ValueError, match=f"got '{name}'; no other chip has its rates"):
        load_cluster(name)
    with pytest.raises(ValueError, match=f"got '{name}'$"):
        load_model(name)
