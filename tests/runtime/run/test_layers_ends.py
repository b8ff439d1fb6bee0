"""The ends of a model whose layers name their segments: embedding, head and loss, in sizes and dtypes of real use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import treadle
from tests.support.oracle import make_mesh
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import LaneKind, OpKind
from treadle.moe import MoELayer
from treadle.runtime.model.segments import Segment, compute, exchange

WIDTH, TOKENS = 8, 5
CLASSES = 32_000
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of what the micro-batches' gradients come to without cancelling; one of them too many or too few is 0.14 at least."""


@dataclass(frozen=True)
class Case:
    name: str
    dtype: Any = torch.float32
    microbatches: int = 6
    tied: bool = False
    lanes: Any = "thread"

    @property
    def schedule(self) -> treadle.Schedule:
        return treadle.generate(self.name, pp=2, microbatches=self.microbatches)


class Tied(nn.Module):
    """A head that shares the embedding's table."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def model(case: Case) -> list[nn.Sequential]:
    torch.manual_seed(3)
    num_stages = case.schedule.placement.num_stages
    stages: list[list[nn.Module]] = [[MoELayer(WIDTH, 12, 2, balance=0.1)] for _ in range(num_stages)]
    table = nn.Embedding(CLASSES, WIDTH).to(case.dtype)
    stages[0].insert(0, table)
    head = Tied(table) if case.tied else nn.Linear(WIDTH, CLASSES)
    stages[-1] += [nn.LayerNorm(WIDTH), nn.Dropout(0.3), head]
    return [nn.Sequential(*stage).to(case.dtype) for stage in stages]


def batch(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    tokens = torch.randint(CLASSES, (2, case.microbatches, TOKENS))
    return tokens[0], tokens[1]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """In float32, as losses of bf16 models are; the router's auxiliary loss stays in the model's own precision."""
    return functional.cross_entropy(logits.float(), target)


class _Draws:
    """What a dropout in the head drew, by call."""

    def __init__(self, module: nn.Module, drawn: list[Tensor]) -> None:
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.register_forward_hook(lambda _m, x, y: drawn.append((y != 0).flatten().clone()))


def one_rank(rank: int, case: Case) -> Any:
    schedule, parts = case.schedule, model(case)
    placed = {chunk: schedule.placement.stage(rank, chunk) for chunk in range(schedule.vpp)}
    stages = {chunk: parts[stage] for chunk, stage in placed.items()}
    drawn: list[Tensor] = []
    for stage in stages.values():
        _Draws(stage, drawn)
    pipe = treadle.Pipeline(
        stages, schedule, mesh=make_mesh(2), loss_fn=loss_fn, deadline_s=PATIENT_S, lanes=case.lanes
    )
    tokens, targets = batch(case)
    for _ in range(2):
        drawn.clear()
        for module in stages.values():
            module.zero_grad()
        loss = float(pipe.step(list(tokens), list(targets)))
    program = pipe.program
    lanes = {OpKind(int(k)): LaneKind(int(program.lane_kind[lane])) for k, lane in zip(program.kind, program.lane_of)}  # noqa: B905
    grads = {}
    for chunk, module in stages.items():
        for name, param in module.named_parameters():
            assert param.grad is not None, name
            grads[placed[chunk], name] = param.grad
    pipe.close()
    return loss, grads, drawn, lanes


def one_process(case: Case, masks: list[Tensor]) -> tuple[float, list[dict[str, tuple[Tensor, float]]]]:
    """In the case's precision, gradients summed in float32, with the dropouts of the pipeline's head.

    With each gradient the sum of the micro-batches' norms.
    """
    parts = model(case)
    tokens, targets = batch(case)
    params = {id(p): p for stage in parts for p in stage.parameters()}
    sums = {key: torch.zeros_like(p, dtype=torch.float32) for key, p in params.items()}
    norms = dict.fromkeys(params, 0.0)
    total = 0.0
    for mb in range(case.microbatches):
        h, aux = tokens[mb], torch.zeros((), dtype=case.dtype)
        for part in (part for stage in parts for part in stage):
            if isinstance(part, MoELayer):
                h, loss = part.with_loss(h)
                aux = aux + loss
            elif isinstance(part, nn.Dropout):
                h = h * masks[mb].view_as(h) / (1 - part.p)
            else:
                h = part(h)
        share = (loss_fn(h, targets[mb]) + aux.float()) / case.microbatches
        for key, grad in zip(params, torch.autograd.grad(share, list(params.values())), strict=True):
            sums[key] += grad
            norms[key] += float(grad.float().norm())
        total += share.item()
    return total, [{n: (sums[id(p)], norms[id(p)]) for n, p in stage.named_parameters()} for stage in parts]


CASES = [
    Case("interleaved-overlap"),
    Case("interleaved-overlap", torch.bfloat16),
    Case("1f1b", microbatches=3),
    Case("zb-h1", torch.bfloat16, microbatches=5),
    Case("dualpipev", tied=True),
    Case("dualpipev", torch.bfloat16, tied=True),
    Case("zb-v", tied=True, microbatches=7),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_a_large_vocabulary(case: Case) -> None:
    results = check(run_ranks(2, one_rank, case))
    serial = check(run_ranks(2, one_rank, Case(**{**case.__dict__, "lanes": "serial"})))
    masks = by_microbatch(case, results)
    loss, wanted = one_process(case, masks)
    for (rank_loss, grads, _, _), (_, plain, _, _) in zip(results, serial, strict=True):
        assert rank_loss == pytest.approx(loss, rel=TOLERANCE[case.dtype])
        for (stage, name), grad in grads.items():
            want, norm = wanted[stage][name]
            assert torch.equal(grad, plain[stage, name]), (stage, name)
            assert float((grad - want).norm()) <= TOLERANCE[case.dtype] * norm, (stage, name)


def by_microbatch(case: Case, results: list[Any]) -> list[Tensor]:
    """The head's dropouts; the last stage's forwards come in the order of their micro-batches."""
    last = case.schedule.placement.num_stages - 1
    (masks,) = [drawn for _, grads, drawn, _ in results if any(stage == last for stage, _ in grads)]
    assert len(masks) == case.microbatches
    return list(masks)


def test_all_that_computes_is_on_the_compute_lane() -> None:
    results = check(run_ranks(2, one_rank, Case("interleaved-overlap")))
    for _, _, _, lanes in results:
        assert {OpKind.EMBED_F, OpKind.EMBED_B, OpKind.HEAD_F, OpKind.HEAD_B, OpKind.HEAD_W} <= set(lanes)
        for kind in (OpKind.EMBED_F, OpKind.EMBED_B, OpKind.HEAD_F, OpKind.HEAD_B, OpKind.HEAD_W):
            assert lanes[kind] is LaneKind.COMPUTE


@pytest.mark.slow
def test_dropout_in_the_head_does_not_depend_on_the_schedule() -> None:
    drawn = []
    for case in (Case("interleaved-overlap"), Case("interleaved-overlap", lanes="serial"), Case("interleaved")):
        drawn.append(by_microbatch(case, check(run_ranks(2, one_rank, case))))
    overlapped, *others = drawn
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(overlapped, other, strict=True))
    assert any(not torch.equal(overlapped[0], mask) for mask in overlapped[1:])


class Greedy(nn.Module):
    """A layer whose exchange has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.mix, reads="x", writes="h"),
            exchange("dispatch", lambda h: h * 1, reads="h", writes="rows"),
            compute("mlp", torch.relu, reads="rows", writes="made"),
            exchange("combine", lambda made: made * self.scale, reads="made", writes="x"),
        ]


