"""What the fuzzer runs: configurations, their models, and the same step in one process.

A configuration has one model and a few batches, always the same ones: what differs from draw to draw is time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import treadle
from tests.support.experts import named_parts, of_part
from tests.support.oracle import SIZES, VOCAB, Block, Embed
from treadle.moe import MoELayer
from treadle.runtime.model.seeding import generator_of, layer_seed, seed_layer, step_seed
from treadle.runtime.model.segments import COMPUTE, Segment, compute, reference_forward
from treadle.schedules import SCHEDULES

KINDS = ("cells", "layers", "tied", "offload", "dp", "sharded")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MOST_DIFFERENCE = {"float32": 2e-5, "bfloat16": 6e-2, "float64": 1e-10}
"""Of a gradient from one process's, relative to its size."""

WIDTH, HIDDEN, EXPERTS, SAMPLES, TOKENS = 8, 8, 2, 2, 3
LENGTHS = (4, 2, 6, 3, 5)
"""Two tokens at least: an MTP block predicts one less than there are, and its loss is a mean."""
SEED = 3
HOST = torch.device("cpu")
BATCHES = 2
CLASSES = (4096, 32000)

Grads = dict[str, Tensor | None]
Sizes = dict[str, float]
"""Of each gradient: its largest elements, summed over micro-batches, as their sum may be near zero. A tenth of the
largest at least: the gradient of a router that takes one expert is all rounding errors."""


@dataclass(frozen=True)
class Config:
    """A pipeline. `kind` is cells, or layers with a head, tied to the embedding, offloaded, or of two replicas.

    Those of kind sharded update by a sharded optimizer after each step, and gather parameters in the next.
    """

    schedule: str
    kind: str
    dtype: str
    num_mb: int
    num_classes: int
    num_layers: int
    dropout: bool
    aux: str
    """Auxiliary losses: none, own (in the model's precision) or bf16."""
    layered: bool
    ep: int
    unequal: bool = False
    """Each micro-batch has a length of its own, other ones in each batch."""
    recompute: str = ""
    """Segments that are computed again, `attn+mlp`."""
    mtp: bool = False
    """There is an MTP block before the head, which shares the head's weight."""
    dense: bool = False
    """The first layer is dense."""
    tied: bool = False
    """The head's weight is the embedding's, whatever the kind."""
    pp: int = 2

    @property
    def ties(self) -> dict[str, dict[int, str]]:
        """The parameter that the first and the last stage share, if they do."""
        if not self.shares:
            return {}
        return {"embedding": {0: "0.weight", -1: f"{self.num_layers + self.mtp}.linear.weight"}}

    @property
    def shares(self) -> bool:
        """True if embedding and head are one parameter."""
        return self.tied or self.kind == "tied"

    @property
    def dp(self) -> int:
        """Replicas, besides those of an expert group."""
        return 2 if self.kind in ("dp", "sharded") else 1

    @property
    def world(self) -> int:
        """Ranks."""
        return self.pp * self.dp * self.ep

    @cached_property
    def made(self) -> treadle.Schedule:
        """Its schedule."""
        return treadle.generate(self.schedule, pp=self.pp, microbatches=self.num_mb)

    def mesh(self, device_type: str) -> DeviceMesh:
        """Of all ranks."""
        return init_device_mesh(device_type, (self.pp, self.dp, self.ep), mesh_dim_names=("pp", "dp", "ep"))

    def __str__(self) -> str:
        grain = "layers" if self.layered else "cells"
        drops = (", dropout" if self.dropout else "") + (", unequal" if self.unequal else "")
        return (
            f"{self.schedule} {self.kind} {self.dtype}: pp={self.pp} dp={self.dp} ep={self.ep} M={self.num_mb} "
            f"grain={grain} layers={self.num_layers} classes={self.num_classes} aux={self.aux}{drops}"
            f"{f' again={self.recompute}' if self.recompute else ''}{' mtp' * self.mtp}{' dense' * self.dense}"
        )


