"""What a config.json can say and a model's shape cannot: it is refused by name, never planned as something else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.estimate.hf_values import listed

_ATTENTION = ("full_attention", "sliding_attention")
_KEYS = {
    r"mamba_.*|ssm_.*|state_size|lru_width|use_mamba_kernels": "layers with a state space",
    r"linear_num_.*_heads|full_attention_interval|linear_attn_config": "layers with linear attention",
    r"conv_L_cache": "layers with convolutions",
    r"hybrid_override_pattern|hybrid_layer_(ids|pattern)": "layers that differ",
    r"layers_block_type|block_types|block_configs": "layers that differ",
    r"attn_layer_(period|offset|indices)|expert_layer_(period|offset)": "layers that differ",
    r"num_attention_heads_per_layer|num_layers_per_stack": "layers that differ",
    r"attention_chunk_size": "attention in chunks",
    r"index_topk|index_n_heads|dense_attention_every_n_layers": "sparse attention",
    r"total_ut_steps|recurrent_.*|num_recurrent_.*": "layers that run again",
    r"parallel_attn_mlp_res": "a dense MLP beside the experts",
    r"add_cross_attention": "attention to another sequence",
    r"hidden_size_per_layer_input|num_kv_shared_layers": "layers that share parameters or embed tokens again",
}
"""Keys, as patterns, that change the layers where they are set, and what they stand for."""

_KINDS = {
    "qwen3_next": "layers with linear attention",
    "aria_text": "experts under other names",
    "ctrl": "another kind of MLP",
    "cpmant": "another kind of embedding",
    "doge": "experts that are looked up",
    "gemma4": "layers that differ",
    "gemma4_text": "layers that differ",
    "gemma4_unified": "layers that differ",
    "gemma4_unified_text": "layers that differ",
    "hrm_text": "layers that run again",
    "jamba": "layers with a state space",
    "jetmoe": "experts in attention",
    "moshi": "two decoders",
    "nanochat": "another kind of embedding",
}
"""Kinds of model that no key tells apart."""

READ = frozenset((Path(__file__).parent / "presets" / "hf_kinds.txt").read_text(encoding="utf-8").split())
"""Kinds of model whose config.json is read: those of transformers 5.23, held to its models by a test, and `OF_VLLM`.
Any other kind is refused, as its layers may differ by a default that no key shows."""

OF_VLLM = ("deepseek", "internlm2", "kimi_k2")
"""Kinds that transformers has no model of. vLLM 0.32 has: models/deepseek_v2.py (without MLA where model_type is
deepseek), models/internlm2.py, and kimi_k2 as DeepSeek-V3's (transformers_utils/config.py)."""


def check_supported(said: Mapping[str, Any], kind: str, name: str) -> None:
    """Raise a ValueError if a config.json says layers that a shape does not have; the message names the key."""
    if kind in _KINDS:
        raise _refused(name, f"model_type {kind!r}", _KINDS[kind])
    if kind and kind not in READ:
        raise _refused(name, f"model_type {kind!r}", "a kind that was not compared with its own code")
    last = said.get("moe_layer_end_index")
    if isinstance(last, int) and 0 <= last < said.get("num_hidden_layers", 0) - 1:
        raise _refused(name, f"moe_layer_end_index = {last}", "dense layers after those with experts")
    if said.get("word_embed_proj_dim", said.get("hidden_size")) != said.get("hidden_size"):
        raise _refused(name, f"word_embed_proj_dim = {said['word_embed_proj_dim']}", "a projected embedding")
    for key, value in said.items():
        what = next((what for pattern, what in _KEYS.items() if re.fullmatch(pattern, key)), None)
        if what is not None and value:
            raise _refused(name, f"{key} = {_shown(value)}", what)
    types = listed(said, "layer_types")
    other = next((each for each in types if each not in _ATTENTION), None)
    if other is not None:
        raise _refused(name, f"layer_types with {other!r}", "layers with another kind of attention, or none")
    if any(each != 1 for each in listed(said, "attn_type_list")):
        raise _refused(name, "attn_type_list with 0", "layers with linear attention")
    expert = next((key for key in said if re.search("num_.*experts|experts?_num", key) and said[key]), None)
    if expert is not None and not said.get("num_experts"):
        raise _refused(name, f"{expert} = {_shown(said[expert])}", "experts under another name than num_experts")


def _refused(name: str, said: str, what: str) -> ValueError:
    return ValueError(
        f"config.json of {name} says {said}: {what}; a shape has full or sliding-window attention with GQA or MLA, and "
        "dense layers before layers with routed and shared experts; write a .toml file of the nearest such model"
    )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
