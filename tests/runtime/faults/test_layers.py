"""Faults in a step at the grain of layers: in whatever lane a rank is killed, stopped, sleeps or raises, all name it.

A rank is at several ops at once there. The one that is told is what it computes, or what its computation waits for; a
lane that hangs or raises is told by its own op, whatever else the rank is at.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from tests.runtime.faults.test_cells import (
    END_S,
    KINDS,
    LONG_S,
    all_hold,
    failure_of,
    look_at_victim,
    nothing_left,
    run_steps,
    side_by_side,
)
from tests.support.devices import DEVICE_TYPE
from tests.support.faults import HANGS, CallName, Faults, deadlines_for, hold_to, meet_with, note
from tests.support.patience import SOON_S
from tests.support.ranks import Outcome, run_ranks
from treadle.ir.ops import OpKind
from treadle.moe import MoELayer
from treadle.runtime.faults.progress.rank_progress import ObservedWait, OpTable, RankProgress
from treadle.runtime.faults.progress.wait_target import ALL, NOBODY
from treadle.runtime.faults.watch import EXIT_LOST

pytestmark = pytest.mark.slow

__all__ = ["side_by_side"]

PP, EP, WIDTH, MB, WORLD = 2, 2, 4, 4, 4
VICTIM = 1
"""The first stage's second expert rank: it has a replica, a stage behind it, and rank 0 before it in every order."""

PLACES = {
    "attn": OpKind.ATTN_F,
    "dispatch": OpKind.DISPATCH_F,
    "combine, back": OpKind.COMBINE_B,
    "weight half": OpKind.ATTN_W,
    "offload": OpKind.OFFLOAD,
    "send": OpKind.SEND_F,
    "receive": OpKind.RECV_B,
    "reduction": OpKind.REDUCE_GRAD,
}
COMPUTES = (OpKind.ATTN_F, OpKind.ATTN_W)
OWN_ERRORS = {
    "RuntimeError": RuntimeError("bad shape"),
    "ConnectionError": ConnectionError("Connection reset by peer"),
    "OSError": OSError(28, "No space left on device"),
    "TimeoutError": TimeoutError("the tokens' server has not answered"),
}
"""Errors of this rank's own, of types that waits raise too."""

IMPATIENT_S = (3.0, 10.0, 30.0)
"""The deadlines of a rank that hangs, where the others have a long one; the next as with other hangs."""

STILL_S, MOST_S = 0.4, 2.5
"""A lane meets with its fault once its rank's computation waits for it, or has been at one op for a while."""


@dataclass(frozen=True)
class Case:
    where: str
    fault: str
    name: str = "1f1b"
    step: int = 1

    def __str__(self) -> str:
        return f"{self.fault} in {self.where}, {self.name}, step {self.step}"

    @property
    def kind(self) -> OpKind:
        return PLACES[self.where]

    @property
    def is_hang(self) -> bool:
        return self.fault in HANGS


