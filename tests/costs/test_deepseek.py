"""The preset of the whole DeepSeek-V3: its derived entries follow from the model's sizes and the measured layer.

`expected()` is the derivation. Times of blocks that the profile does not have are those of the measured experts, times
the ratio of their FLOPs; sizes are tokens x values x bytes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from treadle.costs import costs_text, load_costs, read

TOKENS = 4096
"""A sequence of the profile (4K), one on each GPU."""
HIDDEN, VOCABULARY = 7168, 129280
DENSE_WIDTH, EXPERT_WIDTH, EXPERTS_A_TOKEN = 18432, 2048, 8 + 1
"""Eight routed experts and the shared one."""
Q_RANK, KV_RANK, ROPE_WIDTH, HEADS, VALUE_WIDTH = 1536, 512, 64, 128, 128
FP8, BF16, FP32, TOKEN_ID = 1, 2, 4, 8
"""Bytes of a value."""
HBM_BYTES_A_US, COPY_BYTES_A_US = 3_350_000, 50_000
"""H800: 3.35 TB/s of its memory; 50 GB/s to the host, as `deepseek-v3-h800` has it."""

EXPERTS = 2 * 3 * HIDDEN * EXPERT_WIDTH * EXPERTS_A_TOKEN
"""FLOPs of a token's forward: gate, up and down of each of its experts."""
DENSE_MLP = Fraction(2 * 3 * HIDDEN * DENSE_WIDTH, EXPERTS)
HEAD = Fraction(2 * HIDDEN * VOCABULARY, EXPERTS)
PROJECTION = Fraction(2 * 2 * HIDDEN * HIDDEN, EXPERTS)
"""Of an MTP block: hidden state and embedding, together 2 x hidden wide, become one."""


def expected() -> dict[str, dict[str, int]]:
    """The sections that are derived, from the measured parts of one MoE layer."""
    layer = read(costs_text("deepseek-v3-h800"))[0]["layer"]
    halves = {"f": layer["mlp_f"], "b": layer["mlp_b"], "w": layer["mlp_w"]}
    cells = read(costs_text("deepseek-v3-h800"))[0]["cells"]
    whole = {"f": cells["f"], "b": cells["i"], "w": cells["w"]}
    residual = TOKENS * HIDDEN * BF16
    latents = TOKENS * (Q_RANK + KV_RANK + ROPE_WIDTH) * BF16
    attended = TOKENS * HEADS * (VALUE_WIDTH * BF16 + FP32)  # the output, and the log-sum-exp of each head
    attn = 2 * residual + latents + attended  # the residual before attention and behind it
    to_experts = TOKENS * EXPERTS_A_TOKEN * HIDDEN * FP8
    mlp = to_experts + TOKENS * EXPERTS_A_TOKEN * 2 * EXPERT_WIDTH * FP8  # gate and up; SwiGLU is computed again
    to_dense = TOKENS * HIDDEN * FP8
    head = residual + TOKENS * VOCABULARY * BF16
    copy = round(Fraction(attn + mlp, COPY_BYTES_A_US))
    return {
        "dense": {f"mlp_{half}": round(time * DENSE_MLP) for half, time in halves.items()},
        "ends": {
            "embed_f": round(Fraction(TOKENS * HIDDEN * (BF16 + BF16), HBM_BYTES_A_US)),  # reads rows, writes them
            "embed_b": round(Fraction(TOKENS * HIDDEN * (BF16 + FP32 + FP32), HBM_BYTES_A_US)),  # adds to FP32 rows
            **{f"mtp_{half}": round(whole[half] + time * (PROJECTION + HEAD)) for half, time in halves.items()},
            **{f"head_{half}": round(time * HEAD) for half, time in halves.items()},
        },
        "message": {"send": 300, "offload": copy, "onload": copy, "reduce_grad": 20000},
        "saved_bytes": {
            "attn": attn,
            "mlp": mlp,
            "attn_input": residual,
            "mlp_input": to_experts,
            "dense_mlp": to_dense + TOKENS * 2 * DENSE_WIDTH * FP8,
            "dense_mlp_input": to_dense,
            "embed": TOKENS * TOKEN_ID,
            "mtp": attn + mlp + 2 * residual + head,
            "head": head,
        },
        "moved_bytes": {
            "send": residual,
            "dispatch": TOKENS * (EXPERTS_A_TOKEN - 1) * HIDDEN * FP8,
            "combine": TOKENS * (EXPERTS_A_TOKEN - 1) * HIDDEN * BF16,
        },
    }


def table(name: str) -> dict[str, Any]:
    entries, problems = read(costs_text(name))
    assert not problems
    return entries


def test_derived_entries_follow_from_the_sizes() -> None:
    preset = table("deepseek-v3-model")
    assert {name: preset[name] for name in expected()} == expected()


def test_the_rest_is_measured_or_published() -> None:
    preset, measured = table("deepseek-v3-model"), table("deepseek-v3-h800")
    assert preset["model"] == {"layers": 61, "dense": 3, "mtp": 1}
    assert {name: preset[name] for name in ("unit", "layer", "cells")} == {
        name: measured[name] for name in ("unit", "layer", "cells")
    }
    assert preset.keys() == {"name", "about", "unit", "model", "layer", "cells", *expected()}
    for name in ("send", "reduce_grad"):
        assert preset["message"][name] == measured["message"][name]
    assert preset["moved_bytes"] == measured["moved_bytes"]


def test_a_dense_layer_has_the_flops_of_nine_experts() -> None:
    assert DENSE_MLP == 1


def test_layers_that_overlap_keep_the_measured_time() -> None:
    """[model] says how many layers there are, [cells] what one takes, overlapped too."""
    costs, layer = load_costs("deepseek-v3-model"), load_costs("deepseek-v3-h800")
    for action in ("f", "i", "w", "b", "fb"):
        assert costs.of_layer(action) == layer.of_layer(action)
    assert costs.of_layer("fb", "d") == costs.of_layer("f", "d") + costs.of_layer("b", "d")
