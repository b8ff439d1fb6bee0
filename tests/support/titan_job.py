"""A step of torchtitan's own trainer on CPUs (llama3's debug model, gloo), on the ranks of torchrun.

    torchrun --nproc-per-node 2 -m tests.support.titan_job OUT [CSV [LAYOUT]]

torchtitan has no device of type cpu: functions of its device module stand in, and nothing of pipelining does. Rank R
writes the gradients of its stages to OUT/R.pt. Without a CSV one process runs the whole model.
"""

from __future__ import annotations

import os
import sys
import types
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEQ, VOCABULARY = 32, 2048
NUM_MICROBATCHES = 4


def stand_in() -> None:
    """Give torch.cpu the functions that torchtitan asks a GPU's module for."""
    import torch._utils as utils

    utils._get_available_device_type = lambda: "cpu"
    answers: dict[str, Any] = {
        "get_device_name": "cpu",
        "get_device_properties": types.SimpleNamespace(total_memory=1 << 33),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "memory_stats": {},
        "set_device": None,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    module: Any = torch.cpu
    module.get_rng_state = lambda *_: torch.get_rng_state()


class Batches:
    """The same tokens on every rank: `build` is torchtitan's call, with the sequences of one batch."""

    def build(self, **kwargs: Any) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            tokens = torch.randint(0, VOCABULARY, (kwargs["local_batch_size"], SEQ + 1), generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]


def make_config(world: int) -> Any:
    import torchtitan.models.llama3 as llama3
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    config: Any = llama3_debugmodel()
    config.model_spec = llama3.model_registry("debugmodel", attn_backend="sdpa")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.training = replace(
        config.training,
        local_batch_size=NUM_MICROBATCHES,
        seq_len=SEQ,
        steps=1,
        disable_cuda_graphs=True,
        dtype="float32",
        mixed_precision_param="float32",
        max_norm=1e9,
    )
    config.parallelism = replace(
        config.parallelism, pipeline_parallel_degree=world, pipeline_parallel_microbatch_size=1
    )
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint = None
    config.debug.seed = 7
    config.dataloader = Batches()
    config.tokenizer = types.SimpleNamespace(build=lambda **_: None)
    type(config).maybe_log = lambda self: None
    type(config).to_dict = lambda self: {}
    return config


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor's whole value in float64."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.double()


def main(out: Path, csv: str | None = None, layout: str | None = None) -> None:
    torch.set_num_threads(1)
    stand_in()
    from torchtitan.tools.logging import init_logger
    from torchtitan.trainer import Trainer

    init_logger()
    config = make_config(int(os.environ["WORLD_SIZE"]))
    if csv is not None:
        from treadle.integrations.torchtitan import pipelining_fn

        config.model_spec = replace(config.model_spec, pipelining_fn=pipelining_fn(csv, layout))
    trainer: Any = Trainer(config)
    named = [(name, p) for part in trainer.model_parts for name, p in part.named_parameters()]
    with torch.no_grad():
        for name, param in named:
            local = param.to_local() if hasattr(param, "to_local") else param
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            local.copy_(torch.randn(param.shape, generator=generator) * 0.02 + (param.dim() == 1))
    trainer.optimizers.step = lambda *_, **__: None
    trainer.step += 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    torch.save({name: whole(param.grad) for name, param in named}, out / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)  # torchtitan's threads have no end of their own