def combinations(only: dict[str, list[str]], seed: int = 0) -> list[tuple[str, str, str]]:
    """All (schedule, kind, dtype) that `only` leaves, in an order drawn from a seed.

    Each lap over the schedules has every schedule once, with the kinds and the dtypes in turn.
    """
    schedules, kinds, dtypes = (
        [value for value in values if value in only.get(name, values)]
        for name, values in (("schedule", list(SCHEDULES)), ("kind", list(KINDS)), ("dtype", list(DTYPES)))
    )
    rng = Random(seed)
    for values in (schedules, kinds, dtypes):
        rng.shuffle(values)
    return [
        (schedule, kinds[(at + lap) % len(kinds)], dtypes[(at + lap // len(kinds)) % len(dtypes)])
        for lap in range(len(kinds) * len(dtypes))
        for at, schedule in enumerate(schedules)
    ]


def draw_config(schedule: str, kind: str, dtype: str, only: dict[str, list[str]], rng: Random) -> Config:
    """The rest of a configuration: sizes that the schedule accepts."""

    def pick(name: str, *allowed: Any) -> Any:
        wanted = [value for value in allowed if str(value) in only.get(name, [str(value)])]
        if not wanted:
            raise ValueError(f"--only {name}={'|'.join(only[name])} leaves nothing of {', '.join(map(str, allowed))}")
        return rng.choice(wanted)

    layered = kind in ("layers", "tied", "offload") or (kind in ("dp", "sharded") and pick("layered", True, False))
    return Config(
        schedule=schedule,
        kind=kind,
        dtype=dtype,
        num_mb=pick("num_mb", 6, 10) if schedule.startswith(("inter", "dualpipe")) else pick("num_mb", 5, 6, 7),
        num_classes=pick("num_classes", *CLASSES),
        num_layers=pick("num_layers", 1, 2, 2),
        dropout=pick("dropout", True, False, False),
        aux=pick("aux", "none", "own", "bf16"),
        layered=layered,
        ep=pick("ep", 1, 1, 2) if kind in ("layers", "offload") and dtype != "bfloat16" else 1,
        unequal=pick("unequal", True, False, False, False),
        recompute=pick("recompute", "", "", "attn", "mlp", "attn+mlp") if layered else "",
        mtp=pick("mtp", True, False) if layered else False,
        dense=pick("dense", True, False) if layered else False,
    )


# -- models ------------------------------------------------------------------------------------------------------------


class Layer(MoELayer):
    """An MoE layer with dropout in its mixer, and its loss in the precision wanted."""

    def __init__(self, config: Config, ep: int, ep_rank: int) -> None:
        mixer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2 if config.dropout else 0.0))
        balance = 0.0 if config.aux == "none" else 0.1
        super().__init__(WIDTH, HIDDEN, EXPERTS, top_k=1, ep=ep, ep_rank=ep_rank, balance=balance, mixer=mixer)
        self.aux = config.aux

    def route(self, x: Tensor, *side: Any) -> Any:
        made = super().route(x, *side)
        return (*made[:-1], made[-1].bfloat16()) if self.aux == "bf16" else made


class DenseLayer(nn.Module):
    """A layer without an exchange, with dropout where the others have it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm, self.mix, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.down, self.dropout = nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.2 if config.dropout else 0.0)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", lambda x: x + self.dropout(self.mix(self.norm(x))), reads="x", writes="h"),
            compute("mlp", lambda h: h + self.down(torch.tanh(self.up(h))), reads="h", writes="x"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = reference_forward(self, x)["x"]
        return out


class NextToken(treadle.runtime.MTPBlock):
    """Predicts the token behind the next from x and the next, by the head's own linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(loss_weight=0.3)
        self.table, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self._shared = (linear,)  # which is the head's to hold

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.mix(torch.cat([x, self.table(target % VOCAB)], -1)))
        return hidden, loss_fn(self._shared[0](hidden[:, :-1]), target[:, 1:])


class WithLoss(nn.Module):
    """The end of a stage that has a loss of its own."""

    def __init__(self, aux: str) -> None:
        super().__init__()
        self.aux = aux

    def forward(self, x: Tensor) -> treadle.StageOutput:
        loss = 0.1 * x.square().mean()
        return treadle.StageOutput(x, loss.bfloat16() if self.aux == "bf16" else loss)


class Head(nn.Module):
    """The last module: one linear, whose weight may be the embedding's, behind dropout."""

    def __init__(self, size: int, config: Config) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(0.2 if config.dropout else 0.0)
        self.linear = nn.Linear(size, config.num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.dropout(self.norm(x)))
        return out


def make_model(config: Config, ep: int = 1, ep_rank: int = 0) -> list[nn.Sequential]:
    """All stages; with `ep` only this rank's experts, which have other values then."""
    torch.manual_seed(SEED)
    num_stages = config.made.placement.num_stages
    stages: list[list[nn.Module]] = [[] for _ in range(num_stages)]
    if config.layered:
        for stage in stages:
            stage += [Layer(config, ep, ep_rank) for _ in range(config.num_layers)]
        if config.dense:
            stages[0][0] = DenseLayer(config)
        embedding = nn.Embedding(config.num_classes if config.shares else VOCAB, WIDTH)
        head = Head(WIDTH, config)
        stages[0].insert(0, embedding)
        stages[-1].append(head)
        if config.shares:
            head.linear.weight = embedding.weight
        if config.mtp:
            stages[-1].insert(-1, NextToken(head.linear))
    else:
        sizes = [SIZES[i % len(SIZES)] for i in range(num_stages)]
        stages[0].append(Embed(sizes[0]))
        for stage, (size, to) in zip(stages[1:], pairwise(sizes), strict=True):
            stage.append(Block(size, to))
        for stage in stages:
            stage += [nn.Dropout(0.2)] if config.dropout else []
        stages[-1].append(Head(sizes[-1], config))
        for stage in stages:
            stage += [WithLoss(config.aux)] if config.aux != "none" else []
    return [nn.Sequential(*stage).to(DTYPES[config.dtype]) for stage in stages]


