"""Floating-point operations of a model: those that its mathematics needs, however it is run."""

from __future__ import annotations

from treadle.estimate.model_shape import ModelShape


def model_flops(model: ModelShape, seq_len: int) -> float:
    """Return the operations of a forward and a backward of one sequence.

    A product of an [m, k] and a [k, n] matrix counts 2 m n k, its backward twice that. Attention counts what the
    causal mask leaves. What is computed again counts nothing. Utilisation (MFU) is over these.

    Example:
        >>> llama = ModelShape("l", 8192, 80, 128256, 64, num_key_value_heads=8, intermediate_size=28672)
        >>> round(model_flops(llama, 8192) / 8192 / 1e9)
        449

    """
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    dense = model.num_dense_layers
    experts = layers - dense if model.is_moe else 0
    weights = layers * _attention_weights(model) + (layers - experts) * _mlp(model, model.intermediate_size)
    weights += experts * _active_experts(model)
    weights += (1 + model.num_nextn_predict_layers) * model.hidden_size * model.vocab_size
    weights += model.num_nextn_predict_layers * 2 * model.hidden_size**2
    windowed = model.num_windowed_layers
    pairs = (layers - windowed) * seq_len**2 / 2 + windowed * _window_pairs(seq_len, model.sliding_window)
    return 6.0 * weights * seq_len + 6.0 * pairs * model.num_attention_heads * _pair_width(model)


def _attention_weights(model: ModelShape) -> int:
    heads, hidden = model.num_attention_heads, model.hidden_size
    if not model.is_mla:
        return hidden * model.head_dim * (2 * heads + 2 * model.num_key_value_heads)
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    queries = model.q_lora_rank * (hidden + query) if model.q_lora_rank else hidden * query
    keys = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    up = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return queries + keys + up + heads * model.v_head_dim * hidden


def _mlp(model: ModelShape, width: int) -> int:
    return (3 if model.gated_mlp else 2) * model.hidden_size * width


def _active_experts(model: ModelShape) -> int:
    active = model.num_experts_per_tok * model.moe_intermediate_size + model.shared_width
    return _mlp(model, active) + model.hidden_size * model.num_experts


def _pair_width(model: ModelShape) -> int:
    """Multiplications of a query with a key and a value, of one head."""
    if model.is_mla:
        return model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    return 2 * model.head_dim


def _window_pairs(seq_len: int, window: int) -> float:
    """Pairs of a token and one that it looks at, in a sequence."""
    seen = min(window, seq_len)
    return seen**2 / 2 + (seq_len - seen) * seen
