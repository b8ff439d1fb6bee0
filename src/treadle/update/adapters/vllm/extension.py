"""What runs in a vLLM worker: an endpoint that takes updates, opened on call.

`worker_extension_cls` makes this class a base of vLLM's worker. Its methods return what went wrong: one that raises
leaves the other workers' answers in vLLM's queue, and every later answer would be that to the question before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.update.adapters.vllm.adapter import Vllm
from treadle.update.adapters.vllm.line import Line, replica_path
from treadle.update.rank.checkpoint import described
from treadle.update.worker.endpoint import Endpoint


def open_endpoint(model: Any, config: Any, directory: str, first: int = 0, checkpoint: str | None = None) -> Endpoint:
    """For one worker of an engine whose first has that number; `checkpoint` has the names, if the model has none."""
    parallel = config.parallel_config
    if config.lora_config is not None:
        raise ValueError("LoRA adapters would stay those of the old weights; start vLLM without them")
    worker = first + parallel.data_parallel_index * parallel.world_size + parallel.rank
    tensors = tuple(described(Path(checkpoint if checkpoint is not None else config.model_config.model)))
    place = Path(directory)
    adapter = Vllm(model, config, tensors, Line(replica_path(place, first), worker))
    return Endpoint(adapter, place, worker, spill=place)


class Extension:
    """Methods that a worker gets besides its own."""

    treadle_endpoint: Endpoint | None = None

    def treadle_open(self, place: dict[str, Any]) -> str | None:
        """Opens the endpoint; once. `place` is what `open_endpoint` takes besides the model."""
        worker: Any = self
        if self.treadle_endpoint is not None:
            return None
        try:
            self.treadle_endpoint = open_endpoint(worker.model_runner.get_model(), worker.vllm_config, **place)
        except Exception as error:  # returned, see above
            return f"{type(error).__name__}: {error}"
        return None

    def treadle_close(self) -> str | None:
        """Closes the endpoint."""
        if self.treadle_endpoint is not None:
            self.treadle_endpoint.close()
            self.treadle_endpoint = None
        return None
