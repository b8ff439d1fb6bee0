"""Counts of layers: experts and their exchange, attention, weight gradients, gathered parameters, the loss."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the fake backend

from counted.kernels import CalledKernels, SavedBytes
from treadle import models
from treadle.dist.groups import Group, control_wait
from treadle.ir.ops import OpKind
from treadle.models import ModelConfig
from treadle.models.attention import Attention
from treadle.models.on_meta import BalancedExchange
from treadle.moe import MoELayer
from treadle.runtime.model import gradient_bucket
from treadle.runtime.model.gradient_bucket import GradientBucket
from treadle.runtime.model.grouped_linear import GroupedLinear
from treadle.runtime.model.grouped_mm import RowGroups
from treadle.runtime.model.parameter_bucket import ParameterBucket
from treadle.runtime.model.weight_grad import WeightGradQueue, apply
from treadle.train.footprint import model_footprint

RANKS, EXPERTS_EACH, TOP_K = 8, 16, 8
WIDTH, HIDDEN, TOKENS = 2048, 768, 4096
GATHERING = 64


def counts() -> dict[str, float]:
    """Return the counts."""
    return {
        **_moe_layer(),
        **_casts(),
        **_attention(4096),
        **_attention(8192),
        **_weight_gradient(),
        **_gather(),
        **_loss(),
    }


def _moe_layer() -> dict[str, float]:
    """A layer of 8 x 16 experts on the meta device."""
    shape = f"MoE layer, {RANKS} x {EXPERTS_EACH} experts"
    with torch.device("meta"):
        layer = MoELayer(
            WIDTH,
            HIDDEN,
            RANKS * EXPERTS_EACH,
            top_k=TOP_K,
            ep=RANKS,
            exchange=partial(BalancedExchange, ep=RANKS),
        ).bfloat16()
        x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    found, shares = {}, dict[str, CalledKernels]()
    with CalledKernels() as shares["forward"]:
        made = layer(x)
    with CalledKernels() as shares["backward"]:
        _backward(made)
    for name, called in shares.items():
        found[f"{shape}: {name}, aten calls"] = float(called.calls.total())
        found[f"{shape}: {name}, tensors made"] = float(called.num_tensors)
    return found


def _backward(made: Tensor) -> None:
    torch.autograd.backward(made, torch.empty_like(made))


def _casts() -> dict[str, float]:
    """Experts' float32 weights under autocast, forward and dgrad of two micro-batches of a Pipeline's step."""
    linear, groups, queue = GroupedLinear(4, 32, 32), RowGroups([8, 8, 8, 8]), WeightGradQueue()
    linear.defer_to(queue)
    rows = torch.randn(32, 32).bfloat16().requires_grad_()
    with CalledKernels() as called:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                made = linear(rows, groups)
            queue.open()
            torch.autograd.grad(made, rows, torch.ones_like(made))
            queue.close()
    name = "grouped linear, float32 weights under autocast: two micro-batches forward and dgrad, casts"
    return {name: float(called.kernels["_to_copy"])}


def _attention(num_tokens: int) -> dict[str, float]:
    """Four documents in a sequence, on this CPU."""
    config = ModelConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    attention = Attention(config)
    documents: Any = torch.arange(num_tokens).div(num_tokens // 4, rounding_mode="floor").unsqueeze(0)
    if hasattr(models, "Documents"):  # the tree before took the numbers
        documents = models.Documents.of(documents)
    positions = torch.arange(num_tokens).remainder(num_tokens // 4).unsqueeze(0)
    x = torch.randn(1, num_tokens, config.hidden_size, requires_grad=True)
    saved = SavedBytes()
    with saved:
        attention(x, positions, documents)
    return {f"attention, {num_tokens} tokens in 4 documents, 2 heads of 32: saved MB": saved.total / 1e6}


def _weight_gradient() -> dict[str, float]:
    """A linear in bfloat16 whose weight gradient is added to a float32 main gradient, as on a GPU, on meta tensors."""
    gradient_bucket._WIDE_GEMMS = ("meta",)  # type: ignore[misc, assignment]  # the tree before takes no notice
    linear = nn.Linear(256, 256, bias=False, device="meta", dtype=torch.bfloat16)
    queue, bucket = WeightGradQueue(), GradientBucket.whole([(linear.weight,)], None)
    apply([linear], queue)
    bucket.begin()
    for _ in range(2):  # the first one fills the gradient, the second adds to it
        x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
        queue.open()
        _backward(linear(x))
        (half,) = queue.close()
        with CalledKernels() as called:
            half.run(lambda param, grad: bucket.add(0, grad))
    return {"wgrad of a bfloat16 linear into its float32 main gradient: kernels": float(called.kernels.total())}


def _gather() -> dict[str, float]:
    """A bucket of eight parameters, divided over 64 ranks of which this is one."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=GATHERING)
    try:
        params = [nn.Parameter(torch.zeros(64, 128)) for _ in range(8)]
        each = 64 * 128 * 8 // GATHERING
        per_param = 64 * 128 // each
        rows = [
            [((params[rank // per_param],), rank % per_param * each, (rank % per_param + 1) * each)]
            for rank in range(GATHERING)
        ]
        wait = control_wait(timedelta(seconds=60))
        group = Group("counted", list(range(GATHERING)), 0, timedelta(seconds=60), wait, torch.device("cpu"))
        bucket = ParameterBucket(rows, group)
        with CalledKernels() as called:
            bucket.launch()
            bucket.arrive()
        group.close()
    finally:
        dist.destroy_process_group()
    return {f"a bucket of parameters gathered from {GATHERING} ranks: kernels": float(called.kernels.total())}


def _loss() -> dict[str, float]:
    """The head of Qwen3's vocabulary, on the meta device."""
    config = ModelConfig(vocab_size=151936, hidden_size=WIDTH, num_hidden_layers=1, num_experts=0)
    head = model_footprint(config, (1, TOKENS), dtype=torch.bfloat16).blocks["L"]
    shape = f"head and loss, {TOKENS} tokens x 151,936 in bfloat16"
    return {
        f"{shape}: saved GB": head.saved_until_backward / 1e9,
        f"{shape}: most while its backward runs, GB": head.ops[OpKind.HEAD_B].peak / 1e9,
        f"{shape}: most while its forward runs, GB": head.ops[OpKind.HEAD_F].peak / 1e9,
    }
