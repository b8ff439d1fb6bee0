"""Hugging Face's configs of the architectures that `ModelConfig` covers, both ways.

qwen3       dense layers
qwen3_moe   softmax router; `mlp_only_layers` are the dense layers
dots1       Qwen3's attention with DeepSeek-V3's sigmoid router and shared expert

What only training needs (MTP, the bias's rate) stands in the same file under our own names; transformers keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.fields.input_files import read_json

CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "dots1": "Dots1ForCausalLM"}

_COMMON = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_OURS = ("num_nextn_predict_layers", "mtp_loss_weight", "bias_update_rate", "router_aux_loss_coef")
_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
_SIGMOID = ("first_k_dense_replace", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")

_NEEDED: dict[str, Any] = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
"""What these settings have to be, where a config has them."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    "dots1": {"norm_topk_prob": False},
}
"""transformers' defaults that are not ours, for configs that leave the setting out."""


def read(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return a config given as a mapping, as its file, or as the directory of its `config.json`.

    Raises:
        ValueError: there is no such file, or it has no config.

    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no config at {path}; give a directory with a config.json, or the config itself")
    return read_json(path)


def fields_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the ModelConfig that a Hugging Face config describes.

    Raises:
        ValueError: the architecture or a setting is not one of ours.

    """
    kind = hf.get("model_type")
    if kind not in CLASSES:
        raise ValueError(
            f"the model types are {', '.join(CLASSES)}, got {kind!r}; treadle.models.cut_causal_lm cuts any other "
            "causal model of transformers into stages"
        )
    _refuse_foreign(hf)
    given = {**_DEFAULTS[kind], **{name: value for name, value in hf.items() if value is not None}}
    fields = {name: given[name] for name in (*_COMMON, *_OURS) if name in given}
    fields["rope_theta"] = _rope_theta(hf)
    fields.setdefault("head_dim", given["hidden_size"] // given["num_attention_heads"])
    if kind == "qwen3":
        return {**fields, "num_experts": 0}
    fields |= {name: given[name] for name in _EXPERTS if name in given}
    if kind == "qwen3_moe":
        fields |= {"num_experts": _num_experts(given), "first_k_dense_replace": _num_first_dense(hf)}
        return fields
    fields |= {name: given[name] for name in _SIGMOID if name in given}
    return {**fields, "num_experts": _num_experts(given), "scoring": "sigmoid"}


def hf_config_of(fields: Mapping[str, Any], num_dense_layers: int) -> dict[str, Any]:
    """Return the Hugging Face config of a ModelConfig, given by its fields and the number of its dense layers."""
    num_experts, rope_theta = fields["num_experts"], fields["rope_theta"]
    kind = "qwen3" if not num_experts else "qwen3_moe" if fields["scoring"] == "softmax" else "dots1"
    hf: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind, **_NEEDED}
    hf |= {name: fields[name] for name in (*_COMMON, *_OURS)}
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
    hf["rope_theta"] = rope_theta
    hf |= {"use_sliding_window": False, "sliding_window": None}
    if kind != "qwen3":
        hf |= {name: fields[name] for name in _EXPERTS}
    if kind == "qwen3_moe":
        hf |= {"num_experts": num_experts, "decoder_sparse_step": 1}
        hf["mlp_only_layers"] = list(range(num_dense_layers))
    if kind == "dots1":
        hf |= {name: fields[name] for name in _SIGMOID}
        hf["n_routed_experts"] = num_experts
        hf["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    return hf


def _refuse_foreign(hf: Mapping[str, Any]) -> None:
    """Refuse settings that these layers do not have."""
    for name, needed in _NEEDED.items():
        if hf.get(name, needed) != needed:
            raise ValueError(f"{name} is {needed!r} in these layers, got {hf[name]!r} in the config")
    layer_types = set(hf.get("layer_types") or ()) - {"full_attention"}
    if hf.get("use_sliding_window") or layer_types:
        raise ValueError("these layers attend to all tokens before them, got a config with sliding-window attention")
    if hf.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"dense layers come first and all others have experts, got decoder_sparse_step {hf['decoder_sparse_step']}"
        )


def _rope_theta(hf: Mapping[str, Any]) -> float:
    """Return the base of rotary positions; transformers 5 has it in `rope_parameters`, earlier ones beside."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary positions are the default ones, got {kind!r}; scaled ones are not here")
    return float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))


def _num_experts(given: Mapping[str, Any]) -> int:
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if name in given:
            return int(given[name])
    raise ValueError("the config names no number of experts: num_experts, n_routed_experts or num_local_experts")


def _num_first_dense(hf: Mapping[str, Any]) -> int:
    """Return how many of the first layers are dense. `mlp_only_layers` must name just these."""
    dense = sorted(hf.get("mlp_only_layers") or ())
    if dense != list(range(len(dense))):
        raise ValueError(f"dense layers are the first ones, got mlp_only_layers {dense}; they are 0, 1, ...")
    return len(dense)
