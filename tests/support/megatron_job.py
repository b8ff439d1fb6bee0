"""Steps of Megatron-core's own pipeline schedules on gloo, marked and profiled, on ranks of torchrun.

    torchrun --nproc-per-node 2 -m tests.support.megatron_job OUT VPP M [GROUP]

Megatron asks for device "cuda" in a few places: a function mode answers with the CPU. Rank R writes torch.profiler's
file OUT/rankR.json of the second and third step. Backwards take twice as long as forwards, asleep.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from examples.profile_pipelining import Wait

WIDTH, LENGTH, BATCH, STEPS = 16, 4, 2, 3
FORWARD_S = 0.004


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where Megatron asks for a GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Chunk(nn.Module):
    """A model chunk with what the schedules ask of one."""

    def __init__(self, config: Any, vp_stage: int | None, *, first: bool) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.vp_stage, self.model_type = config, vp_stage, ModelType.encoder_or_decoder
        self.linear, self.first = nn.Linear(WIDTH, WIDTH), first
        self.given: Any = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, x: Tensor) -> Tensor:
        wait: Any = Wait
        out: Tensor = wait.apply(self.linear(x if self.first else self.given), FORWARD_S)
        return out


def forward_step(batches: Iterator[Tensor], chunk: Any) -> Any:
    out = chunk(next(batches))
    return out, lambda output: (output.square().mean(), {})


def main(out: Path, vpp: int, num_microbatches: int, group: int | None = None) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from treadle.integrations.marks import mark_megatron

    torch.set_num_threads(1)
    cuda: Any = torch.cuda
    cuda.current_device, cuda.synchronize = lambda: torch.device("cpu"), lambda *_: None
    dist.init_process_group("gloo")
    rank, pp = dist.get_rank(), dist.get_world_size()
    chunks = vpp if vpp > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=chunks, create_gloo_process_groups=False
    )
    config = TransformerConfig(
        num_layers=pp * vpp,
        hidden_size=WIDTH,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=vpp > 1,
        batch_p2p_comm=vpp == 1,
        microbatch_group_size_per_vp_stage=group,
    )
    model = [Chunk(config, c if vpp > 1 else None, first=rank == 0 and c == 0) for c in range(vpp)]
    batch = torch.randn(LENGTH, BATCH, WIDTH)

    def step() -> None:
        batches = [iter([batch] * num_microbatches) for _ in model]
        with OnCpu():
            schedules.get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches if vpp > 1 else batches[0],
                model=model if vpp > 1 else model[0],
                num_microbatches=num_microbatches,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )

    steps = torch.profiler.schedule(wait=0, warmup=1, active=STEPS - 1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with mark_megatron(), torch.profiler.profile(activities=activities, schedule=steps) as profiler:
        for number in range(STEPS):
            step()
            if number + 1 < STEPS:
                profiler.step()
    profiler.export_chrome_trace(str(out / f"rank{rank}.json"))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
