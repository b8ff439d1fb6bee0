"""Megatron-core's own pipeline schedules on CPUs: a model of linear layers, and a step of it.

Megatron asks for device "cuda" in a few places: a function mode answers with the CPU, and two functions of torch.cuda
are replaced. Nothing of its schedules is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WIDTH, LENGTH, SAMPLES = 16, 4, 2


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where Megatron asks for a GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Chunk(nn.Module):
    """A model chunk with what the schedules ask of one; `after` takes its output."""

    def __init__(self, config: Any, vp_stage: int, *, first: bool, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.vp_stage, self.model_type = config, vp_stage, ModelType.encoder_or_decoder
        self.linear, self.first, self.after = nn.Linear(WIDTH, WIDTH), first, after
        self.given: Any = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.linear(x if self.first else self.given))


@contextmanager
def megatron(
    pp: int, vpp: int, rank: int, *, group: int | None = None, after: Callable[[Tensor], Tensor] = lambda x: x
) -> Iterator[Callable[[int], None]]:
    """Return a step of so many micro-batches of Megatron's schedule for these sizes, in the default group."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

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
        deallocate_pipeline_outputs=False,
        microbatch_group_size_per_vp_stage=group,
    )
    model = [Chunk(config, chunk, first=rank == 0 and chunk == 0, after=after) for chunk in range(vpp)]
    batch = torch.randn(LENGTH, SAMPLES, WIDTH)

    def step(num_mb: int) -> None:
        batches = [iter([batch] * num_mb) for _ in model]
        with OnCpu():
            schedules.get_forward_backward_func()(
                forward_step_func=lambda batch, chunk: (chunk(next(batch)), lambda out: (out.square().mean(), {})),
                data_iterator=batches if vpp > 1 else batches[0],
                model=model if vpp > 1 else model[0],
                num_microbatches=num_mb,
                seq_length=LENGTH,
                micro_batch_size=SAMPLES,
                forward_only=False,
            )

    try:
        with patch.multiple(torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=lambda *_: None):
            yield step
    finally:
        parallel_state.destroy_model_parallel()
