"""Checkpoints: inside what computes they change nothing; around an exchange every rank refuses them by name."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.moe import MoELayer

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, EXPERTS, TOKENS, MB, PP, EP = 8, 12, 4, 6, 4, 2, 2


class Inside(MoELayer):
    """Attention and experts are computed again in backward."""

    def route(self, x: Tensor, *side: Any) -> Any:
        return checkpoint(super().route, x, *side, use_reentrant=False)

    def feed(self, *values: Any) -> Any:
        return checkpoint(super().feed, *values, use_reentrant=False)


class AroundCombine(MoELayer):
    """So are the rows that come back."""

    def combine(self, *args: Any) -> Tensor:
        return cast(Tensor, checkpoint(super().combine, *args, use_reentrant=False))


class Around(nn.Module):
    """A whole layer is, and so nothing names its segments: the stage runs at the grain of cells."""

    def __init__(self, layer: MoELayer, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.layer, x, use_reentrant=self.reentrant))


def make_layer(kind: str, ep_rank: int) -> nn.Module:
    made = {"inside": Inside, "around combine": AroundCombine}.get(kind, MoELayer)
    layer = made(WIDTH, HIDDEN, EXPERTS, ep=EP, ep_rank=ep_rank).double()
    match kind:
        case "around":
            return Around(layer, reentrant=False)
        case "around, reentrant":
            return Around(layer, reentrant=True)
        case "by torch's wrapper":
            return checkpoint_wrapper(layer)
        case "by torch's wrapper, inside":
            layer.mixer = checkpoint_wrapper(layer.mixer)
    return layer


def make(rank: int, kind: str) -> tuple[treadle.Pipeline, Tensor]:
    mesh = init_device_mesh(DEVICE_TYPE, (PP, 1, EP), mesh_dim_names=("pp", "dp", "ep"))
    schedule = treadle.generate("1f1b", pp=PP, microbatches=MB)
    torch.manual_seed(rank // EP)
    layer = make_layer(kind, rank % EP)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), layer) if rank // EP == 0 else nn.Sequential(layer)
    torch.manual_seed(rank % EP)
    x = torch.randn(MB * TOKENS, WIDTH, dtype=torch.float64)
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, deadline_s=PATIENT_S)
    return pipe, x


def gradients(rank: int, kind: str) -> list[Tensor]:
    pipe, x = make(rank, kind)
    pipe.step(x, x)
    pipe.close()
    return [cast(Tensor, p.grad) for stage in pipe.stages.values() for p in stage.module.parameters()]


@pytest.mark.parametrize("kind", ["inside", "by torch's wrapper, inside"])
def test_inside_what_computes_gradients_are_the_same_to_the_last_bit(kind: str) -> None:
    plain, again = check(run_ranks(PP * EP, gradients, "none")), check(run_ranks(PP * EP, gradients, kind))
    for one, two in zip(plain, again, strict=True):
        assert len(one) == len(two) > 0
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def refused(rank: int, kind: str) -> str:
    try:
        pipe, x = make(rank, kind)
        pipe.step(x, x)
    except (ValueError, treadle.RankLostError) as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("around", "an exchange of counts"),
        ("around, reentrant", "an exchange of counts"),
        ("around combine", "an exchange of rows"),
    ],
)
def test_around_an_exchange_it_is_refused_on_every_rank(kind: str, what: str) -> None:
    """Some meet it themselves; the others are told of those, in their words."""
    for said in check(run_ranks(PP * EP, refused, kind)):
        assert f"{what} is recomputed in backward: a checkpoint spans it" in said
        assert "checkpoint only inside what computes, attn and mlp each on their own" in said


def test_torchs_wrapper_around_a_layer_is_refused_before_the_first_step() -> None:
    said = check(run_ranks(PP * EP, refused, "by torch's wrapper"))
    assert all("is a checkpoint around" in each and "must not span an exchange" in each for each in said)
