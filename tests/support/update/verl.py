"""Actors and rollouts of verl on the CPU: its own worker classes, with small models of transformers in them."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs

PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=16, initializer_range=0.2, **SHAPE)
    config.tie_word_embeddings = False
    model: Any = Qwen3ForCausalLM(config)
    return model.eval()


def tokens_of(model: Any) -> list[int]:
    """What a model makes of the prompt, greedily."""
    made = model.generate(torch.tensor(PROMPT), max_new_tokens=8, do_sample=False, pad_token_id=0)
    tokens: list[int] = made[0].tolist()
    return tokens


def right_tokens(seed: int) -> list[int]:
    """Those of the same weights in the rollouts' dtype, never updated."""
    return tokens_of(make_model(seed).bfloat16())


class Actor(Worker):  # type: ignore[misc]
    """A training worker: it sends a float32 model that it makes of the step; `fail` is a step that it cannot make."""

    def __init__(self, config: Any, fail: int) -> None:
        super().__init__()
        torch.set_num_threads(1)
        initialize_global_process_group_ray(timeout_second=None, backend="cpu:gloo")
        self.fail, rank = fail, int(os.environ["RANK"])
        import_external_libs(config.custom_backend_module)
        kwargs = {"bucket_size": config.update_weights_bucket_megabytes << 20, **config.engine_kwargs[config.backend]}
        self.checkpoint_engine = CheckpointEngineRegistry.new(config.backend, is_master=rank == 0, **kwargs)
        self.is_last = rank == 1

    def weights(self, step: int) -> Any:
        for name, tensor in make_model(step).state_dict().items():
            if step == self.fail and self.is_last and "layers.1" in name:
                raise RuntimeError("trouble in the actor")
            yield name, tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int = 0, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(self.weights(global_steps), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Engine:
    """A rollout's engine: a model that is loaded from what verl hands over."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = make_model(100).bfloat16()
        self.loads = 0

    async def update_weights(self, weights: Any, **kwargs: Any) -> None:
        self.loads += 1
        self.model.load_state_dict({name: tensor async for name, tensor in weights})


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's worker beside an engine, which is its server adapter here."""

    def __init__(self, rollout_config: Any) -> None:
        super().__init__(rollout_config, None, Engine())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def look(self) -> tuple[list[int], int]:
        """The tokens that the engine makes, and how often it was loaded."""
        return tokens_of(self.server_adapter.model), self.server_adapter.loads
