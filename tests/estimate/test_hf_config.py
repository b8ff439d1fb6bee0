"""A Hugging Face config.json is read as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.estimate import Job, estimate_costs, load_cluster, load_model
from treadle.estimate.block_work import block_work
from treadle.estimate.flops import model_flops
from treadle.estimate.hf_unsupported import OF_VLLM, READ
from treadle.estimate.model_shape import shape_from_hf
from treadle.estimate.parameter_counts import count_parameters
from treadle.estimate.saved_bytes import saved_bytes

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
}
MLA: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "rope_theta": 500000.0, "tie_word_embeddings": False, "max_position_embeddings": 8192},
    "qwen3_moe": {
        **SMALL,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "deepseek_v3": {
        **MLA,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "gpt_oss": {
        **SMALL,
        "head_dim": 16,
        "attention_bias": True,
        "num_local_experts": 8,
        "experts_per_token": 2,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen2_moe": {
        **SMALL,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
    },
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "mistral": {**SMALL, "sliding_window": 4096},
    "qwen3": {**SMALL, "head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 320, "n_positions": 128, "n_inner": None},
}


def _read(kind: str, directory: Path, **more: Any) -> Any:
    (directory / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **more}), encoding="utf-8")
    return load_model(directory)


def test_kinds_say_the_same_thing_in_their_own_words(tmp_path: Path) -> None:
    qwen, oss, mixtral = (_read(kind, tmp_path) for kind in ("qwen3_moe", "gpt_oss", "mixtral"))
    assert (qwen.num_experts, qwen.moe_intermediate_size, qwen.head_dim, qwen.qk_norm) == (8, 48, 32, True)
    assert (qwen.sliding_window, qwen.num_windowed_layers) == (0, 0)
    assert (oss.num_experts, oss.moe_intermediate_size, oss.mlp_bias, oss.attention_bias) == (8, 176, True, True)
    assert (oss.sliding_window, oss.num_windowed_layers) == (128, 2)
    assert (mixtral.num_experts, mixtral.num_experts_per_tok, mixtral.moe_intermediate_size) == (4, 2, 176)
    deepseek = _read("deepseek_v3", tmp_path)
    assert deepseek.is_mla
    assert deepseek.blocks == "EdtttmL"
    assert _read("mistral", tmp_path).num_windowed_layers == 4
    gpt2 = _read("gpt2", tmp_path)
    assert (gpt2.hidden_size, gpt2.gated_mlp, gpt2.tie_word_embeddings, gpt2.intermediate_size) == (
        64,
        False,
        True,
        256,
    )


def test_the_text_of_a_model_with_more(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": SMALL}), encoding="utf-8")
    assert load_model(tmp_path / "config.json").num_hidden_layers == 4


def test_errors_name_what_is_lacking_or_cannot_be_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x lacks vocab_size"):
        shape_from_hf({key: value for key, value in SMALL.items() if key != "vocab_size"}, "x")
    with pytest.raises(ValueError, match=r"2 of 4, dense: \[0, 2\].*write a \.toml"):
        _read("qwen3_moe", tmp_path, decoder_sparse_step=2)
    with pytest.raises(ValueError, match=r"dense: \[2\]"):
        _read("qwen3_moe", tmp_path, mlp_only_layers=[2])
    assert _read("qwen3_moe", tmp_path, mlp_only_layers=[0, 1]).first_k_dense_replace == 2
    with pytest.raises(ValueError, match="did you mean 'llama3-70b'"):
        load_model("llama-3-70b")
    with pytest.raises(ValueError, match="num_key_value_heads divides num_attention_heads"):
        _read("llama", tmp_path, num_key_value_heads=3)
    with pytest.raises(ValueError, match="hidden_size is a whole number from 1, got '64'"):
        _read("llama", tmp_path, hidden_size="64")


@pytest.mark.parametrize(
    ("more", "windowed"),
    [
        ({}, 0),
        ({"use_sliding_window": False}, 0),
        ({"use_sliding_window": True, "max_window_layers": 3}, 1),
        ({"use_sliding_window": True}, 0),
        ({"use_sliding_window": True, "max_window_layers": 0}, 4),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_has_windows_only_if_it_says_so(kind: str, more: dict[str, Any], windowed: int) -> None:
    config = {**SMALL, "model_type": kind, "sliding_window": 32, **more}
    shape = shape_from_hf(config, kind)
    assert (shape.sliding_window, shape.num_windowed_layers) == (32 if windowed else 0, windowed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["qwen2", "qwen3", "qwen2_moe", "gemma2", "gpt_oss", "cohere2", "exaone4", "olmo3", "afmoe", "cwm", "vaultgemma"],
)
@pytest.mark.parametrize("used", [{}, {"use_sliding_window": False}, {"use_sliding_window": True}])
def test_windowed_layers_are_those_of_transformers(kind: str, used: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    said = {**SMALL, "num_hidden_layers": 7, "sliding_window": 32, "max_window_layers": 5, **used}
    said |= experts if kind in ("qwen2_moe", "gpt_oss") else {}
    if not kind.startswith("qwen"):
        said = {key: value for key, value in said.items() if "window_" not in key and "use_" not in key}
    layers = transformers.AutoConfig.for_model(kind, **said).layer_types
    shape = shape_from_hf({"model_type": kind, **said}, kind)
    assert shape.num_windowed_layers == sum(each == "sliding_attention" for each in layers)


def test_the_windows_of_command_r7b_are_three_of_four_layers() -> None:
    """As on the hub: a pattern, and no layer_types."""
    said = {**SMALL, "model_type": "cohere2", "num_hidden_layers": 32, "sliding_window": 4096}
    shape = shape_from_hf({**said, "sliding_window_pattern": 4, "layer_switch": 4}, "Command-R7B")
    assert shape.num_windowed_layers == 24


def test_a_window_without_its_layers_is_refused() -> None:
    said = {**SMALL, "model_type": "granite_swa", "sliding_window": 4096}
    with pytest.raises(ValueError, match=r"neither layer_types nor its model_type 'granite_swa' says which"):
        shape_from_hf(said, "x")
    typed = {**said, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert shape_from_hf(typed, "x").num_windowed_layers == 2


def test_qwen2_has_no_bias_in_the_output_projection() -> None:
    """Qwen2.5-7B: 7,615,616,512 parameters (its safetensors)."""
    said = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064}
    sizes = {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
    assert count_parameters(shape_from_hf({**said, **sizes}, "Qwen2.5-7B")) == 7_615_616_512


def test_a_window_of_the_whole_sequence_changes_nothing() -> None:
    whole = shape_from_hf({**SMALL, "model_type": "llama"}, "whole")
    for window, same in ((512, True), (4096, True), (511, False)):
        windowed = replace(whole, sliding_window=window, num_windowed_layers=4)
        assert (model_flops(windowed, 512) == model_flops(whole, 512)) is same
        jobs = [Job(each, load_cluster("h100"), global_batch_size=8, seq_len=512) for each in (windowed, whole)]
        flops = {block_work(job, "t")["attn"].f.attention_flops for job in jobs}
        assert (len(flops) == 1) is same


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "roberta"},
        {"architectures": ["ViTForImageClassification"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "new", "architectures": ["NewForConditionalGeneration"], "is_encoder_decoder": True},
        {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": SMALL},
    ],
)
def test_encoders_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="x is not a causal language model's"):
        shape_from_hf({**SMALL, **config}, "x")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"])
def test_decoders_are_not(name: str) -> None:
    assert shape_from_hf({**SMALL, "architectures": [name], "is_encoder_decoder": False}, "x").hidden_size == 64


def test_files_that_say_no_model(tmp_path: Path) -> None:
    file, directory = tmp_path / "mine.toml", tmp_path / "empty"
    directory.mkdir()
    for text, message in (
        (
            "hidden_size = 64\nvocab_size = 320",
            r"mine\.toml lacks num_hidden_layers, num_attention_heads; .* has them$",
        ),
        ("hidden_size = 1\nnum_hidden_layers = 1\nnum_attention_heads = 1", "lacks vocab_size; every model has it$"),
        ("hidden_size = 64\nvocab_size =", r"mine\.toml:2: not TOML: .*\(at "),
        ("hidden_size 64", r"mine\.toml:1: not TOML: .*line 1, column 13"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_model(file)
    (tmp_path / "config.json").write_text('{"hidden_size": 64,\n "vocab_size" 3}', encoding="utf-8")
    for where in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match=r"config\.json:2: not JSON: .*column 15"):
            load_model(where)
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json has a JSON object, got \[1\]"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json in .*empty"):
        load_model(directory)
    for name in ("none.toml", "none.json"):
        with pytest.raises(ValueError, match=f"there is no file .*{name}$"):
            load_model(tmp_path / name)


def test_a_directory_without_config_does_not_hide_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama3-8b").mkdir()
    assert load_model("llama3-8b").num_hidden_layers == 32


@pytest.mark.slow
def test_parameters_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for kind, fields in CONFIGS.items():
        config = transformers.AutoConfig.for_model(kind, **fields)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        shape = shape_from_hf(json.loads(config.to_json_string(use_diff=False)), kind)
        sinks = 4 * 4 if kind == "gpt_oss" else 0  # a number a head and layer, not counted here
        gate = 4 * 64 if kind == "qwen2_moe" else 0  # of the shared expert
        assert count_parameters(shape) + sinks + gate == sum(each.numel() for each in model.parameters()), kind


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"model_type": "qwen3_next"}, "model_type 'qwen3_next'"),
        ({"full_attention_interval": 4}, "full_attention_interval = 4"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads = 16"),
        ({"mamba_d_state": 128}, "mamba_d_state = 128"),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, "layer_types with 'linear_attention'"),
        ({"attn_type_list": [0, 1, 0, 1]}, "attn_type_list with 0"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size = 8192"),
        ({"model_type": "arctic"}, "model_type 'arctic'"),
        ({"model_type": "ouro"}, "model_type 'ouro'"),
        ({"total_ut_steps": 4}, "total_ut_steps = 4"),
        ({"recurrent_layers": [1, 2]}, r"recurrent_layers = \[1, 2\]"),
        ({"parallel_attn_mlp_res": True}, "parallel_attn_mlp_res = True"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512"),
        ({"moe_layer_end_index": 2}, "moe_layer_end_index = 2"),
        ({"index_topk": 2048}, "index_topk = 2048"),
        ({"num_odd_experts": 8}, "num_odd_experts = 8"),
    ],
)
def test_layers_that_a_shape_does_not_have_are_refused(more: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"says {key}.*; a shape has .* write a .toml file"):
        shape_from_hf({**SMALL, **more}, "x")
    shape_from_hf({**SMALL, **dict.fromkeys(more, None)}, "x")


@pytest.mark.parametrize(
    ("said", "dense"),
    [
        ({"moe_layer_freq": [0, 1, 1, 1]}, 1),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, 2),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, 1),
        ({"moe_layer_start_index": 1, "moe_layer_interval": 1}, 1),
        ({"moe_layers": [1, 2, 3]}, 1),
        ({"interleave_moe_layer_step": 2}, None),
        ({"moe_layer_freq": [0, 1, 0, 1]}, None),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, None),
    ],
)
def test_dense_layers_are_counted_by_every_key(said: dict[str, Any], dense: int | None) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    if dense is None:
        with pytest.raises(ValueError, match="has layers with experts among dense ones"):
            shape_from_hf({**SMALL, **experts, **said}, "x")
    else:
        assert shape_from_hf({**SMALL, **experts, **said}, "x").first_k_dense_replace == dense


@pytest.mark.parametrize(("width", "shared"), [(48, 1), (96, 2), (40, 0), (72, 0)])
def test_a_shared_expert_counts_with_its_own_width(width: int, shared: int) -> None:
    """In parameters, computation and what is saved; as wide as routed ones it is one of them."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    without = shape_from_hf({**SMALL, **experts}, "x")
    shape = shape_from_hf({**SMALL, **experts, "shared_expert_intermediate_size": width}, "x")
    assert (shape.n_shared_experts, shape.shared_width) == (shared, width)
    assert count_parameters(shape) - count_parameters(without) == 4 * 3 * 64 * width
    assert model_flops(shape, 512) > model_flops(without, 512)
    jobs = [Job(each, load_cluster("h100"), global_batch_size=8, seq_len=512) for each in (shape, without)]
    assert saved_bytes(jobs[0])["mlp"] > saved_bytes(jobs[1])["mlp"]
    assert estimate_costs(jobs[0]).of_block("t") > estimate_costs(jobs[1]).of_block("t")


