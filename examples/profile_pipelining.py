"""Profiles a step of torch.distributed.pipelining: what torchtitan runs, small enough for four processes on a CPU.

torchrun --nproc-per-node 4 examples/profile_pipelining.py --schedule Interleaved1F1B --output profile
treadle import profile

It needs: pip install '.[run]'
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import ProfilerActivity, profile, schedule

from treadle.integrations.marks import mark_pipelining

WIDTH = 256
STEPS = 3


class Wait(torch.autograd.Function):
    """Sleeps, forward and twice as long backward, where a GPU would compute: processes may be more than cores."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep, and pass the input on."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sleep twice as long, and pass the gradient on."""
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Layers(nn.Module):
    """A stage: a few layers of the same kind."""

    def __init__(self, depth: int, sleep_ms: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.seconds = depth * sleep_ms / 1000

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, one after the other."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        wait: Any = Wait
        return wait.apply(x, self.seconds) if self.seconds else x


def main() -> None:
    """Run some steps under torch.profiler, and write a file for each rank as torchtitan does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="Interleaved1F1B", help="1F1B, GPipe, ZBVZeroBubble, ...")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--last", type=int, default=4, help="layers of the last stage; the others have 4")
    parser.add_argument("--sleep-ms", type=float, default=0, help="what a layer's forward takes besides, asleep")
    parser.add_argument("--output", type=Path, default=Path("profile"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, pp = dist.get_rank(), dist.get_world_size()
    kind = get_schedule_class(args.schedule)
    several = args.schedule not in ("1F1B", "GPipe")
    numbers = [rank, 2 * pp - 1 - rank] if args.schedule in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + pp]
    num_stages = 2 * pp if several else pp
    stages = [
        PipelineStage(
            Layers(args.last if number == num_stages - 1 else 4, args.sleep_ms), number, num_stages, torch.device("cpu")
        )
        for number in (numbers if several else [rank])
    ]
    made = kind(stages if several else stages[0], args.microbatches, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(64 * args.microbatches, WIDTH)

    def step() -> None:
        inputs = (batch,) if 0 in [stage.stage_index for stage in stages] else ()
        last = num_stages - 1 in [stage.stage_index for stage in stages]
        made.step(*inputs, target=batch if last else None)

    args.output.mkdir(parents=True, exist_ok=True)
    waiting = schedule(wait=0, warmup=1, active=STEPS)

    def write(recorded: profile) -> None:
        recorded.export_chrome_trace(str(args.output / f"rank{rank}_trace.json"))

    recording = profile(activities=[ProfilerActivity.CPU], schedule=waiting, on_trace_ready=write)
    with mark_pipelining(), recording as recorded:  # torch's 1F1B marks nothing by itself
        for _ in range(1 + STEPS):
            step()
            dist.barrier()
            recorded.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
