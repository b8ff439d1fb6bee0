"""Runs the ops of one chunk at layer granularity on a micro-batch.

The chunk is an `nn.Sequential`: layers that name their segments, on the first stage perhaps plain modules before them
(the embedding), on the last plain modules behind them (the head). The embedding is an op of its own, and so is the head
with the loss: all computation runs on the compute lane, in one thread, so the state it touches (deferred weight
gradients, gradients, the random generator) has one owner.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from treadle.ir import dependency
from treadle.ir.program import EMBEDDING, HEAD, OpKind
from treadle.runtime.model.chunk import Chunk, check_losses
from treadle.runtime.model.saved import SavedTensors
from treadle.runtime.model.seeding import Seeds
from treadle.runtime.model.segments import COMPUTE, EXCHANGE, Cut, Plan, Segment, Value, drop, is_segmented, leaves_of
from treadle.runtime.model.weight_grad import AddGradient, WeightGrad, WeightGradQueue

SEGMENT_OF = {
    OpKind.ATTN_F: "attn",
    OpKind.COUNTS: "counts",
    OpKind.HOST: "host",
    OpKind.DISPATCH_F: "dispatch",
    OpKind.MLP_F: "mlp",
    OpKind.COMBINE_F: "combine",
    OpKind.COMBINE_B: "combine",
    OpKind.MLP_B: "mlp",
    OpKind.DISPATCH_B: "dispatch",
    OpKind.ATTN_B: "attn",
    OpKind.MLP_W: "mlp",
    OpKind.ATTN_W: "attn",
    **dict.fromkeys(EMBEDDING, "embed"),
    **dict.fromkeys(HEAD, "head"),
}
"""The segment that an op is the forward, the backward or the weight half of."""

FORWARD = (*dependency.FORWARD, OpKind.EMBED_F, OpKind.HEAD_F)
BACKWARD = (*dependency.BACKWARD, OpKind.EMBED_B, OpKind.HEAD_B)
COPIES = (OpKind.OFFLOAD, OpKind.ONLOAD)
EMBEDDING_LAYER = -1
"""Where what the embedding saves is kept; what the head saves is behind the last layer. Neither is offloaded."""
AUX_LOSS = "aux_loss"
"""A value of this name, which nobody reads, is a loss of the layer's own."""


