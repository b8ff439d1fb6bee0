"""Evaluations: forwards only, the loss of one process, and nothing left behind for the next step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import treadle
from tests.runtime.run.test_layers import Case, batch, one_process, own_part, whole_model
from tests.support.cases import Grads, hold, nearest, own_grads, pipeline, refusal, replica_of
from tests.support.devices import DEVICE_TYPE
from tests.support.oracle import (
    chunks_of,
    cut,
    grads_of,
    make_batch,
    make_mesh,
    make_stages,
    mean_loss,
    run_whole,
    worst,
)
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from treadle.ir.ops import OpKind
from treadle.runtime.step_plan import StepEnds, plan_forward
from treadle.schedules import SCHEDULES

pytestmark = pytest.mark.slow


def large_batch(num_mb: int, replica: int) -> tuple[Tensor, Tensor]:
    """Micro-batches of another size than those of `make_batch`, and other sequences."""
    x, y = make_batch(3 * num_mb, replica, seed=5)
    return x, y


def evaluate_around_steps(
    rank: int, pp: int, dp: int, names: list[str]
) -> list[tuple[list[float], list[float], Grads, float]]:
    """Evaluations before, between and after steps, of two sizes; then a step's loss and gradients."""
    del rank
    mesh, ran = make_mesh(pp, dp), []
    for name in names:
        schedule = nearest(name, pp, 2 * pp)
        assert schedule is not None
        stages = make_stages(schedule.placement.num_stages)
        pipe = pipeline(schedule, stages, mesh)
        small, large = make_batch(2 * pp, replica_of(mesh)), large_batch(2 * pp, replica_of(mesh))
        state = torch.get_rng_state()
        told = [float(pipe.evaluate(*small)), float(pipe.evaluate(*large)), float(pipe.evaluate(*small))]
        assert pipe.report is not None
        losses = pipe.report.losses.tolist()
        assert all(p.grad is None for stage in stages for p in stage.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        loss = float(pipe.step(*small))
        before = own_grads(schedule, mesh, stages)
        told.append(float(pipe.evaluate(*large)))
        assert worst(before, own_grads(schedule, mesh, stages))[0] == 0.0
        ran.append((told, losses, before, loss))
        pipe.close()
    return ran


SOME = ["1f1b", "interleaved-overlap", "dualpipe", "zb-v"]
"""A schedule of each placement."""


@pytest.mark.parametrize(("pp", "dp", "names"), [(2, 1, list(SCHEDULES)), (4, 1, SOME), (2, 2, SOME)])
def test_an_evaluation_has_the_loss_of_one_process(pp: int, dp: int, names: list[str]) -> None:
    ranks = check(run_ranks(pp * dp, evaluate_around_steps, pp, dp, names))
    num_mb = 2 * pp
    for place, name in enumerate(names):
        schedule = nearest(name, pp, num_mb)
        assert schedule is not None
        stages = make_stages(schedule.placement.num_stages)
        with torch.no_grad():
            small = run_whole(stages, cut([make_batch(num_mb, r) for r in range(dp)], num_mb), mean_loss)
            large = run_whole(stages, cut([large_batch(num_mb, r) for r in range(dp)], num_mb), mean_loss)
        both = [sum(losses) / len(losses) for losses in (small, large)]
        trained = run_whole(stages, cut([make_batch(num_mb, r) for r in range(dp)], num_mb), mean_loss)
        wanted = sum(trained) / len(trained), grads_of(dict(enumerate(stages)))
        hold([(loss, grads) for _, _, grads, loss in (ran[place] for ran in ranks)], wanted, note=name)
        for rank, (told, losses, _, _) in enumerate(ran[place] for ran in ranks):
            assert told == pytest.approx([both[0], both[1], both[0], both[1]], rel=1e-10), (name, rank)
            own = small[num_mb * (rank % dp) :][:num_mb]
            assert losses == pytest.approx(own, rel=1e-10), (name, rank)


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_evaluation_runs_the_forwards_alone(name: str, layers: int | None) -> None:
    schedule = treadle.generate(name, pp=2, microbatches=6)
    shape = treadle.LoweringOptions(layers=layers, moe=True) if layers is not None else None
    trained, _ = treadle.runtime.step_plan.plan(schedule, shape, treadle.costs.UNIT_COSTS, StepEnds(reduce=True))
    program, _ = plan_forward(schedule, shape, treadle.costs.UNIT_COSTS, trained)
    forwards = {*program.layout.forward, OpKind.SEND_F, OpKind.RECV_F}
    assert {OpKind(int(kind)) for kind in program.kind} == forwards


def evaluate_layers(rank: int, case: Case) -> list[float]:
    """At the grain of layers, with experts: an evaluation, one of another size, a step, and an evaluation after it."""
    mesh = torch.distributed.device_mesh.init_device_mesh(
        DEVICE_TYPE, (case.pp, case.dp, case.ep), mesh_dim_names=("pp", "dp", "ep")
    )
    schedule, (pp_rank, replica) = case.schedule, divmod(rank, case.dp * case.ep)
    model = whole_model(case)
    stages = {
        chunk: own_part(model[stage], case, replica % case.ep)
        for chunk, stage in enumerate(schedule.placement.stages[pp_rank])
    }
    loss_fn = nn.functional.mse_loss
    pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, deadline_s=PATIENT_S, lanes=case.lanes)
    x, target = batch(case)
    mine = list(x[replica]), list(target[replica])
    halves = [part[:4] for part in mine[0]], [part[:4] for part in mine[1]]
    told = [float(pipe.evaluate(*mine))]
    pipe.evaluate(*halves)
    assert all(p.grad is None for stage in stages.values() for p in stage.parameters())
    told += [float(pipe.step(*mine)), float(pipe.evaluate(*mine))]
    pipe.close()
    return told


CASES = [Case(name, layers=1) for name in ("1f1b", "interleaved-overlap", "zb-v", "dualpipe", "dualpipev")]
CASES += [Case("interleaved-overlap", dp=2, layers=1), Case("dualpipev", lanes="serial")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_evaluation_of_layers_and_experts(case: Case) -> None:
    wanted, _ = one_process(case)
    for told in check(run_ranks(case.world, evaluate_layers, case)):
        assert told == pytest.approx([wanted] * 3, rel=1e-10)


def errors_counted(rank: int) -> tuple[float, str]:
    """A loss that could not train may be evaluated, and one without targets; a closed pipeline says so."""
    schedule, mesh = treadle.generate("1f1b", pp=2, microbatches=3), make_mesh(2)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(-1) != target).sum()

    own = chunks_of(schedule, rank, make_stages(2))
    pipe = treadle.Pipeline(own, schedule, mesh=mesh, loss_fn=loss_fn)
    loss = float(pipe.evaluate(*make_batch(3), num_tokens=18))
    pipe.close()
    return loss, refusal(lambda: pipe.evaluate(*make_batch(3)))


def test_an_evaluation_may_count_errors() -> None:
    first, second = make_stages(2)
    x, y = make_batch(3)
    with torch.no_grad():
        wanted = float((second(first(x)).argmax(-1) != y).sum()) / 18
    for loss, said in check(run_ranks(2, errors_counted)):
        assert loss == pytest.approx(wanted)
        assert "closed" in said
