"""Ranks that are interrupted, late, absent, or give up before they are connected: the others name them."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import treadle
from tests.support.faults import deadlines_for, hold_to, meet_with
from tests.support.oracle import make_mesh
from tests.support.patience import SOON_S
from tests.support.ranks import Outcome, check, run_ranks
from treadle.dist import channel
from treadle.dist.boundary import boundary_of
from treadle.dist.channel import Channel
from treadle.dist.communicators import make_communicator
from treadle.dist.rank_groups import Groups
from treadle.runtime import pipeline as pipeline_module
from treadle.runtime import rank_part, step_plan
from treadle.runtime.faults.arrivals import Arrivals
from treadle.runtime.stage_recipe import StageRecipe

pytestmark = pytest.mark.slow


class Interrupted(nn.Module):
    """Raises what a signal's handler would, in the forward of the third micro-batch."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.linear, self.error, self.turn = nn.Linear(8, 8), error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        if self.turn == 3 and self.error is not None:
            raise self.error
        out: Tensor = self.linear(x)
        return out


LONG_S = 60.0
"""Nobody may need the deadline to come out of a wait."""


def interrupted(rank: int, how: str) -> tuple[str, str | None, str, float]:
    """What a rank raised, at which op, and how soon; rank 1 is interrupted."""
    schedule, mesh = treadle.generate("1f1b", pp=3, microbatches=6), make_mesh(3)
    errors = {"KeyboardInterrupt": KeyboardInterrupt(), "SystemExit": SystemExit(3)}
    stage = Interrupted(errors.get(how) if rank == 1 else None)
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, deadline_s=LONG_S)
    begin_s = time.monotonic()
    try:
        pipe.step(torch.randn(12, 8), torch.randn(12, 8))
        if how == "trace":
            if rank == 1:
                pipeline_module.clock_offset = raise_interrupt  # type: ignore
            _ = pipe.gather_trace()
    except treadle.RankLostError as error:
        return f"lost {error.rank}", error.op, str(error), time.monotonic() - begin_s
    except BaseException as error:
        time.sleep(2.0)  # it goes on for a while, as what unwinds may
        return type(error).__name__, None, str(error), 0.0
    return "nothing", None, "", 0.0


def raise_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["KeyboardInterrupt", "SystemExit", "trace"])
def test_an_interrupt_is_told_at_once(how: str) -> None:
    outcomes = check(run_ranks(3, interrupted, how))
    error = "SystemExit" if how == "SystemExit" else "KeyboardInterrupt"
    assert outcomes[1][0] == error
    for rank in (0, 2):
        what, op, said, took_s = outcomes[rank]
        assert what == "lost 1", said
        assert op == ("gather_trace()" if how == "trace" else "F2.0")
        assert f"rank 1 was lost first: interrupted by {error} at {op}" in said
        assert took_s < LONG_S / 2


def absent(rank: int, how: str) -> str:
    """Four ranks in two replicas; rank 3 does not come, or gives up before it is connected."""
    schedule, mesh = treadle.generate("1f1b", pp=2, microbatches=2), make_mesh(2, 2)
    if rank == 3 and how == "absent":
        dist.barrier()
        return "absent"
    if rank == 3:
        rank_part.check_tied = give_up  # type: ignore[assignment, attr-defined]
    try:
        treadle.Pipeline({0: nn.Linear(8, 8)}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, deadline_s=6.0)
    except (treadle.RankLostError, ValueError) as error:
        dist.barrier()
        return f"{type(error).__name__} {getattr(error, 'kind', '')}: {error}"
    return "nothing"


def give_up(_: object) -> None:
    raise ValueError("there is no memory left on this host")


@pytest.mark.parametrize("how", ["absent", "gives up"])
def test_a_rank_that_does_not_come_is_named(how: str) -> None:
    *others, last = check(run_ranks(4, absent, how))
    for said in others:
        if how == "absent":
            assert said.startswith("RankLostError absent: rank 3 did not come to make the pipeline within 6 s"), said
        else:
            assert said.startswith(
                "RankLostError raised: rank 3 gave up making the pipeline: ValueError: there is no"
            ), said
    assert last == "absent" or "no memory left" in last


