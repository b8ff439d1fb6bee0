"""Stages whose backward cannot be split."""

from __future__ import annotations

import warnings
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import treadle
from tests.support.cases import (
    Grads,
    hold,
    own_grads,
    pipeline,
    replica_of,
    schedule_of,
)
from tests.support.oracle import (
    Bare,
    Block,
    Embed,
    Head,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
    run_whole,
)
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import LaneKind, OpKind
from treadle.runtime.model.segments import Segment, compute, reference_forward
from treadle.runtime.model.weight_grad import SplitForward


def bare_stages() -> list[nn.Module]:
    torch.manual_seed(13)
    return [stage.double() for stage in (Embed(8), Bare(8, 6), Block(6, 7), Head(7))]


def frozen_stages() -> list[nn.Module]:
    stages = make_stages(4)
    stages[0].requires_grad_(False)
    return stages


def kinds_of(pipe: treadle.Pipeline, pp_rank: int, chunk: int = 0) -> set[str]:
    """The kinds of compute ops of a chunk."""
    program = pipe.program
    rank = program.lane_rank[program.lane_of]
    compute = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    return {OpKind(int(k)).name for k in program.kind[compute & (rank == pp_rank) & (program.chunk == chunk)]}


def step_unsplit(rank: int, name: str, what: str) -> tuple[float, Grads, dict[int, str], list[list[set[str]]]]:
    """Stage 1 cannot be split, or stage 0 does not train."""
    del rank
    pp = 4 if name == "zb-h1" else 2
    schedule, mesh = schedule_of(name, pp, 8), make_mesh(pp)
    stages = frozen_stages() if what == "frozen" else bare_stages() if what == "bare" else make_stages(4)
    run = list(stages)
    if what == "compiled":
        run[1] = cast(nn.Module, torch.compile(stages[1], backend="eager"))
    elif what == "compiled in place":
        stages[1].compile(backend="eager")
    pipe = pipeline(schedule, run, mesh)
    loss = pipe.step(*make_batch(8))
    splits = {
        schedule.placement.stage(mesh.get_local_rank("pp"), chunk): str(split)
        for chunk, split in pipe._part.agreed.splits.items()
    }
    kinds = [[kinds_of(pipe, r, c) for c in range(schedule.vpp)] for r in range(pp)]
    return float(loss), own_grads(schedule, mesh, stages), splits, kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize(
    ("what", "stage", "why"),
    [
        ("compiled", 1, "it is compiled"),
        ("compiled in place", 1, "it is compiled"),
        ("bare", 1, "it has no nn.Linear that trains"),
        ("frozen", 0, "it has no nn.Linear that trains"),
    ],
)
def test_a_stage_whose_backward_cannot_be_split_runs_it_whole(name: str, what: str, stage: int, why: str) -> None:
    schedule = schedule_of(name, 4 if name == "zb-h1" else 2, 8)
    stages = frozen_stages() if what == "frozen" else bare_stages() if what == "bare" else make_stages(4)
    losses = run_whole(stages, cut([make_batch(8)], 8), mean_loss)
    wanted = sum(losses) / 8, grads_of(dict(enumerate(stages)))
    ranks = check(run_ranks(schedule.pp, step_unsplit, name, what))
    hold([(loss, grads) for loss, grads, _, _ in ranks], wanted)
    said = {number: text for _, _, splits, _ in ranks for number, text in splits.items()}
    assert said[stage] == f"backward runs whole: {why}"
    assert all("get their gradient in wgrad" in said[s] for s in range(4) if s != stage)
    holder = schedule.placement.holder(stage)
    for _, _, _, kinds in ranks:
        for r, chunks in enumerate(kinds):
            for c, found in enumerate(chunks):
                assert found == ({"F", "B"} if (r, c) == holder else {"F", "I", "W"}), (r, c)


