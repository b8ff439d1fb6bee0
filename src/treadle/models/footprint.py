"""The memory of a stage, op by op, found without taking any: the runtime's own ops run on the meta device.

A stage of any size is counted in about a second: of several layers of one kind one runs. Two micro-batches pass it, as
a rank runs them: the first also makes the gradients, the second adds to them.

    found = stage_footprint(config, "tttL", MicroBatch(2, 4096), ep=8)
    found.blocks["t"].saved["mlp"]                   bytes that experts save for their backward, in one layer
    found.blocks["L"].ops[OpKind.HEAD_B].peak        bytes that the head's backward takes besides what is there

Two things on the meta device are not as on a CPU, and are replaced: attention runs by the CPU's flash kernel
(`FlashAttention`), and rows are balanced over experts (`BalancedExchange`). On a GPU, attention with a document mask
runs by another kernel, which keeps keys and values for every head: there it saves more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn

from treadle.ir.blocks import LAYERS
from treadle.ir.ops import WEIGHT_OF, OpKind, OpPhase, by_part
from treadle.models.balanced import BalancedExchange
from treadle.models.build_stages import build_stages
from treadle.models.ends import loss_fn
from treadle.models.live_bytes import FlashAttention, MetaBytes, MetaSavedTensors
from treadle.models.model_config import ModelConfig
from treadle.models.tensor_names import EMBEDDING as EMBEDDING_NAME
from treadle.models.tensor_names import HEAD as HEAD_NAME
from treadle.models.tensor_names import views
from treadle.runtime.model import weight_grad
from treadle.runtime.model.exchange import RankOwned
from treadle.runtime.model.gradients import Gradients
from treadle.runtime.model.layered import EMBEDDING_LAYER, LayeredStage
from treadle.runtime.model.weight_grad import WeightGradQueue

_FORWARD, _BACKWARD = by_part(OpPhase.F), by_part(OpPhase.B)
_WEIGHTS, _AGAIN = by_part(OpPhase.W), by_part(OpPhase.R)

Place: TypeAlias = tuple[OpKind, int]
"""(kind, layer) of an op of a stage."""


@dataclass(frozen=True)
class MicroBatch:
    """The shape of a micro-batch: `size` sequences of `seq_len` tokens, with document masks if `documents`."""

    size: int
    seq_len: int
    documents: bool = True

    @property
    def num_tokens(self) -> int:
        """The tokens of a micro-batch."""
        return self.size * self.seq_len


@dataclass(frozen=True)
class OpBytes:
    """The memory of an op: at most `peak` bytes more while it runs than before, and `after` bytes more after it.

    Of `after`, `gradients` bytes are gradients of parameters; only the first micro-batch makes some.
    """

    peak: int
    after: int
    gradients: int = 0


@dataclass(frozen=True)
class ParameterShape:
    """A parameter, or what is one in a checkpoint, under its name there. `is_expert`: only this rank has it."""

    name: str
    shape: tuple[int, ...]
    is_expert: bool
    is_shared: bool
    """Stages may share it: the embedding, the head."""

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BlockFootprint:
    """The memory of one block of a stage: an embedding, a layer, an MTP block, a head."""

    letter: str
    parameters: tuple[ParameterShape, ...]
    parameter_bytes: int
    """Of all parameters and buffers of this rank."""

    expert_bytes: int
    """Those of experts among them, of which each rank of an expert group has its own."""

    saved: Mapping[str, int]
    """Bytes saved for backward by each part, each storage by the first part that saves it. attn_r and mlp_r: what
    computing a part again saves besides its inputs."""

    ops: Mapping[OpKind, OpBytes]
    """Of each op, in any micro-batch but the first."""

    first: Mapping[OpKind, OpBytes]
    """In the first micro-batch, in which gradients come to be."""

    @property
    def saved_until_backward(self) -> int:
        """The bytes saved from forward to backward: those that an offload moves."""
        return sum(size for part, size in self.saved.items() if not part.endswith("_r"))


@dataclass(frozen=True)
class StageFootprint:
    """The memory of a stage in bytes, on one rank of its expert group."""

    row: str
    blocks: Mapping[str, BlockFootprint]
    boundary: int
    """Of what passes from stage to stage, of one micro-batch."""

    kept: float
    """The part of what is saved that deferred weight gradients hold after the backward."""


@lru_cache(maxsize=64)
def stage_footprint(
    config: ModelConfig,
    row: str,
    microbatch: MicroBatch,
    *,
    ep: int = 1,
    dtype: torch.dtype = torch.float32,
    recompute: tuple[str, ...] = (),
    split: bool = True,
) -> StageFootprint:
    """Count the memory of a stage.

    Args:
        config: the model's shape.
        row: the block letters of the stage.
        microbatch: the shape of a micro-batch.
        ep: the number of ranks that share the experts.
        dtype: that of parameters and activations.
        recompute: parts that are recomputed before their backward: some of attn, mlp.
        split: weight gradients are ops of their own, as in a Pipeline.

    Returns:
        The StageFootprint.

    Raises:
        ValueError: a row that is no stage of the model, or experts that do not divide.

    Example:
        >>> found = stage_footprint(ModelConfig(num_hidden_layers=2), "Et", MicroBatch(1, 16))
        >>> sorted(found.blocks), found.boundary == 16 * 64 * 4
        (['E', 't'], True)

    """
    short = "".join(letter for letter, _ in groupby(row))
    small, rows, number = _model_around(config, short)
    balanced = partial(BalancedExchange, ep=ep)
    module = build_stages(small, rows, {0: number}, ep=ep, exchange=balanced, device="meta", dtype=dtype)[0]
    boundary = (microbatch.size, microbatch.seq_len, config.hidden_size), dtype
    run = _StageRun(module, number, len(rows), microbatch, boundary, recompute, split=split)
    return run.measure(row, short)


def _model_around(config: ModelConfig, row: str) -> tuple[ModelConfig, tuple[str, ...], int]:
    """Return a model with few layers, its rows, and which of them is `row`."""
    dense, sparse, mtp = (row.count(letter) for letter in "dtm")
    if not dense + sparse:
        dense, sparse = (0, 1) if config.num_experts else (1, 0)
    small = replace(config, num_hidden_layers=dense + sparse, first_k_dense_replace=dense, num_nextn_predict_layers=mtp)
    before, found, behind = small.blocks.partition(row)
    if not found:
        raise ValueError(f"{row!r} is no row of this model's blocks, {config.blocks}")
    rows = tuple(part for part in (before, row, behind) if part)
    return small, rows, rows.index(row)


class _StageRun:
    """A stage on the meta device, and the micro-batches that pass it."""

    def __init__(
        self,
        module: nn.Sequential,
        number: int,
        num_stages: int,
        microbatch: MicroBatch,
        boundary: tuple[tuple[int, ...], torch.dtype],
        recompute: tuple[str, ...],
        *,
        split: bool,
    ) -> None:
        self.module, self.microbatch, self.boundary = module, microbatch, boundary
        self.gradients = Gradients({0: module}, [0], None)  # before linears count the hooks on their parameters
        queue = WeightGradQueue()
        if split:
            weight_grad.apply(weight_grad.examine(module).linears, queue)
        self.stage = LayeredStage(number, module, queue, None, 0)
        self.stage.deferred = tuple(WEIGHT_OF[kind] for kind in _WEIGHTS.values()) if split else ()
        self.stage.recomputed = recompute
        self.stage.loss_fn = loss_fn if number == num_stages - 1 else None
        self.receives, self.sends = number > 0, number < num_stages - 1
        self._batch = [torch.empty(microbatch.size, microbatch.seq_len, dtype=torch.long, device="meta")] * 4
        self.memory = MetaBytes([*module.parameters(), *module.buffers(), *self._batch])
        self.store = self.stage.store = MetaSavedTensors(self.memory)

    def measure(self, row: str, short: str) -> StageFootprint:
        """Run two micro-batches; `short` is the row of the blocks that run."""
        with self.memory, FlashAttention():
            scale = torch.empty((), dtype=torch.float64, device="meta")
            self.stage.begin_step(scale, scale)
            first, ops = self._pass(0), self._pass(1)
        blocks = {}
        layers = [letter for letter in short if letter in LAYERS]
        for letter, module in zip(short, self.module, strict=True):
            at = layers.index(letter) if letter in LAYERS else None
            kinds = {place: place[0] for place in ops if _belongs(place, letter, at)}
            blocks[letter] = BlockFootprint(
                letter=letter,
                parameters=tuple(_shapes(module)),
                parameter_bytes=_bytes_of([*module.parameters(), *module.buffers()]),
                expert_bytes=_bytes_of(_experts_in(module)),
                saved={part: size for (key, part), size in self.store.sizes.items() if key == _key(letter, at, layers)},
                ops={kind: ops[place] for place, kind in kinds.items()},
                first={kind: _with_gradients(first[place], ops[place]) for place, kind in kinds.items()},
            )
        shape, dtype = self.boundary
        return StageFootprint(row, blocks, math.prod(shape) * dtype.itemsize, self.store.kept)

    def _pass(self, mb: int) -> dict[Place, OpBytes]:
        """Run all ops of a micro-batch; return the memory of each."""
        found: dict[Place, OpBytes] = {}
        for place, run in self._calls(mb):
            before = self.memory.begin()
            run()
            found[place] = OpBytes(self.memory.peak - before, self.memory.live - before)
        return found

    def _calls(self, mb: int) -> Iterable[tuple[Place, Callable[[], None]]]:
        """Yield the ops of a micro-batch with what runs each, as the runtime's handlers do."""
        stage, data = self.stage, self.stage.at(mb)

        def part(kind: OpKind, layer: int) -> tuple[Place, Callable[[], None]]:
            return (kind, layer), lambda: stage.run(kind, mb, layer, self.gradients.add)

        tokens, target, positions, documents = self._batch
        data.side = {"positions": positions, "documents": documents if self.microbatch.documents else None}
        data.put_target(target)
        if self.receives:
            yield (OpKind.RECV_F, 0), lambda: data.put_inputs((self._message().requires_grad_(),))
        else:
            data.put_inputs((tokens,))
        for name, layer in stage.chain:
            yield part(_FORWARD[name], layer)
        if self.sends:
            yield (OpKind.SEND_F, 0), lambda: _drop(data.take_outputs())
            yield (OpKind.RECV_B, 0), lambda: data.put_output_grads((self._message(),))
        for name, layer in reversed(stage.chain):
            if name in stage.recomputed:
                yield part(_AGAIN[name], layer)
            if name in _BACKWARD:
                yield part(_BACKWARD[name], layer)
            if name in _WEIGHTS and _BACKWARD[name] in stage.deferred:
                yield part(_WEIGHTS[name], layer)
        if self.receives:
            yield (OpKind.SEND_B, 0), lambda: _drop(data.take_input_grads())

    def _message(self) -> Tensor:
        shape, dtype = self.boundary
        return torch.empty(shape, dtype=dtype, device="meta")


