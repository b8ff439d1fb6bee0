"""Side values: every stage reads those of its own micro-batch, and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import treadle
from tests.support.cases import Grads, hold, nearest, own_grads, refusal, replica_of
from tests.support.devices import drawn
from tests.support.oracle import grads_of, make_mesh
from tests.support.ranks import check, run_ranks
from treadle.runtime.model.layered import LayeredStage
from treadle.runtime.model.segments import Segment, compute, reference_forward
from treadle.runtime.model.weight_grad import WeightGradQueue
from treadle.runtime.pipeline_options import RunOptions
from treadle.schedules import SCHEDULES

WIDTH, TOKENS, NUM_MB = 6, 5, 4
KINDS = ("layered", "again", "plain")
"""Layers in segments; the same recomputed and offloaded; plain modules that run whole."""


class Placed(nn.Module):
    """Mixes tokens of one document only, and turns by positions: both are side values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def segments(self) -> Sequence[Segment]:
        return [
            compute("attn", self.attn, reads="x positions documents", writes="h"),
            compute("mlp", self.mlp, reads="h positions", writes="x"),
        ]

    def attn(self, x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        same = (documents[:, :, None] == documents[:, None, :]).to(x.dtype)
        out: Tensor = x + same @ self.inner(x) * positions[..., None]
        return out

    def mlp(self, h: Tensor, positions: Tensor) -> Tensor:
        return h + torch.tanh(self.outer(h)) * (1 + positions[..., None])


class PlacedWhole(Placed):
    """The same as a plain module."""

    segments = None  # type: ignore[assignment]

    def forward(self, x: Tensor, *, documents: Tensor, positions: Tensor) -> Tensor:
        return self.mlp(self.attn(x, positions, documents), positions)


class Table(nn.Embedding):
    """An embedding that adds one of positions."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens) + positions[..., None]


class Scaled(nn.Linear):
    """A head that takes any keyword."""

    def forward(self, x: Tensor, **side: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) / (1 + side["positions"][..., None])


class Next(treadle.runtime.MTPBlock):
    """An MTP block that reads positions."""

    def __init__(self) -> None:
        super().__init__(loss_weight=0.3)
        self.linear = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor, target: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, loss_fn(self.linear(x * (1 + positions[..., None])), target)


def make_stages(num: int, kind: str) -> list[nn.Sequential]:
    torch.manual_seed(3)
    layer = PlacedWhole if kind == "plain" else Placed
    stages = [[layer() for _ in range(2)] for _ in range(num)]
    ends: list[nn.Module] = [*([Next()] if kind != "plain" else []), Scaled(WIDTH, 11)]
    rows = [[Table(11, WIDTH)] if s == 0 else [] for s in range(num)]
    return [nn.Sequential(*rows[s], *stages[s], *(ends if s == num - 1 else [])).double() for s in range(num)]


def make_batch(replica: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(replica)
    tokens = drawn(torch.randint, 0, 11, (2 * NUM_MB, TOKENS + 1), generator=generator)
    documents = drawn(torch.randint, 0, 2, (2 * NUM_MB, TOKENS), generator=generator).cumsum(1)
    positions = drawn(torch.rand, 2 * NUM_MB, TOKENS, generator=generator, dtype=torch.float64)
    return tokens[:, :-1], tokens[:, 1:], {"positions": positions, "documents": documents}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def run_one(layer: nn.Module, x: Any, side: Mapping[str, Tensor]) -> Any:
    if isinstance(layer, PlacedWhole):
        return layer(x, **side)
    if isinstance(layer, Placed):
        return reference_forward(layer, x, **side)["x"]
    return layer(x, positions=side["positions"])


def one_process(num_stages: int, kind: str, dp: int, num_tokens: float) -> tuple[float, Grads]:
    stages, total = make_stages(num_stages, kind), 0.0
    for inputs, targets, side in map(make_batch, range(dp)):
        for mb in range(NUM_MB):
            here = slice(2 * mb, 2 * mb + 2)
            x, own = inputs[here], {name: value[here] for name, value in side.items()}
            loss = torch.zeros((), dtype=torch.float64)
            for layer in (layer for stage in stages for layer in stage):
                if isinstance(layer, Next):
                    loss = loss + layer.loss_weight * layer(x, targets[here], own["positions"])[1]
                else:
                    x = run_one(layer, x, own)
            loss = (loss + loss_fn(x, targets[here])) / num_tokens
            torch.autograd.backward(loss)
            total += loss.item()
    return total, grads_of(dict(enumerate(stages)))


def step_with_side(rank: int, dp: int) -> list[tuple[float, float, Grads]]:
    del rank
    mesh, ran = make_mesh(2, dp), []
    inputs, targets, side = make_batch(replica_of(mesh))
    for name, kind in cases():
        schedule = nearest(name, 2, NUM_MB)
        assert schedule is not None
        stages = make_stages(schedule.placement.num_stages, kind)
        own = {c: stages[s] for c, s in enumerate(schedule.placement.stages[mesh.get_local_rank("pp")])}
        options = RunOptions(recompute=("attn", "mlp"), saved="offload") if kind == "again" else RunOptions()
        pipe = treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=loss_fn, options=options)
        listed = {**side, "documents": list(side["documents"].chunk(NUM_MB))}
        evaluated = float(pipe.evaluate(inputs, targets, side=side, num_tokens=40.0))
        loss = float(pipe.step(inputs, targets, side=listed, num_tokens=40.0))
        ran.append((loss, evaluated, own_grads(schedule, mesh, stages)))
        pipe.close()
    return ran


def cases() -> list[tuple[str, str]]:
    return [(name, kind) for name in SCHEDULES for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_side_values_reach_every_stage(dp: int) -> None:
    ranks = check(run_ranks(2 * dp, step_with_side, dp))
    for place, (name, kind) in enumerate(cases()):
        schedule = nearest(name, 2, NUM_MB)
        assert schedule is not None
        loss, grads = one_process(schedule.placement.num_stages, kind, dp, 40.0)
        hold([(ran[place][0], ran[place][2]) for ran in ranks], (loss, grads), note=(name, kind))
        assert [ran[place][1] for ran in ranks] == pytest.approx([loss] * len(ranks), rel=1e-12), (name, kind)


def mistakes(rank: int) -> list[str]:
    mesh = make_mesh(2)
    inputs, targets, side = make_batch(0)
    schedule = treadle.generate("1f1b", pp=2, microbatches=NUM_MB)
    stages = [stage[:-2] if number == 1 else stage for number, stage in enumerate(make_stages(2, "layered"))]
    pipe = treadle.Pipeline({0: stages[rank]}, schedule, mesh=mesh, loss_fn=lambda y, _: y.sum())
    said = [
        refusal(lambda: pipe.step(inputs, targets, side={"positions": side["positions"]})),
        refusal(lambda: pipe.step(inputs, targets, side={**side, "position": side["positions"]})),
        refusal(lambda: pipe.step(inputs, targets, side={**side, "positions": side["positions"][1:]})),
        refusal(lambda: pipe.step(inputs, targets, side={**side, "positions": side["positions"].requires_grad_()})),
    ]
    pipe.close()
    return said


def test_mistakes_in_side_values_are_named() -> None:
    for missing, unread, cut, graph in check(run_ranks(2, mistakes)):
        assert "segment attn reads 'documents'" in missing
        assert "side={'documents': ...}" in missing
        assert "the side value 'position'" in unread
        assert "documents, positions" in unread
        assert "did you mean 'positions'?" in unread
        assert "side values 'positions' of 4 micro-batches" in cut
        assert "side values require a gradient" in graph


def test_a_side_value_that_another_layer_writes_is_refused() -> None:
    class Other(Placed):
        def segments(self) -> Sequence[Segment]:
            return [
                compute("attn", torch.tanh, reads="x", writes="documents"),
                compute("mlp", torch.tanh, reads="documents", writes="x"),
            ]

    with pytest.raises(ValueError, match="reads the side value 'documents', and another layer's attn writes"):
        LayeredStage(1, nn.Sequential(Placed(), Other()), WeightGradQueue(), None, 0)