def uneven_replicas(rank: int) -> tuple[str, float, Grads]:
    """In replica 1 the first and the last stage are compiled, in replica 0 they are not."""
    del rank
    schedule, mesh, stages = schedule_of("zb-v", 2, 4), make_mesh(2, 2), make_stages(4)
    if replica_of(mesh) == 1:
        for stage in (stages[0], stages[3]):
            stage.compile(backend="eager")
    try:
        pipe = pipeline(schedule, stages, mesh)
    except ValueError as error:
        dist.barrier()
        return str(error), 0.0, {}
    loss = pipe.step(*make_batch(4, replica_of(mesh)))
    assert pipe.gather_trace().program.num_ranks == 2
    return "", float(loss), own_grads(schedule, mesh, stages)


@pytest.mark.slow
def test_replicas_of_which_only_some_can_split_are_right_or_refused() -> None:
    ranks = check(run_ranks(4, uneven_replicas))
    if any(said for said, _, _ in ranks):
        assert all("replica" in said or "dp" in said for said, _, _ in ranks)
        return
    stages = make_stages(4)
    losses = run_whole(stages, cut([make_batch(4, replica) for replica in range(2)], 4), mean_loss)
    hold([(loss, grads) for _, loss, grads in ranks], (sum(losses) / 8, grads_of(dict(enumerate(stages)))))


class Layer(nn.Module):
    """A layer in segments; `mlp` may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(6, 6), nn.Linear(6, 6)

    def segments(self) -> list[Segment]:
        return [
            compute("attn", self.attn, reads="x", writes="h"),
            compute("mlp", lambda h: h + torch.tanh(self.mlp(h)), reads="h", writes="x"),
        ]


def layered_stages() -> list[nn.Sequential]:
    torch.manual_seed(17)
    return [nn.Sequential(Layer(), Layer()).double() for _ in range(2)]


def step_compiled_layer(rank: int) -> tuple[float, dict[str, Tensor], set[str], int, list[str]]:
    """The second stage has a compiled submodule."""
    stages, schedule, mesh = layered_stages(), schedule_of("zb-h1", 2, 4), make_mesh(2)
    last = stages[1][1]
    assert isinstance(last, Layer)
    last.mlp.compile(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = treadle.Pipeline({0: stages[rank]}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, deadline_s=600)
    torch.manual_seed(3)
    x = torch.randn(4 * 5, 6, dtype=torch.float64)
    deferred = 0
    for part in stages[rank].modules():
        deferred += isinstance(vars(part).get("forward"), SplitForward)
    loss = pipe.step(x, x)
    kinds = kinds_of(pipe, 0)
    grads = {name: param.grad for name, param in stages[rank].named_parameters() if param.grad is not None}
    pipe.close()
    return float(loss), grads, kinds, deferred, [str(w.message) for w in caught if "dgrad" in str(w.message)]


@pytest.mark.slow
def test_a_compiled_submodule_joins_the_backward_of_its_own_stage_alone() -> None:
    stages = layered_stages()
    torch.manual_seed(3)
    x = torch.randn(4 * 5, 6, dtype=torch.float64)
    total = 0.0
    for part in x.chunk(4):
        h = part
        for layer in (layer for stage in stages for layer in stage):
            assert isinstance(layer, Layer)
            h = reference_forward(layer, h)["x"]
        loss = nn.functional.mse_loss(h, part) / 4
        torch.autograd.backward(loss)
        total += float(loss.detach())
    ranks = check(run_ranks(2, step_compiled_layer))
    for rank, (made, grads, kinds, deferred, said) in enumerate(ranks):
        assert made == pytest.approx(total, rel=1e-12)
        for name, param in stages[rank].named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14)
        assert {"ATTN_W", "MLP_W"} <= kinds
        assert deferred == (4 if rank == 0 else 0)
        assert [text.partition(";")[0] for text in said] == (
            ["stage 1 runs dgrad and wgrad together: it is compiled (1.mlp)"] if rank else []
        )