def _belongs(place: Place, letter: str, at: int | None) -> bool:
    """Return whether an op is one of a block: of layer `at`, or of an embedding, MTP block or head."""
    kind, layer = place
    return letter in kind.blocks and layer == (at if letter in LAYERS else 0)


def _key(letter: str, at: int | None, layers: list[str]) -> int:
    """Return the layer under which a stage counts what a block saves."""
    return {"E": EMBEDDING_LAYER, "L": len(layers), "m": len(layers) + 1}.get(letter, at if at is not None else 0)


def _with_gradients(first: OpBytes, later: OpBytes) -> OpBytes:
    return replace(first, gradients=max(0, first.after - later.after))


def _shapes(block: nn.Module) -> Iterator[ParameterShape]:
    experts = set(_experts_in(block))
    for view in views(nn.Sequential(block)):
        if isinstance(view.tensor, nn.Parameter):
            shape = tuple(view.of(view.tensor).shape)
            yield ParameterShape(view.name, shape, view.tensor in experts, view.name in (EMBEDDING_NAME, HEAD_NAME))


def _experts_in(module: nn.Module) -> list[nn.Parameter]:
    return [p for part in module.modules() if isinstance(part, RankOwned) for p in part.parameters()]


def _drop(_: object) -> None:
    """Let go of a message that has left."""


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
