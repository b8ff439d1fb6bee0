"""Runs the ops of one chunk at layer granularity on a micro-batch.

The chunk is an `nn.Sequential`: layers that name their segments, on the first stage perhaps plain modules before them
(the embedding), on the last plain modules behind them (the head), before which MTP blocks may stand. The embedding is
an op of its own, and so are each MTP block and the head with the loss: all computation runs on the compute lane, in one
thread, so the state it touches (deferred weight gradients, gradients, the random generator) has one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from treadle.ir import ops
from treadle.ir.ops import COPIES, RECOMPUTE, OpKind, OpPhase
from treadle.runtime.model.calling import LayerCalls
from treadle.runtime.model.chunk import Chunk, check_losses
from treadle.runtime.model.losses import AUX_LOSS, MAIN, FurtherLoss, OwnLoss, split_off
from treadle.runtime.model.mtp_block import MTPBlock, mtp_name
from treadle.runtime.model.recompute import Kept, LayerBuffers, Pack
from treadle.runtime.model.saved import SavedTensors
from treadle.runtime.model.saved.saved_store import InPlace
from treadle.runtime.model.seeding import RandomState, Seeds
from treadle.runtime.model.segments import COMPUTE, EXCHANGE, Cut, Plan, Segment, Value, drop, leaves_of
from treadle.runtime.model.side import Keywords, Side, refuse_missing
from treadle.runtime.model.stage_blocks import parts_of, refuse_uncalled
from treadle.runtime.model.weight_grad import AddGradient, WeightGrad, WeightGradQueue

SEGMENT_OF = {kind: str(kind.part) for kind in OpKind if kind.blocks}
"""The segment that an op is the forward, the backward, the wgrad or the recompute of."""

FORWARD = (*ops.FORWARD, *ops.BLOCK_FORWARD.values())
BACKWARD = (*ops.BACKWARD, *ops.BLOCK_BACKWARD.values())
WITHOUT_BACKWARD = tuple(SEGMENT_OF[kind] for kind in FORWARD if kind.in_phase(OpPhase.B) is None)
EMBEDDING_LAYER = -1
"""Where what the embedding saves is kept; what head and MTP blocks save is behind the last layer. None is offloaded."""


class _Passage:
    """The state of a micro-batch in a chunk: values that later segments read, cuts that later backwards start from.

    `kept` are the segments that are to be computed again, until they are.
    """

    def __init__(self, x: Tensor, side: Side) -> None:
        self.first = Value(x, x.requires_grad)
        self.last: Value | None = None
        self.values = {**{name: Value(thing, False) for name, thing in side.items()}, "x": self.first}
        self.kept: dict[tuple[int, str], Kept] = {}
        self.cuts: dict[tuple[int, str], Cut] = {}
        self.halves: dict[tuple[int, str], list[WeightGrad]] = {}


class LayeredStage(Chunk):
    """A chunk whose layers run op by op.

    `deferred` are the backward ops whose weight gradients are ops of their own, `recomputed` the segments that are
    computed again before their backward. Saved tensors go through the `store` if there is one.
    """

    deferred: tuple[OpKind, ...] = ()
    recomputed: tuple[str, ...] = ()
    store: SavedTensors | None = None

    def __init__(
        self, number: int, module: nn.Module, halves: WeightGradQueue, seeds: Seeds | None, mb_offset: int
    ) -> None:
        super().__init__(number, module, seeds, mb_offset)
        self.halves = halves
        before, layers, self.mtp, behind = parts_of(module, number)
        self.plans = [Plan.of(layer, f"stage {number}, layer {at}") for at, layer in enumerate(layers)]
        self._buffers = [LayerBuffers(layer) for layer in layers]
        whole = not layers and not self.mtp  # then the module itself is called
        self._embedding = LayerCalls(module, None if whole and before else before)
        self._head = LayerCalls(module, None if whole and behind else behind)
        self._mtp_keywords = [Keywords(block) for block in self.mtp]
        self._side = _side_of(self.plans)
        self._passing: dict[int, _Passage] = {}
        self._examined: set[tuple[int, str]] = set()
        self._autocast: tuple[str, torch.dtype] | None = None
        self._device = torch.device("cpu")

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of the chunk."""
        return len(self.plans)

    @cached_property
    def chain(self) -> list[tuple[str, int]]:
        """The (segment, layer) of the stage's forward in order. Its backward goes from the last to the first."""
        return [
            *([("embed", 0)] if self._embedding else []),
            *((name, layer) for layer, plan in enumerate(self.plans) for name in plan.segments),
            *(("mtp", at) for at in range(len(self.mtp))),
            *([("head", 0)] if self.loss_fn is not None else []),
        ]

    def ends_forward(self, kind: OpKind, layer: int) -> bool:
        """Returns whether an op is the last of the chunk's forward."""
        return kind in FORWARD and (SEGMENT_OF[kind], layer) == self.chain[-1]

    def ends_backward(self, kind: OpKind, layer: int) -> bool:
        """Returns whether an op is the last of the chunk's backward, weight halves apart."""
        return kind in BACKWARD and (SEGMENT_OF[kind], layer) == self.chain[0]

    def check_module(self) -> None:
        """Raises ValueError if something was put on a layer or on the `nn.Sequential` since that nothing calls."""
        if self.plans or self.mtp:
            refuse_uncalled(self.module, f"stage {self.number}")
        for at, plan in enumerate(self.plans):
            plan.refuse_replaced(f"stage {self.number}, layer {at}")

    def check_side(self, side: Side) -> None:
        """Raises ValueError if a segment reads what neither a segment writes nor the step was given."""
        written = [name for plan in self.plans for segment in plan.segments.values() for name in segment.writes]
        refuse_missing(side, self._side, written)

    def begin_step(self, scale: Tensor, aux_scale: Tensor) -> None:
        """Also drops unfinished micro-batches, and notes whether autocast is on, which only this thread knows."""
        super().begin_step(scale, aux_scale)
        self._embedding.refresh()
        self._head.refresh()
        self._passing.clear()
        self._device, kind = scale.device, scale.device.type
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
            elif kind in RECOMPUTE:
                self._recompute(name, mb, layer)
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
        return torch.autocast(device, dtype, enabled=kind in FORWARD or kind in RECOMPUTE)

    def _weight_half(self, name: str, mb: int, layer: int, add: AddGradient) -> None:
        halves = self._passing[mb].halves.pop((layer, name))
        self.run_weight_grads(halves, mb, add)
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

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, name: str, mb: int, layer: int) -> None:
        self._seed(name, mb, layer)
        if mb not in self._passing:
            (x,) = self.at(mb).take_inputs()
            self._passing[mb] = _Passage(x, self.at(mb).side)
        passage = self._passing[mb]
        if name == "embed":
            self._forward_embedding(mb, passage)
        elif name == "mtp":
            self._forward_mtp(mb, layer, passage)
        elif name == "head":
            self._forward_head(mb, passage)
        else:
            self._forward_layer(name, mb, layer, passage)
        if self.loss_fn is None and (name, layer) == self.chain[-1]:
            self._exit(mb, passage)

    def _forward_embedding(self, mb: int, passage: _Passage) -> None:
        """Runs the plain modules before the layers."""
        assert self._embedding, "the ranks have agreed on who has an embedding"
        side, embedding = self.at(mb).side, self._embedding
        segment = Segment("embed", lambda x: embedding((x,), side), ("x",), ("x",))
        with self._saving(mb, EMBEDDING_LAYER, "embed"):
            passage.cuts[0, "embed"] = Cut.forward(segment, passage.values)

    def _forward_layer(self, name: str, mb: int, layer: int, passage: _Passage) -> None:
        plan = self.plans[layer]
        segment = plan.segments[name]
        if name in self.recomputed and self.trains:
            random, buffers = RandomState(self._device), self._buffers[layer]
            passage.kept[layer, name] = Kept.forward(
                segment, passage.values, self._keeping(mb, layer, name), random, buffers
            )
        else:
            with self._saving(mb, layer, name):
                cut = Cut.forward(segment, passage.values)
            if name not in WITHOUT_BACKWARD:
                passage.cuts[layer, name] = cut
            if name in EXCHANGE and (layer, name) not in self._examined:
                self._examined.add((layer, name))
                self._refuse_parameters(name, layer, cut)
        if AUX_LOSS in segment.writes:
            self._own_loss(mb, passage.values[AUX_LOSS], aux=True)
        drop(passage.values, plan.dead[name])

    def _keeping(self, mb: int, layer: int, name: str) -> Pack:
        return InPlace if self.store is None else self.store.keeping((self.number, mb, layer), name)

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
        elif name == "mtp":
            self.seeds.begin_segment(self.mb_offset + mb, self.num_layers - 1, len(COMPUTE) + 2 + layer)
        else:
            self.seeds.begin_segment(self.mb_offset + mb, layer, COMPUTE.index(name))

    def _exit(self, mb: int, passage: _Passage) -> None:
        """Puts the output of the last block where its send finds it."""
        out = passage.last = passage.values.pop("x")
        self._check(mb, out)
        self.at(mb).put_outputs((out.thing.detach(),), self.boundary)
        out.thing = None

    def _forward_mtp(self, mb: int, at: int, passage: _Passage) -> None:
        """Runs an MTP block on what the layers hand on, or on the hidden state of the block before it."""
        block, microbatch = self.mtp[at], self.at(mb)
        side = self._mtp_keywords[at].of(microbatch.side, 2)
        run = _with_loss(block, microbatch.target, side, mtp_name(at), microbatch.note)
        values = passage.values
        segment = Segment("mtp", run, ("hidden" if at else "x",), ("hidden", "loss"))
        with self._saving(mb, self.num_layers + 1 + at, "mtp"):
            passage.cuts[at, "mtp"] = Cut.forward(segment, values)
        self._own_loss(mb, values.pop("loss"))
        if at == len(self.mtp) - 1:
            drop(values, ("hidden",))

    def _forward_head(self, mb: int, passage: _Passage) -> None:
        """Runs the head and the loss on the output of the last layer."""
        microbatch, loss_fn, head, seeds = self.at(mb), self.loss_fn, self._head, self.seeds
        side = microbatch.side
        target = microbatch.take_target()
        assert loss_fn is not None

        def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
            made = head((x,), side) if head else x
            if seeds is not None:
                seeds.begin_loss(self.mb_offset + mb)
            main, others = split_off(loss_fn(made, target), microbatch.note)
            check_losses((main, *(own.loss for own in others)))
            microbatch.note(MAIN, main.detach())
            aux = [own.loss for own in others if own.aux]
            return sum((own.loss for own in others if not own.aux), start=main), aux[0] if aux else None

        with self._saving(mb, self.num_layers, "head"):
            passage.cuts[0, "head"] = Cut.forward(Segment("head", run, ("x",), ("loss", AUX_LOSS)), passage.values)
        drop(passage.values, ("x",))
        self._own_loss(mb, passage.values.pop("loss"))
        aux = passage.values.pop(AUX_LOSS)
        if aux.thing is not None:
            self._own_loss(mb, aux, aux=True)

    def _check(self, mb: int, out: Value) -> None:
        """Checks that a layer hands on one tensor, in a shape that may cross to the next stage."""
        if not isinstance(out.thing, Tensor):
            got = type(out.thing).__name__
            raise ValueError(f"stage {self.number} ends with an x that is {got}; layers hand on one tensor")
        self.keep_shape(mb, (out.thing.detach().requires_grad_(out.needs_grad),))

    def _own_loss(self, mb: int, value: Value, *, aux: bool = False) -> None:
        """Starts the gradient of a loss, and adds the loss to the micro-batch's."""
        check_losses((value.thing,))
        own = OwnLoss(value.thing, aux)
        if value.needs_grad:
            value.grad = self.scale_of(own)
        self.at(mb).add_loss(own)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _recompute(self, name: str, mb: int, layer: int) -> None:
        """Runs a segment's forward again; its backward starts from there."""
        passage = self._passing[mb]
        with self._saving(mb, layer, f"{name}_r"):
            passage.cuts[layer, name] = passage.kept.pop((layer, name)).again()

    def _backward(self, name: str, mb: int, layer: int, *, defer: bool) -> None:
        passage = self._passing[mb]
        if self.loss_fn is None and (name, layer) == self.chain[-1]:
            assert passage.last is not None
            passage.last.grad = self.at(mb).take_output_grads()[0] if passage.last.needs_grad else None
        self._seed(name, mb, layer)  # for what is computed again
        cut = passage.cuts.pop((layer, name))
        if not defer:
            cut.backward()
            return
        self.halves.open()
        try:
            cut.backward()
        finally:
            halves = passage.halves[layer, name] = self.halves.close()
        if self.store is not None:
            self.store.hold_halves((self.number, mb, layer), name, halves)

    def _leave(self, kind: OpKind, mb: int, layer: int) -> None:
        """Ends a micro-batch's backward: hands its input gradient to the send, and drops state that nothing needs.

        Exchanges leave that to the compute lane: it alone knows whether a segment is between two states.
        """
        if SEGMENT_OF[kind] in EXCHANGE:
            return
        passage = self._passing[mb]
        if self.ends_backward(kind, layer):
            first = passage.first
            self.at(mb).put_input_grads((first.grad,) if first.needs_grad else ())
        if not passage.cuts and not passage.halves and not passage.kept:
            del self._passing[mb]


def _side_of(plans: Sequence[Plan]) -> dict[str, str]:
    """Returns the side values that a stage's layers read, and who reads each first."""
    side: dict[str, str] = {}
    for plan in plans:
        for name, reader in plan.side.items():
            side.setdefault(name, reader)
    for plan in plans:
        for segment in plan.segments.values():
            for name in segment.writes:
                if name in side:
                    raise ValueError(
                        f"{side[name]} reads the side value {name!r}, and another layer's {segment.name} writes a "
                        "value of that name; give one of them another name"
                    )
    return side


def _with_loss(
    block: MTPBlock, target: Any, side: Side, name: str, note: Callable[[str, Tensor], None]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Returns an MTP block as a segment: its hidden state and its weighted loss."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        made = block(x, target, **side)
        if not isinstance(made, tuple) or len(made) != 2 or not all(isinstance(part, Tensor) for part in made):
            got = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
            raise ValueError(f"{type(block).__name__} returned {got}; an MTP block returns two tensors, (hidden, loss)")
        hidden, loss = made
        check_losses((loss,))
        note(name, loss.detach())
        return hidden, FurtherLoss(name, loss, block.loss_weight).weighted()

    return run
