"""Pipelines at the grain of layers: expert parallelism, overlapped cells, the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.support.devices import DEVICE_TYPE
from tests.support.experts import named_grads
from tests.support.oracle import make_mesh
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import OpKind
from treadle.moe import MoELayer
from treadle.runtime.model.segments import Segment, compute
from treadle.runtime.ties import Tied

WIDTH, HIDDEN, EXPERTS, TOKENS, LAYERS = 8, 12, 4, 6, 2


@dataclass(frozen=True)
class Case:
    name: str
    pp: int = 2
    ep: int = 2
    dp: int = 1
    lanes: Any = "thread"
    route: str = "learned"
    layers: int = LAYERS

    @property
    def num_mb(self) -> int:
        return 2 * self.pp if self.pp > 1 else 4

    @property
    def schedule(self) -> treadle.Schedule:
        return treadle.generate(self.name, pp=self.pp, microbatches=self.num_mb)

    @property
    def world(self) -> int:
        return self.pp * self.ep * self.dp


def whole_model(case: Case) -> list[nn.Sequential]:
    """All stages with all experts: something before the layers of the first, and behind those of the last."""
    torch.manual_seed(5)
    top_k = 1 if case.route == "one expert" else 2
    stages: list[list[nn.Module]] = []
    for _ in range(case.schedule.placement.num_stages):
        stages.append([MoELayer(WIDTH, HIDDEN, EXPERTS, top_k=top_k, balance=0.1) for _ in range(case.layers)])
    stages[0].insert(0, nn.Linear(WIDTH, WIDTH))
    stages[-1].append(nn.Linear(WIDTH, WIDTH))
    model = [nn.Sequential(*stage).double() for stage in stages]
    for layer in (part for stage in model for part in stage if isinstance(part, MoELayer)):
        with torch.no_grad():
            layer.expert_norm.bias[0] = 5.0
            if case.route == "one expert":
                layer.router.score.weight[:, 0] = torch.tensor([0.0, 0.0, 100.0, 0.0])
            if case.route == "none to a rank":
                layer.router.score.weight[:, 0] = torch.tensor([50.0, 50.0, -50.0, -50.0])
    return model


def own_part(stage: nn.Sequential, case: Case, ep_rank: int) -> nn.Sequential:
    """A rank's part of a stage: of the experts, its own."""
    parts: list[nn.Module] = []
    own = EXPERTS // case.ep
    for part in stage:
        if not isinstance(part, MoELayer):
            parts.append(part)
            continue
        top_k = part.router.top_k
        mine = MoELayer(WIDTH, HIDDEN, EXPERTS, top_k=top_k, ep=case.ep, ep_rank=ep_rank, balance=0.1).double()
        wanted = {}
        for name, value in part.state_dict().items():
            number = expert_number(name)
            if number is None:
                wanted[name] = value
            elif number // own == ep_rank:
                wanted[renumbered(name, number - ep_rank * own)] = value
        mine.load_state_dict(wanted)
        parts.append(mine)
    return nn.Sequential(*parts)


def expert_number(name: str) -> int | None:
    pieces = name.split(".")
    return int(pieces[pieces.index("experts") + 2]) if "experts" in pieces else None


def renumbered(name: str, number: int) -> str:
    pieces = name.split(".")
    pieces[pieces.index("experts") + 2] = str(number)
    return ".".join(pieces)


