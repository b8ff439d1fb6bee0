"""What each step from a plain model to segments costs: `python benchmarks/model_steps.py [rounds]`.

One process, one model (treadle.models, Qwen3-MoE's shape), the same batch. The contenders take turns:

    plain       a loop over micro-batches with autograd, without Treadle
    stages      a Pipeline of plain modules (cells)
    segments    a Pipeline of layers in segments, lanes in one thread
    threads     the same with lanes in threads, which is the default
    recompute   segments, attn and mlp computed again
    offload     segments, saved tensors to the host and back

A number is the CPU time of the whole process for a step, over that of `plain` in the same round: the median, and the
lowest and highest. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from treadle.models import Documents, ModelConfig, build_stages

ROUNDS, MICROBATCHES, TOKENS = 9, 4, 256
CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    moe_intermediate_size=256,
    num_experts=8,
    num_experts_per_tok=2,
)
WAYS: dict[str, dict[str, Any]] = {
    "segments": {"lanes": "serial"},
    "threads": {},
    "recompute": {"lanes": "serial", "recompute": ("attn", "mlp")},
    "offload": {"lanes": "serial", "saved": "offload"},
}


class Whole(nn.Module):
    """A layer without segments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, positions: Tensor, documents: Documents) -> Tensor:
        """Run the layer."""
        out: Tensor = self.layer(x, positions, documents)
        return out


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sum over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


def main(rounds: int) -> None:
    """Measure, and print."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    schedule = treadle.generate("interleaved", pp=1, vpp=2, microbatches=MICROBATCHES)
    tokens = torch.randint(0, CONFIG.vocab_size, (MICROBATCHES, TOKENS + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    side = {
        "positions": torch.arange(TOKENS).repeat(MICROBATCHES, 1),
        "documents": [Documents(((TOKENS,),))] * MICROBATCHES,
    }

    def pipeline(stages: dict[int, nn.Sequential], **options: Any) -> Callable[[], object]:
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, **options)
        return lambda: pipe.step(inputs, targets, side=side, num_tokens=targets.numel())

    def make() -> dict[int, nn.Sequential]:
        return build_stages(CONFIG, ("Ett", "ttL"), {0: 0, 1: 1})

    plain = [Whole(block) if hasattr(block, "segments") else block for stage in make().values() for block in stage]

    def loop() -> None:
        for mb in range(MICROBATCHES):
            x = inputs[mb : mb + 1]
            for block in plain:
                own = {name: value[mb : mb + 1] for name, value in side.items()} if isinstance(block, Whole) else {}
                x = block(x, **own)
            (loss_fn(x, targets[mb : mb + 1]) / targets.numel()).backward()

    whole = {c: nn.Sequential(*(Whole(b) if hasattr(b, "segments") else b for b in s)) for c, s in make().items()}
    ways = {"plain": loop, "stages": pipeline(whole), **{name: pipeline(make(), **way) for name, way in WAYS.items()}}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, step in ways.items():
            before = time.process_time()
            step()
            if number:
                taken[name].append(time.process_time() - before)
        print(f"round {number} of {rounds}", file=sys.stderr)
    ratios = {
        name: [own / base for own, base in zip(values, taken["plain"], strict=True)] for name, values in taken.items()
    }
    for name, values in ratios.items():
        print(f"{name:10} {statistics.median(values):.2f}  ({min(values):.2f} to {max(values):.2f})")
    print(json.dumps({name: round(statistics.median(values), 3) for name, values in ratios.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
