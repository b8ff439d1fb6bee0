"""The memory of blocks, counted on the meta device, against what the runtime itself counts on real runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.devices import DEVICE_TYPE, device_of, drawn
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import OpKind
from treadle.models import ModelConfig, build_stages, loss_fn
from treadle.models.on_meta import packed
from treadle.train.footprint import ModelFootprint, model_footprint

SPARSE = ModelConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, moe_intermediate_size=16, num_experts=4, first_k_dense_replace=1, scoring="sigmoid",
    n_shared_experts=1, router_aux_loss_coef=0.01, num_nextn_predict_layers=1,
)  # fmt: skip
DENSE = ModelConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8, num_experts=0)
SIZE, SEQ_LEN = BATCH = 2, 24
RUNS: dict[str, tuple[ModelConfig, torch.dtype, tuple[str, ...]]] = {
    "dense": (DENSE, torch.float32, ()),
    "dense, attn again": (DENSE, torch.float32, ("attn",)),
    "sparse": (SPARSE, torch.float32, ()),
    "sparse in bfloat16": (SPARSE, torch.bfloat16, ()),
    "sparse, both again": (SPARSE, torch.float32, ("attn", "mlp")),
}


@pytest.mark.slow
def test_saved_bytes_are_those_that_pipelines_count() -> None:
    told = check(run_ranks(2, counted))
    for name, (config, dtype, recompute) in RUNS.items():
        found = _mean(model_footprint(config, BATCH, ep=_ep(config), dtype=dtype, recompute=recompute), config)
        measured = {part: sum(rank[name][part] for rank in told) / len(told) for part in told[0][name]}
        for part, size in measured.items():  # over both ranks the rows of experts are balanced
            assert 0.97 * found[part] - 600 < size < 1.03 * found[part] + 600, (name, part, found, measured)
        plain = [part for part in measured if not part.endswith("_r")]
        total = sum(measured[part] for part in plain)
        assert sum(found[part] for part in plain) == pytest.approx(total, rel=0.02), (name, found, measured)


def counted(rank: int) -> dict[str, dict[str, int]]:
    """What the parts of each model save, as a Pipeline of this rank counts it."""
    return {name: _run(*run, rank) for name, run in RUNS.items()}


def _run(config: ModelConfig, dtype: torch.dtype, recompute: tuple[str, ...], rank: int) -> dict[str, int]:
    ep = _ep(config)
    mesh = init_device_mesh(DEVICE_TYPE, (1, 2 // ep, ep), mesh_dim_names=("pp", "dp", "ep"))
    stages = build_stages(
        config, (config.blocks,), {0: 0}, ep=ep, ep_rank=rank % ep, dtype=dtype, device=device_of(rank)
    )
    schedule = treadle.generate("1f1b", pp=1, microbatches=2)
    pipe = treadle.Pipeline(
        stages, schedule, mesh=mesh, loss_fn=loss_fn, saved="count", recompute=recompute, deadline_s=120
    )
    generator = torch.Generator().manual_seed(rank)
    tokens = drawn(torch.randint, 0, config.vocab_size, (2 * SIZE, SEQ_LEN + 1), generator=generator)
    side: dict[str, Any] = {
        "positions": torch.arange(SEQ_LEN).repeat(2 * SIZE, 1),
        "documents": packed((2 * SIZE, SEQ_LEN)).split(2),
    }
    pipe.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), side=side)
    assert pipe.report is not None
    assert pipe.report.saved is not None
    parts = dict(pipe.report.saved.parts)
    pipe.close()
    return parts


def _ep(config: ModelConfig) -> int:
    return 2 if config.num_experts else 1


def _mean(found: ModelFootprint, config: ModelConfig) -> dict[str, float]:
    """The mean of each part over the blocks that have it, as `report.saved` tells it."""
    sizes: dict[str, list[int]] = {}
    for letter in config.blocks:
        for part, size in found.blocks[letter].saved.items():
            sizes.setdefault(part, []).append(size)
    return {part: sum(of_part) / len(of_part) for part, of_part in sizes.items()}


@pytest.mark.slow
def test_a_micro_batch_leaves_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for recompute in ((), ("attn", "mlp")):
            blocks = model_footprint(SPARSE, BATCH, ep=2, dtype=dtype, recompute=recompute).blocks
            assert "".join(blocks) == "EdtmL"
            left = sum(op.after for block in blocks.values() for op in block.ops.values())
            assert 0 <= left < 100, (dtype, recompute)  # losses stay


def test_weight_gradients_are_ops_of_their_own_in_every_type() -> None:
    """As in a Pipeline, whose linears defer them whatever hooks there are."""
    for dtype in (torch.float32, torch.bfloat16):
        block = model_footprint(SPARSE, BATCH, dtype=dtype).blocks["t"]
        assert block.ops[OpKind.MLP_W].after < 0
        assert block.ops[OpKind.ATTN_W].after < 0


def test_recomputing_saves_less_and_offload_moves_what_is_saved() -> None:
    plain = model_footprint(SPARSE, BATCH).blocks["t"]
    again = model_footprint(SPARSE, BATCH, recompute=("attn", "mlp")).blocks["t"]
    assert again.saved["attn"] < plain.saved["attn"] / 4
    assert again.saved_until_backward < plain.saved_until_backward / 2
    assert again.saved["attn_r"] == plain.saved["attn"]
    assert again.ops[OpKind.ATTN_R].after > again.ops[OpKind.ATTN_F].after


def test_a_layer_of_a_trillion_parameters_is_counted_without_memory() -> None:
    large = replace(
        SPARSE, hidden_size=16384, num_experts=1024, moe_intermediate_size=4096, num_attention_heads=128, head_dim=128
    )
    block = model_footprint(large, (1, 4096), ep=8, dtype=torch.bfloat16).blocks["t"]
    assert sum(p.size for p in block.parameters if p.is_expert) == 3 * 128 * 16384 * 4096
    rows = 4096 * large.num_experts_per_tok * 2 * 16384
    assert block.ops[OpKind.DISPATCH_F].peak == rows
    assert block.saved["mlp"] > rows


def test_a_process_that_is_in_a_world_is_refused() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="makes a world of its own, and this process is in one"):
            model_footprint(DENSE, (1, 7))
    finally:
        dist.destroy_process_group()
