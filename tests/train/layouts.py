"""A small mixture-of-experts model cut over pp x ep x dp, and the same in one process: for tests of what trains it.

The head shares the embedding's table. Each layer has a parameter that does not train, and one that only odd steps use.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.patience import PATIENT_S
from treadle.models.views import NamedView
from treadle.moe import Experts, MoELayer
from treadle.train.optim import ShardedOptimizer

VOCAB, WIDTH, HIDDEN, EXPERTS, TOKENS, LAYERS, MB = 11, 8, 6, 4, 5, 4, 4


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks."""

    name: str = "1f1b"
    pp: int = 1
    ep: int = 1
    dp: int = 1
    recompute: tuple[str, ...] = ()
    saved: Literal["leave", "offload"] = "leave"

    @property
    def schedule(self) -> treadle.Schedule:
        return treadle.generate(self.name, pp=self.pp, microbatches=MB)

    @property
    def world(self) -> int:
        return self.pp * self.ep * self.dp


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.table(tokens)
        return out


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.rare = nn.Parameter(torch.randn(WIDTH))
        self.is_odd = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.frozen
        return out * self.rare if self.is_odd else out


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def whole_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """All blocks with all experts; the head's weight is the embedding's."""
    torch.manual_seed(5)
    table, scores = Table(), Scores()
    layers = [MoELayer(WIDTH, HIDDEN, EXPERTS, mixer=Mixer()) for _ in range(LAYERS)]
    model = nn.Sequential(table, *layers, scores).to(dtype)
    scores.linear.weight = table.table.weight
    return model


def views_of(blocks: Sequence[nn.Module], first: int) -> Iterator[NamedView]:
    """All tensors of blocks `first`, `first + 1`, ... of the model, by Hugging Face's kind of names."""
    for number, block in enumerate(blocks, first):
        if isinstance(block, Table):
            yield NamedView("model.embed_tokens.weight", block.table.weight)
        elif isinstance(block, Scores):
            yield NamedView("model.norm.weight", block.norm.weight)
            yield NamedView("model.norm.bias", block.norm.bias)
            yield NamedView("lm_head.weight", block.linear.weight)
        else:
            layer, rows = f"model.layers.{number - 1}", slice(0, HIDDEN)
            for name, param in block.named_parameters():
                if not name.startswith("experts"):
                    yield NamedView(f"{layer}.{name}", param)
            experts = block.experts
            assert isinstance(experts, Experts)
            for mine in range(len(experts)):
                expert = f"{layer}.experts.{mine + experts.first}"
                yield NamedView(f"{expert}.gate_proj.weight", experts.up.weight, (mine, rows))
                yield NamedView(f"{expert}.up_proj.weight", experts.up.weight, (mine, slice(HIDDEN, 2 * HIDDEN)))
                yield NamedView(f"{expert}.down_proj.weight", experts.down.weight, (mine,))


@dataclass
class Placed:
    """A rank's part of the model, in a pipeline."""

    pipe: treadle.Pipeline
    stages: dict[int, nn.Sequential]
    views: list[NamedView]
    replica: int

    def set_odd(self, is_odd: bool) -> None:
        for stage in self.stages.values():
            set_odd(stage, is_odd)

    def step(self, step: int) -> None:
        """A step on the rank's share of the batch."""
        self.set_odd(step % 2 == 1)
        tokens, targets = batch(step, self.pipe.position.dp)
        self.pipe.step(list(tokens[self.replica]), list(targets[self.replica]))


