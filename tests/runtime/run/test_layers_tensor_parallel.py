"""Tensor parallelism: your own inside what computes works; torch's, and a mesh with tp, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.runtime.model.segments import Segment, compute

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, TOKENS, MB = 8, 12, 6, 8


def kinds(pipe: treadle.Pipeline) -> set[str]:
    return {pipe.program.op(index).kind.name for index in range(pipe.program.num_ops)}


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return float((got - want).abs().max()) <= tolerance * max(float(want.abs().max()), 1e-9)


def rows() -> Tensor:
    torch.manual_seed(40)
    return torch.randn(MB * TOKENS, WIDTH, dtype=torch.float64)


def tp_refused(rank: int, case: str) -> str:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # seconds, in every rank of every test

    mesh = init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("pp", "tp"))
    linear = nn.Linear(WIDTH, WIDTH)
    if case != "the mesh":
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(0)]))
        assert isinstance(linear.weight, DTensor)
    stage = nn.Sequential(linear if case != "on the last stage" or rank >= 2 else nn.Linear(WIDTH, WIDTH))
    schedule = treadle.generate("1f1b", pp=2, microbatches=4)
    given = mesh if case == "the mesh" else mesh["pp"]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the test reads it
        treadle.Pipeline({0: stage}, schedule, mesh=given, loss_fn=functional.mse_loss, deadline_s=PATIENT_S)
    return str(error.value)


def test_parameters_spread_by_torch_are_refused_by_name() -> None:
    for said in check(run_ranks(4, tp_refused, "everywhere")):
        assert "chunk 0: 0.weight is a DTensor over the mesh dimensions tp (" in said
        assert "give each rank its part as a plain parameter" in said
        assert 'mesh["pp", "dp"]' in said


def test_such_parameters_on_some_ranks_are_refused_by_all() -> None:
    said = check(run_ranks(4, tp_refused, "on the last stage"))
    for rank in (0, 1):
        assert "0.weight is a DTensor" in said[rank + 2]
        assert f"rank {rank + 2} could not make its part of the pipeline: " in said[rank]
        assert "0.weight is a DTensor" in said[rank]


def test_a_mesh_with_tp_is_refused_by_name() -> None:
    for said in check(run_ranks(4, tp_refused, "the mesh")):
        assert "got ('pp', 'tp'); make it by init_device_mesh" in said
        assert 'or give the part without tp, mesh["pp"]: Treadle does nothing over tp' in said


class _Together(torch.autograd.Function):
    """Forward sums over a group and backward leaves alone, or the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, forward: bool) -> Tensor:
        ctx.group, ctx.forward = group, forward
        return _summed(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.forward else _summed(grad, ctx.group)), None, None


def _summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


class Cut(nn.Module):
    """An MLP, or its part on a rank of tp: columns of the first linear, rows of the second, and the sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.group: Any = None

    def cut(self, group: Any, tp_rank: int) -> None:
        self.group, own = group, slice(tp_rank * HIDDEN // 2, (tp_rank + 1) * HIDDEN // 2)
        self.up.weight = nn.Parameter(self.up.weight.detach()[own].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach()[:, own].clone())

    def forward(self, x: Tensor) -> Tensor:
        together: Callable[..., Tensor] = _Together.apply
        if self.group is None:
            return x + cast(Tensor, self.down(torch.relu(self.up(x))))
        made = self.down(torch.relu(self.up(together(x, self.group, False))))
        return x + together(made, self.group, True)


class CutLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cut(), Cut()

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.first, reads="x", writes="h"),
            compute("mlp", self.second, reads="h", writes="x"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def cut_rank(rank: int, layered: bool) -> list[Tensor]:
    mesh = init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(rank // 2)
    layer = CutLayer().double()
    for part in (layer.first, layer.second):
        part.cut(mesh.get_group("tp"), rank % 2)
    stage = nn.Sequential(layer) if layered else nn.Sequential(layer.first, layer.second)
    schedule = treadle.generate("zb-h1", pp=2, microbatches=MB)
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=mesh["pp"], loss_fn=functional.mse_loss, deadline_s=PATIENT_S)
    x = rows()
    for _ in range(2):
        stage.zero_grad()
        pipe.step(x, x.flip(0))
    assert ("MLP_W" in kinds(pipe)) is layered
    pipe.close()
    return [cast(Tensor, p.grad) for p in layer.parameters()]


@pytest.mark.parametrize("layered", [True, False])
def test_tensor_parallelism_of_your_own_inside_what_computes(layered: bool) -> None:
    results = check(run_ranks(4, cut_rank, layered))
    model = []
    for stage in range(2):
        torch.manual_seed(stage)
        model.append(CutLayer().double())
    x = rows()
    for part, target in zip(x.chunk(MB), x.flip(0).chunk(MB), strict=True):
        torch.autograd.backward(functional.mse_loss(nn.Sequential(*model)(part), target) / MB)
    for rank, grads in enumerate(results):
        own = slice(rank % 2 * (HIDDEN // 2), (rank % 2 + 1) * (HIDDEN // 2))
        for at, (grad, param) in enumerate(zip(grads, model[rank // 2].parameters(), strict=True)):
            assert param.grad is not None
            assert close(grad, param.grad[own] if at % 2 == 0 else param.grad[:, own], 1e-10)