LOST = 2
"""Of four ranks in two replicas: rank 1 is not connected to it."""

WHERE: dict[str, tuple[object, str]] = {
    "as it has arrived": (Arrivals, "_refuse_given_up"),
    "before the first groups": (Groups, "make"),
    "at the handshake": (rank_part, "agree"),
    "at the plan": (step_plan, "plan"),
    "before its channels": (Groups, "connect"),
    "as it compares copies": (rank_part, "claims_of_copies"),
    "as it builds its stages": (StageRecipe, "build"),
}


def lost_while_making(rank: int, where: str, fault: str, deadline_s: float, directory: Path) -> tuple[int, str, str]:
    """Which rank a rank says was lost, and how: as it makes the pipeline, or where it waits for the lost one next."""
    schedule, mesh = treadle.generate("1f1b", pp=2, microbatches=2), make_mesh(2, 2)
    if rank == LOST:
        owner, name = WHERE[where]
        setattr(owner, name, lambda *_, **__: meet_with(fault, rank, directory))
    dist.barrier()
    try:
        torch.manual_seed(0)
        stages, loss_fn = {0: nn.Linear(8, 8)}, nn.functional.mse_loss
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, deadline_s=deadline_s)
        pipe.step(torch.randn(4, 8), torch.randn(4, 8))
    except treadle.RankLostError as error:
        return error.rank, error.kind, str(error)
    return -1, "", "nothing was raised"


@pytest.mark.parametrize(
    ("where", "fault"), [*((where, "kill") for where in WHERE), ("at the plan", "stop"), ("at the handshake", "stop")]
)
def test_a_rank_that_is_lost_while_the_pipeline_is_made_is_named(where: str, fault: str, tmp_path: Path) -> None:
    def run(deadline_s: float) -> list[Outcome[tuple[int, str, str]]]:
        stuck = [LOST] if fault == "stop" else []
        return run_ranks(4, lost_while_making, where, fault, deadline_s, tmp_path, new=True, stuck=stuck)

    def judge(outcomes: list[Outcome[tuple[int, str, str]]], deadline_s: float) -> None:
        fell_s = float((tmp_path / f"fault{LOST}").read_text())
        for outcome in (outcome for outcome in outcomes if outcome.rank != LOST):
            assert outcome.ok, outcome
            assert outcome.value is not None
            rank, kind, said = outcome.value
            assert (rank, kind) == (LOST, "hung" if fault == "stop" else "killed"), said
            assert outcome.ended_s - fell_s < SOON_S

    hold_to(tmp_path / f"fault{LOST}", deadlines_for(fault, 4.0), run, judge)


def send_many(rank: int, num: int) -> str:
    """Rank 1 posts its receives only when rank 0's send has returned."""
    group = make_communicator("many", [0, 1], rank, timedelta(seconds=20), torch.get_default_device())
    waited = []

    def wait(work: dist.Work) -> object:
        waited.append(work)
        return work.wait(timedelta(seconds=20))

    line = Channel(group, 1 - rank, torch.get_default_device(), wait)
    tensors = [torch.full((3,), float(at)) for at in range(num)]
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        line.send(tensors, "a message")
        assert not waited
        store.set("sent", "yes")
        line.send(tensors, "another")
        line.drain()
        return "sent"
    store.wait(["sent"])
    for _ in range(2):
        came = line.wait_for(line.post(boundary_of(tensors)))
        assert all(torch.equal(one, other) for one, other in zip(came, tensors, strict=True))
    return "received"


@pytest.mark.parametrize("num", [1, 5, 16])
def test_a_message_of_many_tensors_does_not_wait_for_itself(num: int) -> None:
    assert channel._LEAVING < 5
    assert check(run_ranks(2, send_many, num)) == ["sent", "received"]