def batch(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    shape = (case.dp * case.ep, case.num_mb, TOKENS, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def one_process(
    case: Case, make: Callable[[Case], list[nn.Sequential]] = whole_model
) -> tuple[float, list[dict[str, Tensor]]]:
    """The mean over all micro-batches of all replicas, router losses included."""
    model = make(case)
    x, target = batch(case)
    total, replicas = 0.0, case.dp * case.ep
    for replica in range(replicas):
        for mb in range(case.num_mb):
            h, aux = x[replica, mb], torch.zeros((), dtype=torch.float64)
            for part in (part for stage in model for part in stage):
                if isinstance(part, MoELayer):
                    h, loss = part.with_loss(h)
                    aux = aux + loss
                else:
                    h = part(h)
            share = (nn.functional.mse_loss(h, target[replica, mb]) + aux) / (case.num_mb * replicas)
            torch.autograd.backward(share)
            total += share.item()
    grads = [{name: grad for name, grad in named_grads(stage) if grad is not None} for stage in model]
    return total, grads


def one_rank(
    rank: int, case: Case, make: Callable[[Case], list[nn.Sequential]] = whole_model, tied: Tied | None = None
) -> tuple[float, dict[tuple[int, str], Tensor], dict[str, Any]]:
    mesh = init_device_mesh(DEVICE_TYPE, (case.pp, case.dp, case.ep), mesh_dim_names=("pp", "dp", "ep"))
    schedule, (pp_rank, replica) = case.schedule, divmod(rank, case.dp * case.ep)
    ep_rank, model = replica % case.ep, make(case)
    placed = {chunk: schedule.placement.stage(pp_rank, chunk) for chunk in range(schedule.vpp)}
    stages = {chunk: own_part(model[stage], case, ep_rank) for chunk, stage in placed.items()}
    loss_fn = nn.functional.mse_loss
    options = treadle.RunOptions(deadline_s=PATIENT_S, lanes=case.lanes)
    pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, tied=tied, options=options)
    x, target = batch(case)
    for _ in range(2):  # the second step has its receives posted ahead
        for module in stages.values():
            module.zero_grad()
        loss = float(pipe.step(list(x[replica]), list(target[replica])))
    trace = pipe.gather_trace()
    program = trace.program
    own = EXPERTS // case.ep
    grads = {}
    for chunk, module in stages.items():
        for name, grad in named_grads(module):
            number = expert_number(name)
            full = name if number is None else renumbered(name, number + ep_rank * own)
            assert grad is not None
            grads[placed[chunk], full] = grad
    about = {
        "communicators": len(pipe.groups),
        "norm": float(pipe.grad_norm()),
        "kinds": {OpKind(int(kind)).name for kind in program.kind},
        "ranks": program.num_ranks,
        "in order": bool((trace.start <= trace.end).all()),
    }
    pipe.close()
    return loss, grads, about


CASES = [
    Case("1f1b"),
    Case("interleaved-overlap"),
    Case("dualpipe"),
    Case("dualpipev", layers=1),
    Case("zb-h1", layers=1),
    Case("1f1b", pp=1),
    Case("interleaved-overlap", dp=2, layers=1),
    Case("interleaved-overlap", pp=4, lanes="virtual", layers=1),
    Case("dualpipe", pp=4, lanes="virtual", layers=1),
    Case("1f1b", ep=1, layers=1),
    Case("interleaved-overlap", route="one expert", layers=1),
    Case("dualpipev", route="none to a rank", layers=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_in_one_process(case: Case) -> None:
    results = check(run_ranks(case.world, one_rank, case))
    loss, wanted = one_process(case)
    for rank_loss, grads, about in results:
        assert rank_loss == pytest.approx(loss, rel=1e-10)
        for (stage, name), grad in grads.items():
            want = wanted[stage][name]
            assert float((grad - want).abs().max()) <= 1e-10 * max(float(want.abs().max()), 1e-9), (stage, name)
        assert about["communicators"] <= 8
        assert about["ranks"] == case.pp
        assert about["in order"]
        assert {"ATTN_F", "COUNTS", "HOST", "DISPATCH_F", "MLP_F", "COMBINE_F", "ATTN_W", "MLP_W"} <= about["kinds"]


class Dense(nn.Module):
    """A layer without an exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def segments(self) -> list[Segment]:
        return [
            compute("attn", lambda x: x + self.mix(x), reads="x", writes="h"),
            compute("mlp", lambda h: h + self.down(torch.relu(self.up(h))), reads="h", writes="x"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.mix(x)
        out: Tensor = h + self.down(torch.relu(self.up(h)))
        return out


def dense_rank(rank: int, name: str) -> tuple[float, list[Tensor | None]]:
    torch.manual_seed(1)
    model = [nn.Sequential(Dense(), Dense()).double() for _ in range(2)]
    x = torch.randn(4, TOKENS, WIDTH, dtype=torch.float64)
    schedule = treadle.generate(name, pp=2, microbatches=4)
    pipe = treadle.Pipeline(
        {0: model[rank]}, schedule, mesh=make_mesh(2), loss_fn=nn.functional.mse_loss, deadline_s=PATIENT_S
    )
    loss = float(pipe.step(list(x), list(x)))
    pipe.close()
    return loss, [p.grad for p in model[rank].parameters()]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_dense_layers_have_segments_too(name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(Dense(), Dense()).double() for _ in range(2)])
    x = torch.randn(4, TOKENS, WIDTH, dtype=torch.float64)
    whole = torch.stack([nn.functional.mse_loss(model(part), part) for part in x]).mean()
    torch.autograd.backward(whole)
    for stage, (loss, grads) in zip(model, check(run_ranks(2, dense_rank, name)), strict=True):
        assert loss == pytest.approx(whole.item(), rel=1e-12)
        for grad, param in zip(grads, stage.parameters(), strict=True):
            assert grad is not None
            assert param.grad is not None
            assert torch.allclose(grad, param.grad, rtol=1e-10, atol=1e-14)


def mixed_rank(rank: int) -> str:
    stage: nn.Module = nn.Sequential(Dense()).double() if rank == 0 else nn.Linear(WIDTH, WIDTH).double()
    schedule = treadle.generate("1f1b", pp=3, microbatches=4)
    try:
        treadle.Pipeline({0: stage}, schedule, mesh=make_mesh(3), loss_fn=nn.functional.mse_loss, deadline_s=PATIENT_S)
    except ValueError as error:
        return str(error)
    return "not refused"


class Padded(MoELayer):
    """Its tokens are not counted. It never runs."""

    def segments(self) -> list[Segment]:
        return [segment for segment in super().segments() if segment.name not in ("counts", "host")]


def other_segments_rank(rank: int) -> str:
    stage: nn.Module = (MoELayer if rank == 0 else Padded)(WIDTH, HIDDEN, EXPERTS)
    schedule = treadle.generate("1f1b", pp=2, microbatches=4)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the test reads it
        treadle.Pipeline({0: stage}, schedule, mesh=make_mesh(2), loss_fn=nn.functional.mse_loss, deadline_s=PATIENT_S)
    return str(error.value)


def test_layers_of_other_segments_do_not_mix() -> None:
    for said in check(run_ranks(2, other_segments_rank)):
        assert "differ in segments of MoE layers (attn, counts, host, dispatch, mlp, combine and attn, dispatch" in said


def test_stages_with_and_without_segments_do_not_mix() -> None:
    for said in check(run_ranks(3, mixed_rank)):
        assert "some stages have layers that name their segments, and stage 1 has none" in said