def place(rank: int, layout: Layout, dtype: torch.dtype = torch.float64) -> Placed:
    """Make the rank's stages and its pipeline."""
    mesh = init_device_mesh(DEVICE_TYPE, (layout.pp, layout.dp, layout.ep), mesh_dim_names=("pp", "dp", "ep"))
    schedule, (pp_rank, replica) = layout.schedule, divmod(rank, layout.dp * layout.ep)
    placement, blocks = schedule.placement, whole_model(dtype)
    num = placement.num_stages
    stages, views = dict[int, nn.Sequential](), list[NamedView]()
    for chunk, number in enumerate(placement.stages[pp_rank]):
        first = 1 + number * LAYERS // num if number else 0
        last = 1 + (number + 1) * LAYERS // num if number < num - 1 else LAYERS + 2
        own = (own_part(block, layout.ep, replica % layout.ep) for block in list(blocks)[first:last])
        stages[chunk] = nn.Sequential(*own)
        views += views_of(list(stages[chunk]), first)
    tied = {"table": {0: "0.table.weight", -1: f"{LAYERS // num}.linear.weight"}}
    if placement.num_pipes == 1 and any({0, num - 1} <= set(numbers) for numbers in placement.stages):
        tied = {}  # one rank has both, as one object
        for view in share_table(stages) if pp_rank == 0 else ():
            views = [view if each.name == view.name else each for each in views]
    pipe = treadle.Pipeline(
        stages,
        schedule,
        mesh=mesh,
        loss_fn=loss_fn,
        tied=tied,
        deadline_s=PATIENT_S,
        recompute=layout.recompute,
        saved=layout.saved,
    )
    return Placed(pipe, stages, views, replica)


def share_table(stages: dict[int, nn.Sequential]) -> Iterator[NamedView]:
    """Make the head's weight the embedding's; its view."""
    blocks = [block for stage in stages.values() for block in stage]
    (table,) = (block for block in blocks if isinstance(block, Table))
    (scores,) = (block for block in blocks if isinstance(block, Scores))
    scores.linear.weight = table.table.weight
    yield NamedView("lm_head.weight", scores.linear.weight)


def own_part(block: nn.Module, ep: int, ep_rank: int) -> nn.Module:
    """A copy of the block with its own experts."""
    block = copy.deepcopy(block)
    if isinstance(block, MoELayer):
        own, whole = EXPERTS // ep, block.experts
        mine = Experts(WIDTH, HIDDEN, own, first=ep_rank * own).to(whole.up.weight.dtype)
        with torch.no_grad():
            mine.up.weight.copy_(whole.up.weight[mine.first : mine.first + own])
            mine.down.weight.copy_(whole.down.weight[mine.first : mine.first + own])
        block.experts = mine
    return block


def set_odd(module: nn.Module, is_odd: bool) -> None:
    for part in module.modules():
        if isinstance(part, Mixer):
            part.is_odd = is_odd


def batch(step: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Tokens [replica, micro-batch, token]: the same ones, however many replicas share them."""
    generator = torch.Generator("cpu").manual_seed(step)
    tokens = torch.randint(0, VOCAB, (2, 4 * MB * TOKENS), generator=generator, device="cpu")
    tokens = tokens.to(torch.get_default_device())
    x, y = tokens.reshape(2, replicas, MB, -1)
    return x, y


def step_whole(model: nn.Sequential, step: int, replicas: int) -> None:
    """The gradients of the same step in one process."""
    set_odd(model, step % 2 == 1)
    tokens, targets = batch(step, replicas)
    for replica in range(replicas):
        for mb in range(MB):
            share = loss_fn(model(tokens[replica, mb]), targets[replica, mb]) / (MB * replicas)
            torch.autograd.backward(share)


def values(views: Sequence[NamedView]) -> dict[str, Tensor]:
    """Copies of all tensors by name."""
    return {view.name: view.of(view.tensor).detach().clone() for view in views}


def drawn(name: str, shape: Sequence[int], step: int) -> Tensor | None:
    """The gradient of a tensor, none for some in even steps."""
    if name.endswith("rare") and step % 2 == 0:
        return None
    name = "model.embed_tokens.weight" if name == "lm_head.weight" else name
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{step} {name}".encode()))
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def put_gradients(optimizer: ShardedOptimizer, step: int) -> None:
    """Give all that trains a gradient by its name: the same on every layout, to the last bit."""
    for piece in optimizer.pieces():
        shape = piece.view.of(piece.view.tensor).shape
        grad = drawn(piece.view.name, shape, step)
        if grad is not None:
            piece.bucket.filled[piece.slot] = True
            assert piece.gradient is not None
            piece.gradient.copy_(grad.reshape(-1)[piece.run.first : piece.run.last])
