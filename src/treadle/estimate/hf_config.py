"""Read a model's sizes from a Hugging Face config.json, whose models spell the same thing in several ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.estimate.hf_unsupported import check_supported
from treadle.estimate.hf_values import listed, section, whole

_SPELLINGS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "use_qk_norm": "qk_norm",
    "ffn_dim": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "num_shared_experts": "n_shared_experts",
    "moe_num_experts": "num_experts",
    "moe_num_shared_experts": "n_shared_experts",
    "moe_k": "num_experts_per_tok",
    "moe_layer_interval": "moe_layer_freq",
    "moe_layer_start_index": "first_k_dense_replace",
    "num_dense_layers": "first_k_dense_replace",
    "num_mtp_modules": "num_nextn_predict_layers",
    "shared_intermediate_size": "shared_expert_intermediate_size",
    "ffn_hidden_size": "intermediate_size",
}
_COPIED = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "qk_norm",
)
EXPERT_FIELDS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
)
"""What a model without experts has no use for."""

_TIED_UNLESS_SAID = (
    *("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neox_japanese", "gemma", "vaultgemma", "opt", "bloom", "falcon", "biogpt"),
    *("openai-gpt", "starcoder2", "cohere", "ernie4_5", "smollm3"),
)
"""What names of kinds begin with whose config.json leaves out tie_word_embeddings when they are tied."""

_TWO_MATRICES = {
    *("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gptj", "codegen", "opt", "bloom", "falcon"),
    *("phi", "persimmon", "fuyu", "biogpt", "openai-gpt", "starcoder2", "nemotron", "arcee", "apertus", "jais2"),
}
"""Kinds of model whose MLPs are not gated."""

_CAUSAL = ("CausalLM", "ConditionalGeneration", "LMHead")
"""What the classes of causal language models have in their names."""

_NOT_CAUSAL = {
    *("albert", "bart", "beit", "bert", "big_bird", "camembert", "clip", "convbert", "data2vec-text", "deberta"),
    *("deberta-v2", "deit", "dinov2", "distilbert", "electra", "ernie", "esm", "funnel", "hubert", "longformer"),
    *("longt5", "m2m_100", "marian", "mbart", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mt5"),
    *("nomic_bert", "pegasus", "rembert", "roberta", "roformer", "siglip", "squeezebert", "swin", "t5", "umt5"),
    *("bert-generation", "git", "roberta-prelayernorm", "roc_bert", "xmod"),
    *("vit", "vit_mae", "wav2vec2", "whisper", "xlm-roberta", "xlm-roberta-xl"),
}
"""Kinds of model that are encoders, or have one."""

_WINDOWED_IF_SAID = ("qwen2", "qwen3", "smollm3")
"""Kinds of model that use their sliding_window only if use_sliding_window says so."""

_WINDOW_PERIODS = {
    "gemma2": 2,
    "vaultgemma": 2,
    "gpt_oss": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    **dict.fromkeys(("cohere2", "exaone4", "exaone_moe", "olmo3", "afmoe"), 4),
}
"""Kinds of model that look at all in every so many layers only, if layer_types does not say which."""

_PERIOD_KEYS = ("sliding_window_pattern", "global_attn_every_n_layers")
_ALL_WINDOWED = ("mistral", "mixtral", "ministral", "phi3", "phi4_multimodal", "phimoe", "starcoder2", "qwen3_moe")
"""What names of kinds begin with all of whose layers have the window."""

_BIASED_QKV = ("qwen2", "glm", "helium", "solar_open")
"""What names of kinds begin with whose attention_bias is of queries, keys and values, not of the output projection."""


def fields_of_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `ModelShape`'s fields, without its name, as a config.json says them.

    Args:
        config: the file's content. That of a model with more than text has the text's under text_config.
        name: of the model, for messages.

    Raises:
        ValueError: it is no causal language model's, sizes are lacking, or it has layers that a shape
            cannot say; the message names the key.

    """
    text = section(config, "text_config") or config
    _check_causal(config, text, name)
    said = {_SPELLINGS.get(key, key): value for key, value in text.items() if value is not None}
    if "tie_word_embeddings" in config:  # a model with more than text may say it beside text_config
        said.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    found = {key: said[key] for key in _COPIED if key in said}
    lacking = [
        key for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads") if key not in found
    ]
    if lacking:
        them = "it" if len(lacking) == 1 else "them"
        raise ValueError(f"config.json of {name} lacks {', '.join(lacking)}; a causal language model's has {them}")
    kind = str(said.get("model_type", ""))
    check_supported(said, kind, name)
    found |= _unsaid(kind, said)
    if found.get("num_experts"):
        found |= _experts(said, name)
    else:
        found = {key: value for key, value in found.items() if key not in EXPERT_FIELDS}
    return found | _window(kind, said, name)