def own_part(config: Config, ep_rank: int) -> list[nn.Sequential]:
    """All stages as a rank of an expert group has them."""
    whole = make_model(config)
    if config.ep == 1:
        return whole
    parts = make_model(config, config.ep, ep_rank)
    for part, stage in zip(parts, whole, strict=True):
        state = stage.state_dict()
        part.load_state_dict({name: state[whole_name(name, config, ep_rank)] for name in part.state_dict()})
    return parts


def whole_name(name: str, config: Config, ep_rank: int) -> str:
    """What a rank's parameter is called in the whole model, where experts have other numbers."""
    pieces = name.split(".")
    if "experts" in pieces:
        at = pieces.index("experts") + 2
        pieces[at] = str(int(pieces[at]) + ep_rank * (EXPERTS // config.ep))
    return ".".join(pieces)


def make_batch(
    config: Config, number: int, replica: int, device: torch.device = HOST
) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and classes, by micro-batch."""
    generator = torch.Generator("cpu").manual_seed(1000 * number + replica)
    shape = (config.num_mb, SAMPLES, max(LENGTHS) if config.unequal else TOKENS)
    tokens = list(torch.randint(0, VOCAB, shape, generator=generator, device="cpu").to(device))
    classes = list(torch.randint(0, config.num_classes, shape, generator=generator, device="cpu").to(device))
    if config.unequal:
        for mb in range(config.num_mb):
            length = LENGTHS[(mb + 2 * replica + 3 * number) % len(LENGTHS)]
            tokens[mb], classes[mb] = tokens[mb][:, :length], classes[mb][:, :length]
    return tokens, classes


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """In float32 at least, as models in bf16 have it."""
    wide = output.float() if output.dtype is torch.bfloat16 else output
    return functional.cross_entropy(wide.flatten(0, 1), target.flatten())


# -- one process -------------------------------------------------------------------------------------------------------


def run_whole(
    config: Config, model: list[nn.Sequential], number: int, step: int, device: torch.device = HOST
) -> tuple[float, Grads, Sizes]:
    """The loss, the gradients and their sizes, over all micro-batches of all replicas; bf16 is summed in float32."""
    names = {f"{at}.{name}": (p, part) for at, stage in enumerate(model) for name, p, part in named_parts(stage)}
    replicas = config.dp * config.ep
    sizes: dict[nn.Parameter, float] = defaultdict(float)
    sums: dict[nn.Parameter, Tensor] = {}  # a tied parameter has several names
    total = 0.0
    for replica in range(replicas):
        for mb, (x, target) in enumerate(zip(*make_batch(config, number, replica, device), strict=True)):
            loss = _forward(config, model, x, target, step, replica * config.num_mb + mb)
            torch.autograd.backward(loss / (config.num_mb * replicas))
            total += float(loss.detach().double()) / (config.num_mb * replicas)
            for param in dict.fromkeys(param for param, _ in names.values()):
                if param.grad is not None:
                    grad = param.grad.float() if param.dtype is torch.bfloat16 else param.grad
                    sums[param] = sums[param] + grad if param in sums else grad
                    sizes[param] += float(grad.abs().max())
                    param.grad = None
    grads = {name: of_part(sums.get(param), part) for name, (param, part) in names.items()}
    least = max(sizes.values()) / 10
    return total, grads, {name: max(sizes[param], least) for name, (param, _) in names.items()}


def _forward(config: Config, model: list[nn.Sequential], x: Any, target: Tensor, step: int, mb: int) -> Tensor:
    own: list[Tensor] = []
    children = [child for stage in model for child in stage]
    layers = (Layer, DenseLayer)
    numbered = [child for child in children if isinstance(child, layers)] if config.layered else children
    at = -1
    for child in children:
        if not config.layered or isinstance(child, layers):
            at += 1
            seed_layer(target.device, SEED, step, mb, at, len(numbered))
        elif isinstance(child, Head):  # draws as a part of the last layer, behind those that compute
            seed = layer_seed(step_seed(SEED, step), mb, at, len(numbered)) + (len(COMPUTE) + 1 << 48)
            generator_of(target.device).manual_seed(seed & (1 << 63) - 1)
        if isinstance(child, Layer):
            x, loss = child.with_loss(x)
            own.append(loss)
        elif isinstance(child, NextToken):
            own.append(child.loss_weight * child(x, target)[1])
        else:
            x = child(x)
        if isinstance(x, treadle.StageOutput):
            assert x.aux_loss is not None
            own.append(x.aux_loss)
            x = x.output
    return sum(own, start=loss_fn(x, target))
