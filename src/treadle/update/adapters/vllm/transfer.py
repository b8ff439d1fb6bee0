"""Treadle in vLLM's registry of weight transfer engines, instead of a worker extension.

    LLM(model, weight_transfer_config=WeightTransferConfig(backend="treadle"), ...)

vLLM finds it by the entry point `vllm.general_plugins`, in each of its processes. Update ranks begin and end updates
over the workers' endpoints. vLLM's own calls around an update therefore move nothing: its `update_weights` only checks
that a worker serves a version.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from treadle.update.adapters.vllm.extension import open_endpoint
from treadle.update.worker.endpoint import Endpoint

BACKEND = "treadle"


@dataclass
class TreadleInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The arguments of `open_endpoint`, which `Replica` sends to its workers."""

    directory: str
    first: int = 0
    checkpoint: str | None = None


@dataclass
class TreadleUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version that workers must serve by now."""

    version: int


class TreadleEngine(WeightTransferEngine[TreadleInit, TreadleUpdate]):  # type: ignore[misc]
    """A weight transfer engine that opens the worker's endpoint and moves nothing itself."""

    init_info_cls = TreadleInit
    update_info_cls = TreadleUpdate
    supports_draft_weight_update = False
    endpoint: Endpoint | None = None

    def init_transfer_engine(self, init_info: TreadleInit) -> None:
        """Open the endpoint, once. The replica of this engine listens already."""
        if self.endpoint is None:
            self.endpoint = open_endpoint(self.model, self.vllm_config, **asdict(init_info))

    def start_weight_update(self) -> None:
        """Do nothing: update ranks begin and end updates."""

    def finish_weight_update(self) -> None:
        """Do nothing: update ranks begin and end updates."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check the version, without vLLM's wait for the device: nothing is under way."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TreadleUpdate) -> None:
        """Raise RuntimeError where this worker serves another version, or none."""
        status = self.endpoint.worker.status if self.endpoint is not None else None
        if status is None or (status.state, status.version) != ("serving", update_info.version):
            raise RuntimeError(f"version {update_info.version} is not served here: {status}; update ranks bring it")

    def shutdown(self) -> None:
        """Close the endpoint; the engine keeps its weights."""
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


def register() -> None:
    """Add Treadle to vLLM's registry; may be called again. The entry point `vllm.general_plugins` names this."""
    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, TreadleEngine)
