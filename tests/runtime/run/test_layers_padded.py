"""Layers without counts at the grain of layers: padded dispatches, exchanges that count by themselves, shapes."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import treadle
from tests.support import deepep_contract
from tests.support.devices import DEVICE_TYPE
from tests.support.experts import named_grads, take_own
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.moe import Exchange, Experts, MoELayer
from treadle.runtime.model.segments import Segment, compute, exchange

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, EXPERTS, TOKENS, MB, PP, EP = 8, 12, 4, 6, 8, 2, 2


def ep_mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE_TYPE, (PP, 1, EP), mesh_dim_names=("pp", "dp", "ep"))


def kinds(pipe: treadle.Pipeline) -> set[str]:
    return {pipe.program.op(index).kind.name for index in range(pipe.program.num_ops)}


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return float((got - want).abs().max()) <= tolerance * max(float(want.abs().max()), 1e-9)


CAPACITY = 2
"""Of each expert, for the tokens of one rank: with six tokens and four experts, some find no place."""


class Padded(nn.Module):
    """Each token to its best expert, while there is room: everyone sends everyone the same, and nothing is counted."""

    def __init__(self, ep: int = 1, ep_rank: int = 0) -> None:
        super().__init__()
        self.ep, self.own = ep, EXPERTS // ep
        self.mix, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(WIDTH, HIDDEN, self.own, first=ep_rank * self.own)
        self.exchange = Exchange()

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.attn, reads="x", writes="h slots gates token"),
            exchange("dispatch", self.swap, reads="slots", writes="rows"),
            compute("mlp", self.mlp, reads="rows", writes="made"),
            exchange("combine", self.combine, reads="made h gates token", writes="x"),
        ]

    def attn(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = x + self.mix(x)
        gates, chosen = self.score(h).softmax(-1).max(-1)
        token = torch.full((EXPERTS * CAPACITY,), len(h))  # of each slot; behind the last token is a row of zeros
        for expert in range(EXPERTS):
            first = torch.nonzero(chosen == expert).flatten()[:CAPACITY]
            token[expert * CAPACITY :][: len(first)] = first
        return h, torch.cat([h, h.new_zeros(1, WIDTH)])[token], gates, token

    def swap(self, slots: Tensor) -> Tensor:
        each = [self.own * CAPACITY] * self.ep
        return self.exchange.swap(slots, each, each)

    def mlp(self, rows: Tensor) -> Tensor:
        made: Tensor = self.experts(rows, [[CAPACITY] * self.own] * self.ep)
        return made

    def combine(self, made: Tensor, h: Tensor, gates: Tensor, token: Tensor) -> Tensor:
        weighted = self.swap(made) * torch.cat([gates, gates.new_zeros(1)])[token].unsqueeze(-1)
        return torch.cat([h, h.new_zeros(1, WIDTH)]).index_add(0, token, weighted)[:-1]

    def forward(self, x: Tensor) -> Tensor:
        h, slots, gates, token = self.attn(x)
        return self.combine(self.mlp(self.swap(slots)), h, gates, token)


def padded_stages(num: int, ep: int, ep_rank: int) -> list[nn.Sequential]:
    """All stages of the model, with all experts or a rank's own."""
    stages = []
    for stage in range(num):
        torch.manual_seed(stage)
        layers = [Padded() for _ in range(2)]
        for at, layer in enumerate(layers if ep > 1 else ()):
            mine = Padded(ep, ep_rank)
            mine.mix, mine.score = layer.mix, layer.score
            take_own(mine.experts, layer.experts)
            layers[at] = mine
        stages.append(nn.Sequential(*layers).double())
    return stages


