"""The adapter of a model inside a vLLM worker, which reloads in place, layer by layer.

vLLM holds the tensors it is given until their layer is complete, then processes them into the memory that kernels use.
So it is given copies: buffers are reused. A reload that has begun is always finalized, whatever came: vLLM fails if
another begins on top of a torn one.

Each rank's loaders cut the tensors of the checkpoint. What they read of them is noted in every reload, and from the
first one on the worker wants no more than that: its copies are as large as the tensors, and filled as far as they are
read. A reload that reads anything else fails, and the next update brings that, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from treadle.dist.streams import streams_of
from treadle.update.adapters.vllm.engine_messages import Forget, LeaseEnd, Serve, Shut
from treadle.update.adapters.vllm.line import Line
from treadle.update.adapters.vllm.weight_reads import WeightReads
from treadle.update.protocol.update_messages import WeightLayout
from treadle.update.worker.arrived_boxes import Arrival, Leaving
from treadle.weights.tensor_boxes import Box, Piece, Tensor

ANSWER_S = 30.0


class Vllm:
    """Takes what the loaders read of each tensor of the checkpoint; the first time all of it."""

    can_export = False
    whole = True

    def __init__(self, model: Any, config: Any, tensors: Sequence[Tensor], line: Line) -> None:
        self.model, self.config, self.line = model, config, line
        self.device = next(model.parameters()).device
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        wanted = tuple(Piece(name, Box.whole(shape)) for name, shape in self._shapes.items())
        self._layout = WeightLayout(tuple(tensors), wanted, copies=int(streams_of(self.device) is not None))
        self._lease_line: Line | None = None
        self._reloading = False
        self._reads = WeightReads()
        self._came: set[str] = set()
        self._needed = set(self._shapes)
        """Tensors without which a layer stays incomplete: all, until it is known which are read."""

    def layout(self) -> WeightLayout:
        """Return what the reloads so far have read; before the first one all."""
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
        self._reads.begin()
        return None

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        """Load copies, by the names of the checkpoint."""
        if not self._reloading:
            return "no reload has begun"
        named = []
        for arrival in arrivals:
            shape = self._shapes[arrival.name]
            own = torch.empty(shape, dtype=arrival.tensor.dtype, device=self.device)
            arrival.copy_into(own[arrival.box.slices(Box.whole(shape))])
            self._reads.give(arrival.name, own, arrival.box)
            named.append((arrival.name, own))
        with self._current(), self._reads:
            self.model.load_weights(named)
        self._came.update(name for name, _ in named)
        return None

    def finish(self) -> str | None:
        """Finalize the reload. Fails where tensors are missing: vLLM would take their layer for a padded one."""
        if not self._reloading:
            return None
        missing = self._needed - self._came
        self._finalize()
        if missing:
            num = len(self._needed)
            return f"vLLM reloads whole layers, and {num - len(missing)} of {num} tensors came"
        self._reads.keep_whole()
        self._want_what_was_read()
        outside = self._reads.outside
        return f"vLLM read {outside}; the next update brings that, too" if outside else None

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
        with self._current(), self._reads:
            finalize_layerwise_reload(self.model, self.config.model_config)

    def _want_what_was_read(self) -> None:
        """Want what complete reloads have read."""
        boxes = self._reads.boxes
        self._needed = set(boxes)
        pieces = tuple(Piece(name, boxes[name]) for name in self._shapes if name in boxes)
        if pieces != self._layout.pieces:
            self._layout = msgspec.structs.replace(self._layout, pieces=pieces)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Set vLLM's config, which is a global, and grad mode and current device, which are the endpoint thread's."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config), torch.no_grad():
            if streams_of(self.device) is not None:
                torch.accelerator.set_device_index(self.device)
            yield
