"""Segments that are computed again, in one process: the same gradients, counted once, kept and offloaded as inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.ir.ops import OpKind
from treadle.moe import MoELayer
from treadle.runtime.model import weight_grad
from treadle.runtime.model.gradient_bucket import OuterProduct
from treadle.runtime.model.layered import LayeredStage
from treadle.runtime.model.saved import FilePool, SavedTensors
from treadle.runtime.model.seeding import RandomState, Seeds
from treadle.runtime.model.segments import Segment, compute, rebuilt
from treadle.runtime.model.weight_grad import WeightGradQueue

WIDTH, TOKENS, MB = 8, 6, 2
BOTH = ("attn", "mlp")
AGAIN = {"attn": OpKind.ATTN_R, "mlp": OpKind.MLP_R}
DEFERRED = (OpKind.ATTN_B, OpKind.MLP_B, OpKind.HEAD_B)


def add(param: Tensor, grad: Tensor | OuterProduct) -> None:
    grad = grad.made() if isinstance(grad, OuterProduct) else grad
    param.grad = grad.to(param.dtype) if param.grad is None else param.grad + grad


def moe() -> nn.Module:
    torch.manual_seed(2)
    mixer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4))
    return MoELayer(WIDTH, 12, 4, balance=0.1, mixer=mixer).double()


class Normed(nn.Module):
    """A dense layer with buffers: running statistics, a counter that is written in place and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_calls: Tensor
        self.last: Tensor
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(WIDTH))

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.attn, reads="x", writes="h"),
            compute("mlp", lambda h: h + torch.relu(self.up(h)), reads="h", writes="x"),
        ]

    def attn(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = x.detach().mean(0)
        out: Tensor = x + self.mix(self.norm(x))
        return out


class Steps:
    """A stage of one layer with a loss, and its ops for a step."""

    def __init__(self, layer: nn.Module, again: tuple[str, ...], *, seeded: bool, pool: Path | None = None) -> None:
        module, queue = nn.Sequential(layer), WeightGradQueue()
        weight_grad.apply(weight_grad.examine(module).linears, queue)
        device = torch.device("cpu")
        seeds = Seeds(device, 0, 1) if seeded else None
        stage = LayeredStage(0, module, queue, seeds, 0)
        stage.loss_fn = nn.functional.mse_loss
        stage.recomputed, stage.deferred = again, DEFERRED
        stage.store = SavedTensors([module], FilePool(pool) if pool is not None else None)
        if seeds is not None:
            seeds.begin_step(7)
        self.stage, self.again, self.offloads = stage, again, pool is not None

    def run(self, between: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Forwards of all micro-batches, then their backwards; returns the gradients."""
        stage, store = self.stage, self.stage.store
        assert store is not None
        torch.manual_seed(11)
        batch = torch.randn(MB, TOKENS, WIDTH, dtype=torch.float64)
        stage.begin_step(*2 * [torch.tensor(0.5, dtype=torch.float64)])
        store.begin([batch])
        names = list(stage.plans[0].segments)
        forward = {"attn": OpKind.ATTN_F, "mlp": OpKind.MLP_F, "dispatch": OpKind.DISPATCH_F}
        forward |= {"counts": OpKind.COUNTS, "host": OpKind.HOST, "combine": OpKind.COMBINE_F}
        backward = {"attn": OpKind.ATTN_B, "mlp": OpKind.MLP_B}
        backward |= {"dispatch": OpKind.DISPATCH_B, "combine": OpKind.COMBINE_B}
        for mb in range(MB):
            stage.at(mb).put_inputs((batch[mb],))
            stage.at(mb).put_target(batch[mb])
            for name in names:
                stage.run(forward[name], mb, 0, add)
            if self.offloads:
                stage.run(OpKind.OFFLOAD, mb, 0, add)
            stage.run(OpKind.HEAD_F, mb, 0, add)
        between()
        for mb in range(MB):
            stage.run(OpKind.HEAD_B, mb, 0, add)
            if self.offloads:
                stage.run(OpKind.ONLOAD, mb, 0, add)
            if "attn" in self.again:  # long before its backward
                stage.run(OpKind.ATTN_R, mb, 0, add)
            for name in reversed(names):
                if name == "mlp" and name in self.again:
                    stage.run(OpKind.MLP_R, mb, 0, add)
                if name in backward:
                    stage.run(backward[name], mb, 0, add)
            for kind in (OpKind.ATTN_W, OpKind.MLP_W, OpKind.HEAD_W):
                stage.run(kind, mb, 0, add)
        assert not stage._passing
        assert store.live.live_bytes == 0
        return [param.grad for param in stage.module.parameters() if param.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("again", [("attn",), ("mlp",), BOTH])
@pytest.mark.parametrize("offloads", [False, True])
def test_gradients_and_losses_are_the_same_to_the_last_bit(
    again: tuple[str, ...], seeded: bool, offloads: bool, tmp_path: Path
) -> None:
    plain, recomputed = (
        Steps(moe(), (), seeded=seeded),
        Steps(moe(), again, seeded=seeded, pool=tmp_path if offloads else None),
    )
    wanted, got = plain.run(), recomputed.run()
    state = torch.get_rng_state()
    assert same(wanted, got)
    for mb in range(MB):  # main and balance, each once
        losses = [steps.stage.at(mb).losses for steps in (plain, recomputed)]
        assert len(losses[0]) == 2
        assert losses[0] == losses[1]
    plain.run()
    assert torch.equal(torch.get_rng_state(), state)  # as many numbers were drawn


def test_only_inputs_are_kept_until_the_segment_runs_again(tmp_path: Path) -> None:
    held: list[int] = []
    plain, again = Steps(Normed().double(), (), seeded=True), Steps(Normed().double(), BOTH, seeded=True)
    for steps in (plain, again):
        store = steps.stage.store
        assert store is not None
        steps.run(lambda store=store: held.append(store.live.live_bytes))  # type: ignore[misc]
    one = TOKENS * WIDTH * 8
    heads = MB * 2 * one  # what mse_loss saves, of which the layer's output is one
    assert held[1] <= heads + MB * one  # x is the batch; h of each micro-batch is kept
    assert held[1] < held[0]
    report = again.stage.store.report()  # type: ignore[union-attr]
    assert report.parts["attn_r"] > 0
    assert "attn" not in report.parts
    assert report.parts["mlp"] == one
    assert report.by_kind[OpKind.MLP_R] == report.parts["mlp_r"] > 0


@pytest.mark.parametrize("again", [(), BOTH])
def test_buffers_are_written_once(again: tuple[str, ...]) -> None:
    torch.manual_seed(4)
    layer = Normed().double()
    grads = Steps(layer, again, seeded=True).run()
    torch.manual_seed(4)
    wanted = Normed().double()
    torch.manual_seed(11)
    batch = torch.randn(MB, TOKENS, WIDTH, dtype=torch.float64)
    for x in batch:
        wanted.attn(x)
    assert int(layer.num_calls) == MB
    for name, buffer in wanted.named_buffers():
        assert torch.equal(buffer, layer.get_buffer(name)), name
    torch.manual_seed(4)
    assert same(grads, Steps(Normed().double(), (), seeded=True).run())


@pytest.mark.parametrize("stored", [True, False])
def test_an_input_that_was_changed_in_place_is_refused(stored: bool) -> None:
    class Greedy(Normed):
        def attn(self, x: Tensor) -> Tensor:
            x.add_(1)
            return super().attn(x)

    steps = Steps(Greedy().double(), ("attn",), seeded=True)
    if not stored:
        steps.stage.store = None
    stage = steps.stage
    stage.begin_step(*2 * [torch.ones((), dtype=torch.float64)])
    stage.at(0).put_inputs((torch.randn(TOKENS, WIDTH, dtype=torch.float64) * 1,))
    stage.run(OpKind.ATTN_F, 0, 0, add)
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved \(shape \(6, 8\)"):
        stage.run(OpKind.ATTN_R, 0, 0, add)


def test_a_segment_that_takes_gradients_itself_is_refused_by_name() -> None:
    class Curved(Normed):
        def attn(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.mix(x)).square().sum(), x)
            return slope

    stage = Steps(Curved().double(), ("attn",), seeded=True).stage
    stage.begin_step(*2 * [torch.ones((), dtype=torch.float64)])
    stage.at(0).put_inputs((torch.randn(TOKENS, WIDTH, dtype=torch.float64),))
    with pytest.raises(ValueError, match=r"segment attn takes gradients within its forward.*leave attn out"):
        stage.run(OpKind.ATTN_F, 0, 0, add)


def test_under_autocast_the_second_forward_has_the_precision_of_the_first() -> None:
    def run(again: tuple[str, ...]) -> list[Tensor]:
        torch.manual_seed(4)
        steps = Steps(Normed(), again, seeded=True)
        stage, x = steps.stage, torch.randn(TOKENS, WIDTH)
        with torch.autocast("cpu", torch.bfloat16):
            stage.begin_step(*2 * [torch.ones((), dtype=torch.float64)])
        stage.at(0).put_inputs((x,))
        stage.at(0).put_target(x)
        kinds = [OpKind.ATTN_F, OpKind.MLP_F, OpKind.HEAD_F, OpKind.HEAD_B, *(AGAIN[name] for name in again)]
        for kind in (*kinds, OpKind.MLP_B, OpKind.ATTN_B, OpKind.MLP_W, OpKind.ATTN_W):
            stage.run(kind, 0, 0, add)
        return [param.grad for param in stage.module.parameters() if param.grad is not None]

    assert same(run(()), run(BOTH))


def test_generators_draw_the_same_again_and_go_on_where_they_were() -> None:
    torch.manual_seed(3)
    state = RandomState(torch.device("cpu"))
    first = torch.rand(4)
    after = torch.get_rng_state()
    with state.again():
        assert torch.equal(torch.rand(4), first)
        torch.rand(9)
    assert torch.equal(torch.get_rng_state(), after)


def test_tensors_within_things_are_packed_and_come_back() -> None:
    layer: Any = moe()
    *_, routing, _ = layer.route(torch.randn(TOKENS, WIDTH, dtype=torch.float64))
    packed = rebuilt((routing, 3), Tensor, lambda tensor: ("packed", tensor))
    assert packed[0].order[0] == "packed"
    assert packed[1] == 3
    assert isinstance(routing.order, Tensor)
    assert rebuilt(routing, Path, str) is routing
