"""Treadle in vLLM's registry of weight transfer engines, instead of a worker extension.

    LLM(model, weight_transfer_config=WeightTransferConfig(backend="treadle"), ...)

vLLM finds it by the entry point `vllm.general_plugins`, in each of its processes. Update ranks begin and end updates
over the workers' endpoints. vLLM's own calls around an update therefore move nothing: its `update_weights` only checks
that a worker serves a version. A trainer that sends through vLLM's interface (`vllm_trainer.py`) has each worker start
its agent.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from treadle.update.adapters.vllm.extension import open_endpoint
from treadle.update.agent import Meeting, start_agent, stop_agent
from treadle.update.worker.endpoint import Endpoint

BACKEND = "treadle"


@dataclass
class TreadleInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The arguments of `open_endpoint`, which `Replica` sends to its workers; or `meeting`, which a trainer sends."""

    directory: str = ""
    first: int = 0
    checkpoint: str | None = None
    meeting: dict[str, Any] | None = None
    """Where the trainer's ranks are."""


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
    agent: subprocess.Popen[bytes] | None = None

    def init_transfer_engine(self, init_info: TreadleInit) -> None:
        """Open the endpoint, once: the replica of this engine listens already. Start its agent for a trainer."""
        if self.endpoint is None:
            if not init_info.directory:
                raise ValueError("this worker has no endpoint yet; make Replica(..., transfer=True) before the trainer")
            place = init_info.directory, init_info.first, init_info.checkpoint
            self.endpoint = open_endpoint(self.model, self.vllm_config, *place)
        if init_info.meeting is not None:
            self._join(self.endpoint, msgspec.convert(init_info.meeting, Meeting))

    def _join(self, endpoint: Endpoint, meeting: Meeting) -> None:
        """Start this worker's agent, in place of one that joins an earlier trainer."""
        self._leave()
        self.agent = start_agent(meeting, endpoint.path.parent, endpoint.worker.worker)

    def _leave(self) -> None:
        if self.agent is not None:
            stop_agent(self.agent)
            self.agent = None

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
        self._leave()
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None


def register() -> None:
    """Add Treadle to vLLM's registry; may be called again. The entry point `vllm.general_plugins` names this."""
    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, TreadleEngine)
