"""The memory of a model's blocks, op by op: a dry run of a rank that holds one block of each kind.

    found = model_footprint(config, (2, 4096), ep=8)
    found.blocks["t"].saved["mlp"]                   bytes that experts save for their backward, in one layer
    found.blocks["L"].ops[OpKind.HEAD_B].peak        bytes that the head's backward takes besides what is there

A model of any size is counted in seconds. Two micro-batches pass the blocks: in the first main gradients get their
memory, the second adds to them.

Two things on the meta device are not as in the run, and are replaced: attention runs by the kernel of the run's device
for packed documents (`AttentionOf`), and rows are balanced over experts (`BalancedExchange`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import nn

from treadle.ir.blocks import LAYERS
from treadle.ir.ops import OpKind
from treadle.models.build_stages import build_stages
from treadle.models.ends import loss_fn
from treadle.models.model_config import ModelConfig
from treadle.models.on_meta import AttentionOf, BalancedExchange, packed
from treadle.models.tensor_names import EMBEDDING as EMBEDDING_NAME
from treadle.models.tensor_names import HEAD as HEAD_NAME
from treadle.models.tensor_names import views
from treadle.runtime.model.exchange import RankOwned
from treadle.runtime.model.layered import EMBEDDING_LAYER
from treadle.runtime.model.meta_bytes import OpBytes
from treadle.runtime.pipeline_options import RunOptions
from treadle.runtime.rank_dryrun import rehearsing
from treadle.schedules import generate, one_f_one_b


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
    """The memory of one block: an embedding, a layer, an MTP block, a head; experts are those of one rank."""

    letter: str
    parameters: tuple[ParameterShape, ...]
    saved: Mapping[str, int]
    """Bytes saved for backward by each part, each storage by the first part that saves it; attn_r and mlp_r when a part
    is recomputed."""

    ops: Mapping[OpKind, OpBytes]
    """Of each op, once main gradients have their memory."""

    @property
    def saved_until_backward(self) -> int:
        """The bytes saved from forward to backward: those that an offload moves."""
        return sum(size for part, size in self.saved.items() if not part.endswith("_r"))


@dataclass(frozen=True)
class ModelFootprint:
    """The memory of a model's blocks by letter, and of what passes from stage to stage of one micro-batch, in bytes."""

    blocks: Mapping[str, BlockFootprint]
    boundary: int


@lru_cache(maxsize=16)
def model_footprint(
    config: ModelConfig,
    microbatch: tuple[int, int],
    *,
    ep: int = 1,
    dtype: torch.dtype = torch.float32,
    recompute: tuple[str, ...] = (),
    device: str = "cpu",
) -> ModelFootprint:
    """Count the memory of a model's blocks.

    Args:
        config: the model's shape.
        microbatch: the sequences of a micro-batch, and the tokens of each.
        ep: the number of ranks that share the experts.
        dtype: that of parameters and activations.
        recompute: parts that are recomputed before their backward: some of attn, mlp.
        device: the type of the run's device, which chooses attention's kernel.

    Returns:
        The ModelFootprint.

    Raises:
        ValueError: experts that do not divide, or a process that is already in a world of ranks.

    Example:
        >>> found = model_footprint(ModelConfig(num_hidden_layers=2), (1, 16))
        >>> sorted(found.blocks), found.boundary == 16 * 64 * 4
        (['E', 'L', 't'], True)

    """
    size, seq_len = microbatch
    row, module = _one_of_each(config, ep, dtype)
    schedule = generate(one_f_one_b.FAMILY.name, pp=1, microbatches=2)
    options = RunOptions(seed=None, lanes="serial", recompute=recompute, saved="count")
    with rehearsing({0: module}, schedule, {"pp": 1, "ep": ep}, 0, loss_fn, options) as (pipe, recorder):
        batch = torch.empty(2 * size, seq_len, dtype=torch.long, device="meta")
        side = {"positions": batch, "documents": [packed(microbatch)] * 2}
        with AttentionOf(torch.device(device)), pipe.no_sync():
            pipe.step(batch, batch, side=side)
    assert recorder.store is not None, "it counts"
    ops = {(op.kind, op.layer, op.mb): counted for op, counted in recorder.ops}
    layers = [letter for letter in row if letter in LAYERS]
    blocks = {}
    for letter, block in zip(row, module, strict=True):
        at = layers.index(letter) if letter in LAYERS else 0
        kinds = [kind for kind, layer, mb in ops if letter in kind.blocks and (layer, mb) == (at, 0)]
        key = 0, 0, {"E": EMBEDDING_LAYER, "L": len(layers), "m": len(layers) + 1}.get(letter, at)
        blocks[letter] = BlockFootprint(
            letter=letter,
            parameters=tuple(_shapes(block)),
            saved={part: num for (saved_by, part), num in recorder.store.sizes.items() if saved_by == key},
            ops={kind: ops[kind, at, 1] for kind in kinds},
        )
    return ModelFootprint(blocks, size * seq_len * config.hidden_size * dtype.itemsize)


def _one_of_each(config: ModelConfig, ep: int, dtype: torch.dtype) -> tuple[str, nn.Sequential]:
    """Return a model with one block of each kind, none of which share parameters, and its letters."""
    dense, sparse, mtp = (int(letter in config.blocks) for letter in "dtm")
    small = replace(config, num_hidden_layers=dense + sparse, first_k_dense_replace=dense, num_nextn_predict_layers=mtp)
    row = small.blocks
    balanced = partial(BalancedExchange, ep=ep)
    blocks = [
        build_stages(small, tuple(row), {0: number}, ep=ep, exchange=balanced, device="meta", dtype=dtype)[0][0]
        for number in range(len(row))
    ]
    return row, nn.Sequential(*blocks)


def _shapes(block: nn.Module) -> Iterator[ParameterShape]:
    experts = {p for part in block.modules() if isinstance(part, RankOwned) for p in part.parameters()}
    for view in views(nn.Sequential(block)):
        if isinstance(view.tensor, nn.Parameter):
            shape = tuple(view.of(view.tensor).shape)
            yield ParameterShape(view.name, shape, view.tensor in experts, view.name in (EMBEDDING_NAME, HEAD_NAME))