def _check_causal(config: Mapping[str, Any], text: Mapping[str, Any], name: str) -> None:
    """Refuse encoders, and models that have one for text."""
    kinds = {str(each["model_type"]) for each in (config, text) if each.get("model_type")}
    classes = [str(each) for each in listed(config, "architectures") or listed(text, "architectures")]
    said = f"model_type {', '.join(sorted(kinds)) or 'none'}, architectures {', '.join(classes) or 'none'}"
    other = classes and not any(part in each for each in classes for part in _CAUSAL)
    if kinds & _NOT_CAUSAL or other or config.get("is_encoder_decoder"):
        raise ValueError(
            f"config.json of {name} is not a causal language model's ({said}); "
            "give one of a decoder, for example LlamaForCausalLM's, or a .toml file"
        )


def _unsaid(kind: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the kind of model says instead of a field."""
    found: dict[str, Any] = {}
    if kind.startswith(_TIED_UNLESS_SAID):
        found["tie_word_embeddings"] = said.get("tie_word_embeddings", True)
    if kind in _TWO_MATRICES:
        found["gated_mlp"] = False
    if kind == "falcon" and said.get("multi_query", True) and not said.get("new_decoder_architecture"):
        found["num_key_value_heads"] = 1
    if kind == "gpt_bigcode" and said.get("multi_query", True):
        found["num_key_value_heads"] = 1
    if kind == "gpt2":
        positions = said.get("max_position_embeddings", 0)
        found |= {"attention_bias": True, "mlp_bias": True, "max_position_embeddings": positions}
    if kind.startswith(_BIASED_QKV):
        biased = kind == "qwen2" or said.get("qkv_bias", said.get("attention_bias", kind.startswith("qwen2")))
        found |= {"attention_bias": False, "qkv_bias": bool(biased)}
    if kind.startswith("qwen3"):
        found["qk_norm"] = True
    if kind == "gpt_oss":
        found["mlp_bias"] = True
    return found


def _experts(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    width = whole(said, "moe_intermediate_size" if "moe_intermediate_size" in said else "intermediate_size")
    found: dict[str, Any] = {"moe_intermediate_size": width}
    shared = whole(said, "shared_expert_intermediate_size")
    if shared and width and shared % width == 0:
        found["n_shared_experts"] = shared // width
    elif shared:
        found["shared_expert_intermediate_size"] = shared
    dense, layers = _dense_layers(said), whole(said, "num_hidden_layers")
    if dense != list(range(len(dense))):
        raise ValueError(
            f"config.json of {name} has layers with experts among dense ones ({layers - len(dense)} of {layers}, "
            f"dense: {dense}); a shape has the dense ones first: write a .toml file with as many of each"
        )
    if dense:
        found["first_k_dense_replace"] = len(dense)
    return found


def _dense_layers(said: Mapping[str, Any]) -> list[int]:
    """Return the layers without experts, by whichever key a kind of model says them."""
    layers = range(whole(said, "num_hidden_layers"))
    with_experts = said.get("mlp_layer_types", said.get("moe_layer_freq"))
    if isinstance(with_experts, list):
        return [layer for layer, each in zip(layers, with_experts, strict=False) if each in (0, "dense")]
    if isinstance(said.get("moe_layers"), list):
        return [layer for layer in layers if layer not in said["moe_layers"]]
    step = max(whole(said, key, 1) for key in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"))
    first, only = whole(said, "first_k_dense_replace"), listed(said, "mlp_only_layers")
    return [layer for layer in layers if layer < first or layer in only or (layer + 1) % step]


def _window(kind: str, said: Mapping[str, Any], name: str) -> dict[str, Any]:
    window = said.get("sliding_window", 0)
    if not window or not said.get("use_sliding_window", not kind.startswith(_WINDOWED_IF_SAID)):
        return {}
    windowed = _windowed_layers(kind, said, name)
    return {"sliding_window": window, "num_windowed_layers": windowed} if windowed else {}


def _windowed_layers(kind: str, said: Mapping[str, Any], name: str) -> int:
    """Return how many layers have windowed attention, where there is some.

    Raises:
        ValueError: neither the config nor the kind says which layers do.

    """
    layers = whole(said, "num_hidden_layers")
    if "layer_types" in said:
        return sum(each == "sliding_attention" for each in listed(said, "layer_types"))
    if kind in _WINDOW_PERIODS:
        period = next((whole(said, key) for key in _PERIOD_KEYS if said.get(key)), _WINDOW_PERIODS[kind])
        return layers - layers // period
    if kind == "cwm":  # the first of every four looks at all
        return layers - (layers + 3) // 4
    if kind == "qwen2_moe":  # every other one of the first
        return (min(layers, whole(said, "max_window_layers", 28)) + 1) // 2
    if kind.startswith("qwen") and kind != "qwen3_moe":
        return max(0, layers - whole(said, "max_window_layers", 28))
    if kind.startswith(_ALL_WINDOWED):
        return layers
    raise ValueError(
        f"config.json of {name} has a sliding_window, and neither layer_types nor its model_type {kind!r} says which "
        "layers use it; add layer_types to a copy, or set its sliding_window to null"
    )
