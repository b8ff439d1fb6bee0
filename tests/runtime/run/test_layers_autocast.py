"""Autocast around a step at the grain of layers: also in lanes that have a thread of their own, and not in backward."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.experts import named_grads, take_own
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.moe import MoELayer
from treadle.runtime.model.segments import Segment, compute

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, EXPERTS, TOKENS, MB, PP, EP = 8, 12, 4, 6, 8, 2, 2


def ep_mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE_TYPE, (PP, 1, EP), mesh_dim_names=("pp", "dp", "ep"))


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return float((got - want).abs().max()) <= tolerance * max(float(want.abs().max()), 1e-9)


def cast_stages(ep: int, ep_rank: int) -> list[nn.Sequential]:
    """Two stages in float32, something before and behind the layers; in each a linear that autocast leaves alone."""
    torch.manual_seed(2)
    layers = [MoELayer(WIDTH, HIDDEN, EXPERTS, mixer=Precise()) for _ in range(PP)]
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), layers[0]), nn.Sequential(layers[1], nn.Linear(WIDTH, WIDTH))]
    for at, whole in enumerate(layers if ep > 1 else ()):
        layer = MoELayer(WIDTH, HIDDEN, EXPERTS, ep=ep, ep_rank=ep_rank, mixer=whole.mixer)
        layer.norm, layer.expert_norm, layer.router = whole.norm, whole.expert_norm, whole.router
        take_own(layer.experts, whole.experts)
        stages[at][1 - at] = layer
    return stages


class Precise(nn.Module):
    """A linear in float32, whatever the caller's autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.linear(x.float())
        return out


class Noting(nn.Module):
    """Notes the precision of what a linear behind the layers makes, and the thread's autocast there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return x


def cast_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


def cast_rows(ep_rank: int) -> Tensor:
    torch.manual_seed(60 + ep_rank)
    return torch.randn(MB * TOKENS, WIDTH)


def cast_rank(rank: int, on: bool) -> tuple[dict[str, Tensor], list[tuple[torch.dtype, bool]]]:
    ep_rank, pp_rank = rank % EP, rank // EP
    stage, note = cast_stages(EP, ep_rank)[pp_rank], Noting()
    if pp_rank == PP - 1:
        stage.append(note)
    schedule = treadle.generate("zb-h1", pp=PP, microbatches=MB)
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=ep_mesh(), loss_fn=cast_loss, deadline_s=PATIENT_S)
    x = cast_rows(ep_rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        pipe.step(x, x)
    pipe.close()
    grads = {}
    for name, grad in named_grads(stage):
        pieces = name.split(".")
        if "experts" in pieces:
            pieces[3] = str(int(pieces[3]) + ep_rank * (EXPERTS // EP))
        grads[".".join(pieces)] = cast(Tensor, grad)
    return grads, note.seen


@pytest.mark.parametrize(("on", "tolerance"), [(True, 0.02), (False, 1e-5)])
def test_autocast_around_a_step(on: bool, tolerance: float) -> None:
    """Also in lanes that have a thread of their own, and not in backward."""
    results = check(run_ranks(PP * EP, cast_rank, on))
    model = cast_stages(1, 0)
    for x in map(cast_rows, range(EP)):
        for part in x.chunk(MB):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                loss = cast_loss(nn.Sequential(*model)(part), part)
            torch.autograd.backward(loss / (MB * EP))
    for rank, (grads, seen) in enumerate(results):
        for name, grad in grads.items():
            want = dict(named_grads(model[rank // EP]))[name]
            assert want is not None
            assert grad.dtype is torch.float32
            assert close(grad, want, tolerance), (rank, name)
        if rank // EP == PP - 1:
            assert set(seen) == {(torch.bfloat16 if on else torch.float32, on)}


class Island(nn.Module):
    """A layer in autocast's precision, but for the first of its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = Precise(), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", lambda x: x + self.mix(x), reads="x", writes="h"),
            compute("mlp", self.mlp, reads="h", writes="x"),
        ]

    def mlp(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.down(torch.relu(self.up(h)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.mix(x))


def island_stages() -> list[nn.Sequential]:
    torch.manual_seed(4)
    return [nn.Sequential(Island(), Island()) for _ in range(PP)]


def island_rank(rank: int) -> list[Tensor]:
    stage, x = island_stages()[rank], cast_rows(0)
    mesh = init_device_mesh(DEVICE_TYPE, (PP,), mesh_dim_names=("pp",))
    pipe = treadle.Pipeline(
        {0: stage},
        treadle.generate("zb-h1", pp=PP, microbatches=MB),
        mesh=mesh,
        loss_fn=cast_loss,
        deadline_s=PATIENT_S,
    )
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, x)
    pipe.close()
    return [cast(Tensor, p.grad) for p in stage.parameters()]


def test_weight_halves_have_the_precision_of_their_forward() -> None:
    """Where all is computed in the same pieces as in one process, gradients are the same but for their sums' order."""
    results, model, x = check(run_ranks(PP, island_rank)), island_stages(), cast_rows(0)
    for part in x.chunk(MB):
        with torch.autocast("cpu", torch.bfloat16):
            loss = cast_loss(nn.Sequential(*model)(part), part)
        torch.autograd.backward(loss / MB)
    for stage, grads in zip(model, results, strict=True):
        for grad, (name, param) in zip(grads, stage.named_parameters(), strict=True):
            assert param.grad is not None
            assert close(grad, param.grad, 1e-6), name
