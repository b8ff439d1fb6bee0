"""The adapter of a model inside a vLLM worker, which reloads in place, layer by layer.

vLLM holds the tensors it is given until their layer is complete, then processes them into the memory that kernels use.
So it is given copies: buffers are reused. A reload that has begun is always finalized, whatever came: vLLM fails if
another begins on top of a torn one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from treadle.dist.streams import streams_of
from treadle.update.adapters.vllm.engine_messages import Forget, LeaseEnd, Serve, Shut
from treadle.update.adapters.vllm.line import Line
from treadle.update.protocol.update_messages import WeightLayout
from treadle.update.worker.arrived_boxes import Arrival, Leaving
from treadle.weights.tensor_boxes import Box, Piece, Tensor

ANSWER_S = 30.0


class Vllm:
    """Takes every tensor of the checkpoint whole: vLLM's loaders cut them for the rank."""

    can_export = False
    whole = True

    def __init__(self, model: Any, config: Any, tensors: Sequence[Tensor], line: Line) -> None:
        self.model, self.config, self.line = model, config, line
        self.device = next(model.parameters()).device
        wanted = tuple(Piece(t.name, Box.whole(t.shape)) for t in tensors)
        self._layout = WeightLayout(tuple(tensors), wanted, copies=int(streams_of(self.device) is not None))
        self._lease_line: Line | None = None
        self._reloading = False
        self._came: set[str] = set()

    def layout(self) -> WeightLayout:
        """All tensors of the checkpoint."""
        return self._layout

    def close(self, how: str, deadline_s: float) -> str | None:
        """Ask the engine's process to drain requests and pause the scheduler."""
        return self.line.ask(Shut("abort" if how == "abort" else "drain", deadline_s), deadline_s + ANSWER_S)

    def begin(self) -> str | None:
        """Begin a layerwise reload. vLLM moves parameters to the meta device and sets the kernels' memory aside."""
        if self._reloading:
            return None
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._current():
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None  # else experts are not processed again: wrong tokens, and no error
            self._reloading = True
            initialize_layerwise_reload(self.model)
        self._came.clear()
        return None

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        """Load copies, by the names of the checkpoint."""
        if not self._reloading:
            return "no reload has begun"
        named = []
        for arrival in arrivals:
            own = torch.empty(arrival.box.shape, dtype=arrival.tensor.dtype, device=self.device)
            arrival.copy_into(own)
            named.append((arrival.name, own))
        with self._current():
            self.model.load_weights(named)
        self._came.update(name for name, _ in named)
        return None

    def finish(self) -> str | None:
        """Finalize the reload. Fails where tensors are missing: vLLM would take their layer for a padded one."""
        if not self._reloading:
            return None
        num, came = len(self._layout.tensors), len(self._came)
        self._finalize()
        if came < num:
            return f"vLLM reloads whole layers, and {came} of {num} tensors came"
        return None

    def invalidate(self) -> str | None:
        """Reset the engine's caches. Otherwise tokens are wrong wherever a prefix is found in the cache."""
        return self.line.ask(Forget(), ANSWER_S)

    def lease(self, until_ns: int | None) -> str | None:
        """Tell the replica, over a line of its own: on the other one requests may be drained meanwhile."""
        if self._lease_line is None:
            if until_ns is None:
                return None
            self._lease_line = Line(self.line.path, self.line.worker)
        return self._lease_line.ask(LeaseEnd(until_ns), ANSWER_S)

    def open(self, version: int) -> str | None:
        """Tell the replica that this worker is ready; its gate opens with the last worker."""
        return self.line.ask(Serve(version), 2 * ANSWER_S)

    def abort(self) -> str | None:
        """Finalize the torn reload. Parameters are of no version then."""
        if self._reloading:
            self._finalize()
        return None

    def export(self, leaving: Leaving) -> str | None:
        """Fail: weights were packed for kernels and cannot be copied out."""
        return f"vLLM cannot hand out {leaving.boxes.names[0]}; give the source that has this version to recover()"

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._reloading = False
        with self._current():
            finalize_layerwise_reload(self.model, self.config.model_config)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Set vLLM's config, which is a global, and grad mode and current device, which are the endpoint thread's."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config), torch.no_grad():
            if streams_of(self.device) is not None:
                torch.accelerator.set_device_index(self.device)
            yield