def make_pipe(rank: int, name: str, deadline_s: float) -> treadle.Pipeline:
    mesh = init_device_mesh(DEVICE_TYPE, (PP, 1, EP), mesh_dim_names=("pp", "dp", "ep"))
    schedule = treadle.generate(name, pp=PP, microbatches=MB)
    stages: dict[int, nn.Module] = {}
    for chunk, stage in enumerate(schedule.placement.stages[rank // EP]):
        torch.manual_seed(stage)
        stages[chunk] = nn.Sequential(*[MoELayer(WIDTH, 8, 4, ep=EP, ep_rank=rank % EP) for _ in range(2)])
    dist.barrier()  # the deadline is short, and ranks do not start at the same time
    loss_fn = nn.functional.mse_loss
    return treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, deadline_s=deadline_s, saved="offload")


def wait_until_still(slots: memoryview, target: int) -> None:
    since = began = time.monotonic()
    at = slots[0]
    while at != target and (now := time.monotonic()) - since < STILL_S and now - began < MOST_S:
        time.sleep(0.005)
        at, since = slots[0], since if slots[0] == at else now


def inject(pipe: treadle.Pipeline, case: Case, directory: Path) -> None:
    """Has the victim meet with its fault inside the first op of the kind on its lane, in the step of the case."""
    program, name = pipe.program, partial(pipe._guard.name, VICTIM)
    mine = (program.lane_rank[program.lane_of] == VICTIM // EP) & (program.kind == case.kind)
    target = int(np.flatnonzero(mine)[0])

    def fault() -> None:
        wait_until_still(pipe._guard.slots, target)
        note(directory, VICTIM, "op", name(target))
        note(directory, VICTIM, "shown", name(pipe._guard.slots[0]))
        meet_with(case.fault, VICTIM, directory)
        if case.fault in OWN_ERRORS:
            raise OWN_ERRORS[case.fault]

    first: CallName = "prepare" if case.kind is OpKind.REDUCE_GRAD else "launch"
    faults = Faults(directory).add(fault, rank=VICTIM, step=case.step, before=str(program.op(target)), call=first)
    faults.arm(VICTIM)


def take_part(rank: int, case: Case, deadline_s: float, directory: Path) -> None:
    note(directory, rank, "pid", str(os.getpid()))
    pipe = make_pipe(rank, case.name, deadline_s)
    if rank == VICTIM:
        inject(pipe, case, directory)
    run_steps(pipe, case.step + 3)


def look_at(outcome: Outcome[None], case: Case, directory: Path) -> float:
    """Holds what a survivor raised against what happened; when it did. What cannot speak is told by what it showed."""
    error = failure_of(outcome)
    assert error.type == "RankLostError", error.traceback
    seen, cannot_speak = error.attributes, case.fault in ("kill", "stop")
    told = (directory / f"{'shown' if cannot_speak else 'op'}{VICTIM}").read_text()
    kind = "raised" if case.fault in OWN_ERRORS else KINDS[case.fault]
    assert (seen["rank"], seen["kind"], seen["op"]) == (VICTIM, kind, told), error.message
    assert f" at {told} (step {case.step})" in error.message
    return float(seen["at_s"])


def look_at_sleeper(outcome: Outcome[None], case: Case) -> None:
    """Its computation is not asleep, so it may find out about itself; or it is ended."""
    if case.kind in COMPUTES or outcome.exitcode == EXIT_LOST:
        look_at_victim(outcome, "sleep")
        return
    error = failure_of(outcome)
    assert (error.type, error.attributes["rank"]) == ("RankLostError", VICTIM), error.traceback


def run_case(case: Case, directory: Path) -> float:
    """Runs a case and holds it to the promise; how long after the fault the last survivor raised."""
    directory.mkdir()
    fault = directory / f"fault{VICTIM}"

    def run(deadline_s: float) -> list[Outcome[None]]:
        outcomes = run_ranks(WORLD, take_part, case, deadline_s, directory, new=True)
        nothing_left(directory)
        return outcomes

    return hold_to(fault, deadlines_for(case.fault, least_s=4.0), run, partial(judge, case, fault))


def judge(case: Case, fault: Path, outcomes: list[Outcome[None]], deadline_s: float) -> float:
    directory = fault.parent
    fault_s, allowed_s = float(fault.read_text()), SOON_S + (deadline_s if case.is_hang else 0.0)
    took_s = []
    for outcome in outcomes:
        if outcome.rank != VICTIM:
            took_s.append(look_at(outcome, case, directory) - fault_s)
            assert took_s[-1] <= allowed_s, f"rank {outcome.rank} raised {took_s[-1]:.1f} s after the fault"
        assert outcome.ended_s - fault_s <= allowed_s + END_S, (
            f"{outcome.ended_s - fault_s:.1f} s to its end: {outcome}"
        )
    if case.fault == "sleep":
        look_at_sleeper(outcomes[VICTIM], case)
    elif case.fault in OWN_ERRORS:
        assert failure_of(outcomes[VICTIM]).message == str(OWN_ERRORS[case.fault])
    else:
        look_at_victim(outcomes[VICTIM], case.fault)
    if case.kind in COMPUTES:
        assert (directory / f"shown{VICTIM}").read_text() == (directory / f"op{VICTIM}").read_text()
    return max(took_s)


FAULTS = ["kill", "raise", "stop", "sleep"]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_lane_it_happens_in(fault: str, half: int, tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    """Each fault in one half of the places, each place with one half of the faults; at night all of both."""
    kinds = [("1f1b", 0), ("interleaved-overlap", 1)]
    places = [(at, where) for at, where in enumerate(PLACES) if (at + FAULTS.index(fault)) % 2 == half]
    cases = [Case(where, fault, *kinds[at // 2 % 2]) for at, where in places]
    all_hold(side_by_side, {str(case): partial(run_case, case, tmp_path / case.where) for case in cases})


def be_impatient(rank: int, case: Case, deadline_s: float, directory: Path) -> None:
    """The victim's own wait for its lane is over long before the others'."""
    take_part(rank, case, deadline_s if rank == VICTIM else LONG_S, directory)


@pytest.mark.parametrize("where", ["dispatch", "offload", "send"])
def test_a_rank_whose_own_lane_hangs_tells_so_before_it_leaves(where: str, tmp_path: Path) -> None:
    """Else it would have said goodbye by the time the others ask, and they would name it for that."""
    case = Case(where, "sleep")
    fault = tmp_path / f"fault{VICTIM}"

    def judge_all(outcomes: list[Outcome[None]], deadline_s: float) -> None:
        for outcome in outcomes:
            if outcome.rank == VICTIM:
                look_at_sleeper(outcome, case)
            else:
                took_s = look_at(outcome, case, tmp_path) - float(fault.read_text())
                assert took_s <= deadline_s + SOON_S, f"rank {outcome.rank} raised {took_s:.1f} s after the fault"

    hold_to(
        fault,
        IMPATIENT_S,
        lambda deadline_s: run_ranks(WORLD, be_impatient, case, deadline_s, tmp_path, new=True),
        judge_all,
    )


def test_own_errors_that_look_like_those_of_a_wait(tmp_path: Path, side_by_side: ThreadPoolExecutor) -> None:
    """In lanes where waits raise such errors too, or that are not the thread's own."""
    cases = [
        Case("combine, back", "RuntimeError"),
        Case("dispatch", "ConnectionError"),
        Case("offload", "OSError"),
        Case("attn", "TimeoutError"),
        Case("weight half", "RuntimeError", "interleaved-overlap", 0),
    ]
    all_hold(side_by_side, {str(case): partial(run_case, case, tmp_path / str(at)) for at, case in enumerate(cases)})


# -- what is shown -----------------------------------------------------------------------------------------------------

ATTN, COUNTS, DISPATCH, MLP, SEND = range(5)
PEER = 7


def step_of() -> tuple[RankProgress, memoryview]:
    """A forward: attn; counts and dispatch on a lane; mlp; a send of what attn made on another."""
    rows = OpTable(
        index=[10, 11, 12, 13, 14],
        lane=[0, 1, 1, 0, 2],
        after=[[], [ATTN], [COUNTS], [DISPATCH], [ATTN]],
        wait_target=[NOBODY, ALL, ALL, NOBODY, PEER],
        of_lane=[[ATTN, MLP], [COUNTS, DISPATCH], [SEND]],
    )
    slots = memoryview(array("q", [0, 0]))
    return RankProgress(rows, slots), slots


class OtherLane:
    """A thread that does what it is told, and stays."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, *calls: Callable[[], object]) -> None:
        for call in calls:
            self._pool.submit(call).result()


class InVain:
    """A wait that fails."""

    def __call__(self, work: object) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_rank_whose_wait_has_failed_is_still_shown_as_waiting() -> None:
    """Others may ask before the thread that computes gets to know: it neither computes nor is about to."""
    (step, slots), ep, out = step_of(), OtherLane(), OtherLane()
    step.begin(ATTN)
    step.end(ATTN)
    step.want(MLP)
    wait = ObservedWait(InVain())
    wait.step = step

    def fails() -> None:
        with pytest.raises(RuntimeError, match="closed by peer"):
            wait(cast(dist.Work, None))
        step.fail()

    ep(partial(step.begin, COUNTS), partial(step.end, COUNTS), partial(step.begin, DISPATCH), fails)
    assert slots.tolist() == [12, ALL]
    out(partial(step.begin, SEND))  # lanes go on for a while
    assert slots.tolist() == [12, ALL]


def test_what_holds_the_computation_up_is_shown() -> None:
    (step, slots), ep, out = step_of(), OtherLane(), OtherLane()
    step.want(ATTN)
    step.begin(ATTN)
    assert slots.tolist() == [10, NOBODY]
    step.end(ATTN)
    step.want(MLP)
    assert slots.tolist() == [11, ALL]  # it could start
    ep(partial(step.begin, COUNTS))
    assert slots.tolist() == [11, NOBODY]
    ep(partial(step.wait, True))
    assert slots.tolist() == [11, ALL]
    ep(partial(step.wait, False), partial(step.end, COUNTS))
    out(partial(step.begin, SEND))
    assert slots.tolist() == [12, ALL]  # what is sent holds nobody up here
    ep(partial(step.begin, DISPATCH), partial(step.end, DISPATCH))
    step.begin(MLP)
    assert slots.tolist() == [13, NOBODY]
    step.end(MLP)
    step.want_all()
    assert slots.tolist() == [14, NOBODY]
    out(partial(step.wait, True))
    assert slots.tolist() == [14, PEER]


def test_an_op_that_hangs_where_nobody_waits_for_it_is_found() -> None:
    (step, slots), ep, out = step_of(), OtherLane(), OtherLane()
    out(partial(step.begin, SEND), partial(step.wait, True))
    step.begin(ATTN)
    step.over()
    step.suspect_itself()
    assert slots.tolist() == [10, NOBODY]  # the send waits for its peer, as it may
    ep(partial(step.begin, COUNTS))
    step.suspect_itself()
    assert slots.tolist() == [11, NOBODY]
