"""Floating-point operations of a model: those that its mathematics needs, however it is run."""

from __future__ import annotations

from treadle.estimate.block_parts import block_parts
from treadle.estimate.model_cut import ModelCut
from treadle.estimate.model_shape import ModelShape


def model_flops(model: ModelShape, seq_len: int) -> float:
    """Return the operations of a forward and a backward of one sequence.

    A GEMM of an [m, k] and a [k, n] matrix counts 2 m n k, its backward twice that. Attention counts what the causal
    mask leaves. What is recomputed counts nothing. Utilisation (MFU) is over these.

    Example:
        >>> llama = ModelShape("l", 8192, 80, 128256, 64, num_key_value_heads=8, intermediate_size=28672)
        >>> round(model_flops(llama, 8192) / 8192 / 1e9)
        449

    """
    cut, weights, pair_width = ModelCut(model, padded=False), 0, 0
    for block in set(model.blocks):
        pieces = [piece for part in block_parts(cut, block).values() for piece in part]
        applied = sum(linear.rows * linear.inputs * linear.outputs for piece in pieces for linear in piece.linears)
        weights += model.blocks.count(block) * applied
        pair_width = max(pair_width, *(piece.pair_width for piece in pieces))
    layers, windowed = model.num_hidden_layers + model.num_nextn_predict_layers, model.num_windowed_layers
    pairs = (layers - windowed) * seq_len**2 / 2 + windowed * _window_pairs(seq_len, model.sliding_window)
    return 6.0 * weights * seq_len + 6.0 * pairs * pair_width


def _window_pairs(seq_len: int, window: int) -> float:
    """Pairs of a token and one that it looks at, in a sequence."""
    seen = min(window, seq_len)
    return seen**2 / 2 + (seq_len - seen) * seen