def refused(rank: int, stages: list[nn.Sequential]) -> str:
    schedule = treadle.generate("1f1b", pp=2, microbatches=2)
    pipe = None
    try:
        mse = functional.mse_loss
        pipe = treadle.Pipeline({0: stages[rank]}, schedule, mesh=make_mesh(2), loss_fn=mse, deadline_s=PATIENT_S)
        x = torch.randn(2, TOKENS, WIDTH)
        pipe.step(list(x), list(x))
    except (ValueError, treadle.RankLostError) as error:
        return str(error)
    finally:
        if pipe is not None:
            pipe.close()
    return "not refused"


def test_parameters_in_an_exchange_are_refused() -> None:
    said = check(run_ranks(2, refused, [nn.Sequential(Greedy()) for _ in range(2)]))
    assert any("segment combine uses the parameter scale" in text for text in said)
    assert all(text != "not refused" for text in said)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_plain_modules_between_stages_are_refused(where: str) -> None:
    layer, plain = MoELayer(WIDTH, 12, 2), nn.Linear(WIDTH, WIDTH)
    ordered = [nn.Sequential(layer), nn.Sequential(plain, layer)]
    if where == "behind":
        ordered = [nn.Sequential(layer, plain), nn.Sequential(layer)]
    said = check(run_ranks(2, refused, ordered))
    assert any(f"can have plain modules {where} its layers" in text for text in said)
    assert all(text != "not refused" for text in said)
