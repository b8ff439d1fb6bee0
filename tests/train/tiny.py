"""A run that takes a second: a mixture of experts of 40,000 parameters on a few sources of the standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.models.model_config import ModelConfig
from treadle.train.run_config import CheckpointConfig, DataConfig, LoggingConfig, TrainConfig, TrainingConfig

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SOURCES = (str(STDLIB / "[a-d]*.py"),)

TINY = TrainConfig(
    model=ModelConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.01,
    ),
    data=DataConfig(paths=SOURCES, held_out=0.2),
    training=TrainingConfig(steps=6, global_batch_size=8, seq_len=32, lr=3e-3, warmup_steps=2, eval_batches=2),
    checkpoint=CheckpointConfig(every=2),
    logging=LoggingConfig(tensorboard=False, measure_every=0),
)


def tiny(output: Path, **groups: dict[str, Any]) -> TrainConfig:
    """Return the tiny run with fields of its groups replaced: `tiny(path, training={"steps": 3})`."""
    changed = {name: replace(getattr(TINY, name), **fields) for name, fields in groups.items()}
    return replace(TINY, output=str(output), **changed)


def flags_of(config: TrainConfig) -> list[str]:
    """Return the command line that asks for a configuration."""
    flags = []
    for group, values in vars(config).items():
        for name, value in vars(values).items() if hasattr(values, "__dataclass_fields__") else ((None, values),):
            flag = f"--{group}.{name}" if name else f"--{group}"
            if isinstance(value, bool):
                flags.append(flag if value else f"--{group}.no-{name}" if name else f"--no-{group}")
            elif isinstance(value, tuple):
                flags += [flag, *map(str, value)]
            elif value is not None and value != "":
                flags += [flag, str(value)]
    return flags
