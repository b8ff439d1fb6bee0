"""The part of Treadle inside a vLLM worker: an endpoint, opened when the replica asks for it.

`worker_extension_cls` makes `Extension` a base of vLLM's worker. Its methods return errors instead of raising: vLLM
would leave the other workers' answers in its queue, and take each for the answer to the next call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.update.adapters.vllm.line import Line, replica_path
from treadle.update.adapters.vllm.vllm_adapter import Vllm
from treadle.update.rank.checkpoint import described
from treadle.update.worker.endpoint import Endpoint


def open_endpoint(model: Any, config: Any, directory: str, first: int = 0, checkpoint: str | None = None) -> Endpoint:
    """Open the endpoint of one worker. `first` is the number of its engine's first worker.

    `checkpoint` is a directory whose safetensors files have the names and shapes of updates; by default the model's.
    """
    parallel = config.parallel_config
    if config.lora_config is not None:
        raise ValueError("LoRA adapters would stay those of the old weights; start vLLM without them")
    worker = first + parallel.data_parallel_index * parallel.world_size + parallel.rank
    tensors = tuple(described(Path(checkpoint if checkpoint is not None else config.model_config.model)))
    place = Path(directory)
    adapter = Vllm(model, config, tensors, Line(replica_path(place, first), worker))
    return Endpoint(adapter, place, worker, spill=place, replica=first)


class Extension:
    """Methods that vLLM's worker gets besides its own."""

    treadle_endpoint: Endpoint | None = None

    def treadle_open(self, place: dict[str, Any]) -> str | None:
        """Open the endpoint, once; None, or the error. `place` are arguments of `open_endpoint`."""
        worker: Any = self
        if self.treadle_endpoint is not None:
            return None
        try:
            self.treadle_endpoint = open_endpoint(worker.model_runner.get_model(), worker.vllm_config, **place)
        except Exception as error:  # returned, see above
            return f"{type(error).__name__}: {error}"
        return None

    def treadle_close(self) -> str | None:
        """Close the endpoint, if it is open."""
        if self.treadle_endpoint is not None:
            self.treadle_endpoint.close()
            self.treadle_endpoint = None
        return None