def padded_rank(rank: int, name: str) -> tuple[dict[tuple[int, str], Tensor], set[str], int]:
    schedule, ep_rank = treadle.generate(name, pp=PP, microbatches=MB), rank % EP
    model = padded_stages(schedule.placement.num_stages, EP, ep_rank)
    placed = dict(enumerate(schedule.placement.stages[rank // EP]))
    stages: dict[int, nn.Module] = {chunk: model[stage] for chunk, stage in placed.items()}
    loss_fn = functional.mse_loss
    pipe = treadle.Pipeline(stages, schedule, mesh=ep_mesh(), loss_fn=loss_fn, deadline_s=PATIENT_S)
    x = rows_of(ep_rank)
    pipe.step(x, x.flip(0))
    grads = {}
    for chunk, module in stages.items():
        for param_name, grad in named_grads(module):
            pieces = param_name.split(".")
            if "experts" in pieces:
                pieces[3] = str(int(pieces[3]) + ep_rank * (EXPERTS // EP))
            grads[placed[chunk], ".".join(pieces)] = cast(Tensor, grad)
    pipe.close()
    return grads, kinds(pipe), len(pipe.groups)


def rows_of(ep_rank: int) -> Tensor:
    torch.manual_seed(40 + ep_rank)
    return torch.randn(MB * TOKENS, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-overlap", "dualpipev"])
def test_padded_dispatches_need_no_counts(name: str) -> None:
    results = check(run_ranks(PP * EP, padded_rank, name))
    model = padded_stages(treadle.generate(name, pp=PP, microbatches=MB).placement.num_stages, 1, 0)
    lost = 0
    for x in map(rows_of, range(EP)):
        for part, target in zip(x.chunk(MB), x.flip(0).chunk(MB), strict=True):
            lost += int(cast(Padded, model[0][0]).attn(part)[3].bincount(minlength=TOKENS + 1)[:TOKENS].eq(0).sum())
            torch.autograd.backward(functional.mse_loss(nn.Sequential(*model)(part), target) / (MB * EP))
    assert lost > 0, "every token found a place, so that was not tried"
    for grads, seen, _ in results:
        assert not {"COUNTS", "HOST"} & seen
        assert {"DISPATCH_F", "COMBINE_F", "DISPATCH_B", "COMBINE_B"} <= seen
        for (stage, param_name), grad in grads.items():
            want = dict(named_grads(model[stage]))[param_name]
            assert want is not None
            assert close(grad, want, 1e-10), (stage, param_name)


def deepep_rank(rank: int, name: str) -> set[str]:
    """A layer whose exchange counts by itself, in bfloat16: its losses go down, and its Program has no counts."""
    deepep_contract.install()
    schedule = treadle.generate(name, pp=PP, microbatches=MB)
    stages: dict[int, nn.Module] = {}
    for chunk, stage in enumerate(schedule.placement.stages[rank // EP]):
        torch.manual_seed(stage)
        layer = MoELayer(WIDTH, HIDDEN, EXPERTS, ep=EP, ep_rank=rank % EP, exchange="deepep")
        stages[chunk] = nn.Sequential(layer).bfloat16()
    pipe = treadle.Pipeline(stages, schedule, mesh=ep_mesh(), loss_fn=functional.mse_loss, deadline_s=PATIENT_S)
    optimizer = torch.optim.SGD([p for stage in stages.values() for p in stage.parameters()], lr=0.2)
    x, losses = rows_of(rank % EP).bfloat16(), []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, x.roll(1, -1))))
        optimizer.step()
    assert losses[-1] < losses[0]
    pipe.close()
    return kinds(pipe)


def test_an_exchange_that_counts_by_itself() -> None:
    """By what DeepEP documents, not by DeepEP."""
    for seen in check(run_ranks(PP * EP, deepep_rank, "interleaved-overlap")):
        assert not {"COUNTS", "HOST"} & seen
        assert "DISPATCH_F" in seen


def mixed_rank(rank: int) -> str:
    stage = nn.Sequential(Padded(EP, rank % EP), MoELayer(WIDTH, HIDDEN, EXPERTS, ep=EP, ep_rank=rank % EP))
    schedule = treadle.generate("1f1b", pp=PP, microbatches=MB)
    with pytest.raises(ValueError, match="segments") as error:
        treadle.Pipeline({0: stage}, schedule, mesh=ep_mesh(), loss_fn=functional.mse_loss, deadline_s=PATIENT_S)
    return str(error.value)


def test_layers_with_and_without_counts_do_not_mix() -> None:
    for said in check(run_ranks(PP * EP, mixed_rank)):
        assert "layer 1 has the segments attn, counts, host, dispatch, mlp, combine, layer 0 has attn, dispatch" in said


# -- shapes ------------------------------------------------------------------------------------------------------------


def odd_shape_rank(rank: int) -> str:
    torch.manual_seed(rank // EP)
    stage = nn.Sequential(MoELayer(WIDTH, HIDDEN, EXPERTS, ep=EP, ep_rank=rank % EP))
    schedule = treadle.generate("1f1b", pp=PP, microbatches=4)
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=ep_mesh(), loss_fn=functional.mse_loss, deadline_s=PATIENT_S)
    whole, odd = [torch.randn(TOKENS, WIDTH)] * 4, [*[torch.randn(TOKENS, WIDTH)] * 3, torch.randn(TOKENS - 2, WIDTH)]
    pipe.step(whole, whole)
    try:
        pipe.step(odd, odd)
    except (ValueError, treadle.RankLostError) as error:
        return str(error)
    return "not refused"


def test_a_micro_batch_of_another_shape_is_refused() -> None:
    for said in check(run_ranks(PP * EP, odd_shape_rank)):
        assert "stage 0 returned (4, 8) float32 for micro-batch 3, but (6, 8) float32 before" in said
        assert "pad them, or make the Pipeline with shapes='each'" in said