class _Passage:
    """The state of a micro-batch in a chunk: values that later segments read, cuts that later backwards start from."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.first: Value | None = None
        self.last: Value | None = None
        self.cuts: dict[tuple[int, str], Cut] = {}
        self.halves: dict[tuple[int, str], list[WeightGrad]] = {}


class LayeredStage(Chunk):
    """A chunk whose layers run op by op.

    `deferred` are the backward ops whose weight gradients are ops of their own. Saved tensors go through the `store` if
    there is one.
    """

    deferred: tuple[OpKind, ...] = ()
    store: SavedTensors | None = None

    def __init__(
        self, number: int, module: nn.Module, halves: WeightGradQueue, seeds: Seeds | None, mb_offset: int
    ) -> None:
        super().__init__(number, module, seeds, mb_offset)
        self.halves = halves
        before, layers, behind = parts_of(module, number)
        self.plans = [Plan.of(layer, f"stage {number}, layer {at}") for at, layer in enumerate(layers)]
        self._embedding = Segment("embed", nn.Sequential(*before), ("x",), ("x",)) if before else None
        self._head = nn.Sequential(*behind)
        self._passing: dict[int, _Passage] = {}
        self._examined: set[tuple[int, str]] = set()
        self._autocast: tuple[str, torch.dtype] | None = None

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the chunk."""
        return len(self.plans)

    def begin_step(self, scale: Tensor) -> None:
        """Also drops unfinished micro-batches, and notes whether autocast is on, which only this thread knows."""
        super().begin_step(scale)
        self._passing.clear()
        kind = scale.device.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        self._autocast = (kind, torch.get_autocast_dtype(kind)) if on else None

    def run(self, kind: OpKind, mb: int, layer: int, add: AddGradient) -> None:
        """Runs one op."""
        if kind in COPIES:
            self._copy(kind, mb, layer)
            return
        name = SEGMENT_OF[kind]
        with self._precision(kind), nullcontext() if self.trains else torch.no_grad():  # each thread has its own modes
            if kind in FORWARD:
                self._forward(name, mb, layer)
            elif kind in BACKWARD:
                self._backward(name, mb, layer, defer=kind in self.deferred)
            else:
                self._weight_half(name, mb, layer, add)
        self._leave(kind, mb, layer)

    def _precision(self, kind: OpKind) -> AbstractContextManager[Any]:
        """Sets an op's precision: a forward has the caller's autocast in any thread, a backward that of its forward."""
        if self._autocast is None:
            return nullcontext()
        device, dtype = self._autocast
        return torch.autocast(device, dtype, enabled=kind in FORWARD)

    def _weight_half(self, name: str, mb: int, layer: int, add: AddGradient) -> None:
        halves = self._passing[mb].halves.pop((layer, name))
        for half in halves:
            half.run(add)
        if self.store is not None:
            self.store.drop_halves((self.number, mb, layer), name)

    def _copy(self, kind: OpKind, mb: int, layer: int) -> None:
        assert self.store is not None
        move = self.store.offload if kind is OpKind.OFFLOAD else self.store.onload
        move((self.number, mb, layer))

    def _saving(self, mb: int, layer: int, name: str) -> AbstractContextManager[Any]:
        if self.store is None:
            return nullcontext()
        return self.store.saving((self.number, mb, layer), name)

    def _forward(self, name: str, mb: int, layer: int) -> None:
        self._seed(name, mb, layer)
        if mb not in self._passing:
            self._enter(mb)
        passage = self._passing[mb]
        if name == "embed":
            assert self._embedding is not None, "the ranks have agreed on who has an embedding"
            with self._saving(mb, EMBEDDING_LAYER, name):
                passage.cuts[layer, name] = Cut.forward(self._embedding, passage.values)
        elif name == "head":
            self._forward_head(mb, passage)
        else:
            self._forward_layer(name, mb, layer, passage)

    def _forward_layer(self, name: str, mb: int, layer: int, passage: _Passage) -> None:
        plan = self.plans[layer]
        segment = plan.segments[name]
        with self._saving(mb, layer, name):
            cut = Cut.forward(segment, passage.values)
        if name in EXCHANGE and (layer, name) not in self._examined:
            self._examined.add((layer, name))
            self._refuse_parameters(name, layer, cut)
        if AUX_LOSS in segment.writes:
            self._own_loss(mb, passage.values[AUX_LOSS])
        drop(passage.values, plan.dead[name])
        passage.cuts[layer, name] = cut
        if layer == self.num_layers - 1 and name == list(plan.segments)[-1]:
            passage.last = passage.values.pop("x")
            if self.loss_fn is None:
                self._exit(mb, passage.last)

    def _refuse_parameters(self, name: str, layer: int, cut: Cut) -> None:
        """Refuses parameters in an exchange: it runs beside computation, and their gradients would be a race."""
        used = leaves_of(cut)
        for parameter, p in self.plans[layer].module.named_parameters():
            if any(p is leaf for leaf in used):
                raise ValueError(
                    f"stage {self.number}, layer {layer}: segment {name} uses the parameter {parameter}; an exchange "
                    "runs beside computation and only moves rows: use parameters in attn or mlp"
                )

    def _seed(self, name: str, mb: int, layer: int) -> None:
        """Seeds a compute segment. Exchanges run beside computation and draw no random numbers."""
        if self.seeds is None or name in EXCHANGE:
            return
        if name == "embed":
            self.seeds.begin_segment(self.mb_offset + mb, 0, len(COMPUTE))
        elif name == "head":
            self.seeds.begin_segment(self.mb_offset + mb, self.num_layers - 1, len(COMPUTE) + 1)
        else:
            self.seeds.begin_segment(self.mb_offset + mb, layer, COMPUTE.index(name))

    def _enter(self, mb: int) -> None:
        passage = self._passing[mb] = _Passage()
        (x,) = self.at(mb).take_inputs()
        passage.first = passage.values["x"] = Value(x, x.requires_grad)

    def _exit(self, mb: int, out: Value) -> None:
        """Puts the output of the last layer where its send finds it."""
        self._check(mb, out)
        self.at(mb).put_outputs((out.thing,), self.boundary)
        out.thing = None

    def _forward_head(self, mb: int, passage: _Passage) -> None:
        """Runs the head and the loss on the output of the last layer."""
        out, target, loss_fn, head = passage.last, self.at(mb).take_target(), self.loss_fn, self._head
        assert out is not None
        assert loss_fn is not None
        values = {"x": out}
        end = Segment("head", lambda x: loss_fn(head(x), target), ("x",), ("loss",))
        with self._saving(mb, self.num_layers, "head"):
            passage.cuts[0, "head"] = Cut.forward(end, values)
        out.thing = None
        self._own_loss(mb, values["loss"])

    def _check(self, mb: int, out: Value) -> None:
        """Checks that a layer hands on one tensor, in a shape that may cross to the next stage."""
        if not isinstance(out.thing, Tensor):
            got = type(out.thing).__name__
            raise ValueError(f"stage {self.number} ends with an x that is {got}; layers hand on one tensor")
        self.keep_shape(mb, (out.thing.detach().requires_grad_(out.needs_grad),))

    def _own_loss(self, mb: int, value: Value) -> None:
        """Starts the gradient of a layer's own loss, and adds the loss to the micro-batch's."""
        loss: Tensor = value.thing
        check_losses((loss,))
        if value.needs_grad:
            value.grad = self.scale_as(loss.dtype)
        self.at(mb).add_loss(loss)

    def _backward(self, name: str, mb: int, layer: int, *, defer: bool) -> None:
        passage = self._passing[mb]
        if self.loss_fn is None and layer == self.num_layers - 1 and name == list(self.plans[layer].segments)[-1]:
            assert passage.last is not None
            passage.last.grad = self.at(mb).take_output_grads()[0] if passage.last.needs_grad else None
        self._seed(name, mb, layer)  # for what is computed again
        if defer:
            self.halves.open()
        passage.cuts.pop((layer, name)).backward()
        if defer:
            halves = passage.halves[layer, name] = self.halves.close()
            if self.store is not None:
                self.store.hold_halves((self.number, mb, layer), name, halves)

    def _leave(self, kind: OpKind, mb: int, layer: int) -> None:
        """Ends a micro-batch's backward: hands its input gradient to the send, and drops state that nothing needs."""
        passage = self._passing[mb]
        if kind is OpKind.ATTN_B and layer == 0:
            first = passage.first
            assert first is not None
            self.at(mb).put_input_grads((first.grad,) if first.needs_grad else ())
        if not passage.cuts and not passage.halves:
            del self._passing[mb]


def parts_of(module: nn.Module, number: int) -> tuple[list[nn.Module], list[Any], list[nn.Module]]:
    """Returns (modules before the layers, the layers, modules behind them)."""
    children = list(module) if isinstance(module, nn.Sequential) else [module]
    named = [is_segmented(child) for child in children]
    if not any(named):
        raise ValueError(f"stage {number} has no layer that names its segments")
    first, last = named.index(True), len(named) - 1 - named[::-1].index(True)
    plain = [type(child).__name__ for child, is_named in zip(children, named, strict=True) if not is_named]
    if not all(named[first : last + 1]):
        raise ValueError(
            f"stage {number} has plain modules ({', '.join(plain)}) between layers that name their segments"
        )
    return children[:first], children[first : last + 1], children[last + 1 :]


def has_embedding(module: nn.Module) -> bool:
    """Returns whether a stage has plain modules before its segmented layers."""
    return is_layered(module) and isinstance(module, nn.Sequential) and not is_segmented(module[0])


def is_layered(module: nn.Module) -> bool:
    """Returns whether a stage has layers that name their segments."""
    return any(is_segmented(child) for child in (module if isinstance(module, nn.Sequential) else [module]))
