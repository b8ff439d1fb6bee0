"""What a configuration must fulfil, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from treadle.train.config_reading import model_of
from treadle.train.optim.lr_schedule import WarmupStableDecay
from treadle.train.run_config import TrainConfig

_FROM_ONE = {
    "parallel": ("pp", "ep", "dp", "vpp"),
    "training": ("steps", "global_batch_size", "micro_batch_size", "seq_len"),
    "checkpoint": ("keep",),
    "logging": ("every",),
}
_FROM_ZERO = {
    "training": ("seed", "clip_norm", "eval_every", "eval_batches"),
    "checkpoint": ("every",),
    "logging": ("measure_every", "trace_every"),
}


_INFINITE = ("training.clip_norm",)
"""Fields whose infinity means no limit."""


MOST_NUMBER = 2**53
"""The largest whole number that a float holds exactly: no field counts further."""

_MOST = {"parallel.deadline_s": 10**9, "optimizer.bucket_mb": 10**6}
"""The most that waits and memory take."""


def check_config(config: TrainConfig) -> None:
    """Refuse a configuration that no run can have.

    Raises:
        ValueError: the message names the field, what came and what is allowed.

    """
    for name, number in _numbers(config):
        if math.isnan(number) or (math.isinf(number) and name not in _INFINITE):
            raise ValueError(f"{name} is a finite number, got {number}")
        if math.isinf(number) and number > 0:
            continue
        if abs(number) > _MOST.get(name, MOST_NUMBER):
            raise ValueError(f"{name} is at most {_MOST.get(name, MOST_NUMBER):,}, got {number}")
        if number < 0:
            raise ValueError(f"{name} is 0 or more, got {number}")
    for least, groups in ((1, _FROM_ONE), (0, _FROM_ZERO)):
        for group, names in groups.items():
            for name in names:
                value = getattr(getattr(config, group), name)
                if value is not None and value < least:
                    raise ValueError(f"{group}.{name} is {least} or more, got {value}")
    if not 0 <= config.data.held_out < 1:
        raise ValueError(f"data.held_out is a share from 0 to below 1, got {config.data.held_out}")
    if config.training.eval_every and not config.data.held_out:
        raise ValueError("training.eval_every needs text: data.held_out is more than 0, got 0")
    if not config.parallel.deadline_s > 0:
        raise ValueError(f"parallel.deadline_s is more than 0, got {config.parallel.deadline_s}")
    if config.model.num_experts and config.model.num_experts % config.parallel.ep:
        raise ValueError(f"parallel.ep divides the {config.model.num_experts} experts, got {config.parallel.ep}")
    if not config.model.num_experts and config.parallel.ep > 1:
        raise ValueError(f"parallel.ep is 1 for a model without experts, got {config.parallel.ep}; use parallel.dp")
    if config.parallel.exchange == "deepep" and (config.parallel.ep == 1 or config.training.dtype != "bfloat16"):
        raise ValueError(
            "parallel.exchange deepep needs parallel.ep of 2 or more and training.dtype bfloat16, got "
            f"{config.parallel.ep} and {config.training.dtype}; set these, or use all_to_all"
        )
    if config.checkpoint.weights:
        _check_weights(config)
    learning_rate(config)


def _numbers(group: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each number of a configuration."""
    for field in fields(group):
        value = getattr(group, field.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, (int, float)):
                yield f"{prefix}{field.name}", each


def _check_weights(config: TrainConfig) -> None:
    """Refuse a model that is not that of the weights it starts from."""
    weights = config.checkpoint.weights
    odd = config.model.differences(model_of(weights))
    if odd:
        told = ", ".join(f"model.{name} {own!r} (config.json: {theirs!r})" for name, (own, theirs) in odd.items())
        raise ValueError(
            f"checkpoint.weights {weights} are of another model: {told}; leave these fields out of [model] and of the "
            "command, then config.json gives them (in Python: ModelConfig.from_hf)"
        )


def learning_rate(config: TrainConfig) -> WarmupStableDecay:
    """Return the learning rate of each step. In a run too short for warm-up and decay, the decay is cut."""
    training = config.training
    return WarmupStableDecay(
        training.lr,
        max(training.steps, training.warmup_steps),
        training.warmup_steps,
        min(training.decay_steps, _most_decay(config)),
        training.final_lr,
        training.decay_shape,
    )


def note_on_decay(config: TrainConfig) -> str | None:
    """Return a line on a decay that is cut, None if it is not."""
    training, most = config.training, _most_decay(config)
    if training.decay_steps <= most:
        return None
    last = f"decays over the last {most} steps" if most else "does not decay"
    return (
        f"training.warmup_steps {training.warmup_steps} and training.decay_steps {training.decay_steps} are more than "
        f"training.steps {training.steps}: the learning rate {last}"
    )


def _most_decay(config: TrainConfig) -> int:
    return max(0, config.training.steps - config.training.warmup_steps)