def test_an_embedding_is_tied_where_a_model_with_more_than_text_says_so() -> None:
    assert shape_from_hf({"tie_word_embeddings": True, "text_config": SMALL}, "x").tie_word_embeddings
    assert not shape_from_hf({"text_config": SMALL}, "x").tie_word_embeddings


PARTS = 5
"""Of the kinds, of which one is for every change."""

_MORE_THAN_TEXT = {"gemma3", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"}


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))])
def test_every_kind_of_transformers_is_counted_or_refused(part: int) -> None:
    """A kind that is read has the parameters of its default model, but for biases and norms; others are refused."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kinds = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    wrong, read = {}, 0
    for kind in sorted(kinds.keys() - _MORE_THAN_TEXT)[part::PARTS]:
        try:
            config = transformers.AutoConfig.for_model(kind)
        except Exception:  # it has no defaults
            continue
        try:
            shape = shape_from_hf(json.loads(config.to_json_string(use_diff=False)), kind)
        except ValueError:
            continue
        try:
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception:  # its defaults make no model
            continue
        read += 1
        ratio = sum(each.numel() for each in model.parameters()) / count_parameters(shape)
        if abs(ratio - 1) > 0.02:
            wrong[kind] = ratio
    assert read > 50 / PARTS
    assert not wrong


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text_config": 3}, "config.json: text_config is an object, got 3"),
        ({"architectures": "LlamaForCausalLM"}, "config.json: architectures is a list, got 'LlamaForCausalLM'"),
        ({"layer_types": 5}, "config.json: layer_types is a list, got 5"),
        ({"attn_type_list": 1}, "config.json: attn_type_list is a list, got 1"),
        ({"num_hidden_layers": "four"}, "config.json: num_hidden_layers is a whole number, got 'four'"),
        ({"moe_layer_freq": "x"}, "config.json: moe_layer_freq is a whole number, got 'x'"),
        ({"mlp_only_layers": 3}, "config.json: mlp_only_layers is a list, got 3"),
        ({"moe_intermediate_size": "48"}, "config.json: moe_intermediate_size is a whole number, got '48'"),
        ({"shared_expert_intermediate_size": 4.5}, "config.json: shared_expert_intermediate_size is a whole"),
        ({"num_experts": "8"}, "num_experts is a whole number from 0, got '8'"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_from_hf({**CONFIGS["qwen3_moe"], **changed}, "m")


def test_a_dense_config_may_say_what_is_about_experts() -> None:
    said = {"num_experts": 0, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
    assert shape_from_hf({**CONFIGS["llama"], **said}, "m") == shape_from_hf(CONFIGS["llama"], "m")


def test_kinds_that_are_read_are_models_of_transformers_or_vllm() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    assert {*OF_VLLM} < READ
    assert READ - {*OF_VLLM} <= {*auto.CONFIG_MAPPING_NAMES}
