"""The watch on real processes with real gloo waits: for every way to lose a rank, all others name it, and soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tests.support.faults import HANGS, deadlines_for, hold_to
from tests.support.patience import PATIENT_S, SOON_S
from tests.support.ranks import Outcome, check, run_ranks
from treadle.dist.native_sockets import Sockets
from treadle.runtime.faults.progress.progress_page import OP, OUTSIDE, STEP, WAITS_FOR, namespace_id
from treadle.runtime.faults.progress.wait_target import waits_for_group
from treadle.runtime.faults.watch import EXIT_LOST, RankLostError, Watch
from treadle.runtime.faults.watch import watch as watch_module

pytestmark = pytest.mark.slow

FAULT_STEP = 3
RECEIVE, COMPUTE, SEND, REDUCE = range(4)


@dataclass(frozen=True)
class Scene:
    """Tokens go round in each of `lines`; with more than one, ranks at the same place of all lines reduce together.

    Rank `lost` meets with `fault` in the middle of a step and leaves the time and its pid in `directory`. `apart`: as
    if every rank were on a host of its own.
    """

    lost: int
    fault: str
    lines: tuple[tuple[int, ...], ...]
    directory: Path
    apart: bool = False
    deadline_s: float = PATIENT_S
    """Of the watch, and of waits unless `patient`."""
    patient: bool = False

    @property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        across = tuple(zip(*self.lines, strict=True))
        return (*self.lines, *(across if len(self.lines) > 1 else ()))

    def note(self) -> None:
        (self.directory / "pid").write_text(str(os.getpid()))
        (self.directory / "time").write_text(str(time.monotonic()))


@dataclass(frozen=True)
class Told:
    """What a rank raised, and when."""

    rank: int
    kind: str
    op: str | None
    waiting_for: str | None
    text: str
    at_s: float


def ring(lost: int, fault: str, directory: Path, apart: bool = False) -> Scene:
    return Scene(lost, fault, ((0, 1, 2, 3),), directory, apart)


def torus(lost: int, fault: str, directory: Path) -> Scene:
    return Scene(lost, fault, ((0, 1), (2, 3)), directory)


def name(rank: int, op: int) -> str:
    return f"{'RCSA'[op]}{rank}"


def meet_with(fault: str, watch: Watch) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill with child":  # which has copies of all connections, gloo's too
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(60)
        case "raise":
            raise ValueError("the loss is\nnan")
        case "leave":
            watch.close()
            os._exit(0)


def gather(text: str, ranks: Sequence[int]) -> list[str]:
    """Every rank's text, through the store, as the runtime does."""
    store = PrefixStore(f"contacts of {ranks}", _get_default_store())
    store.set(str(dist.get_rank()), text)
    return [store.get(str(rank)).decode() for rank in ranks]


class Member:
    """One rank: what the runtime does with a watch, in small."""

    def __init__(self, rank: int, scene: Scene) -> None:
        self.rank, self.scene = rank, scene
        sockets = Sockets()
        with sockets.recording():
            groups = {ranks: dist.new_group(list(ranks)) for ranks in scene.rings}
        own = [group for ranks, group in groups.items() if rank in ranks]
        self.lane, self.dp = own[0], own[1] if len(own) > 1 else None
        self.line = next(line for line in scene.lines if rank in line)
        self.watch = Watch.join(
            [ring for ring in scene.rings if rank in ring], gather, rank=rank, name=name, deadline_s=scene.deadline_s
        )
        self.wait_s = PATIENT_S if scene.patient else scene.deadline_s
        self.watch.on_alarm(sockets.shut)

    def at(self, op: int, waits_for: int = -1) -> None:
        if self.watch.alarm is not None:
            raise self.watch.noticed()
        self.watch.slots[OP], self.watch.slots[WAITS_FOR] = op, waits_for

    def wait(self, launch: Callable[[], Any], what: str) -> None:
        try:
            launch().wait(timedelta(seconds=self.wait_s))
        except RuntimeError as error:
            raise self.watch.failed(error, what) from error

    def step(self, step: int) -> None:
        place, token = self.line.index(self.rank), torch.zeros(1)
        before, after = place - 1, (place + 1) % len(self.line)
        self.watch.slots[STEP] = step
        self.at(RECEIVE, self.line[before])
        if place > 0 or step > 0:
            self.wait(
                lambda: self.lane.recv([token], before % len(self.line), 0), f"token {step} from {self.line[before]}"
            )
        self.at(COMPUTE)
        time.sleep(0.005)
        if self.rank == self.scene.lost and step == FAULT_STEP:
            self.scene.note()
            meet_with(self.scene.fault, self.watch)
        self.at(SEND, self.line[after])
        self.wait(lambda: self.lane.send([token], after, 0), f"token {step} to {self.line[after]}")
        if self.dp is not None:
            self.at(REDUCE, waits_for_group(1))
            self.wait(lambda: dist.all_reduce(token, group=self.dp, async_op=True), f"sum {step}")
        self.watch.slots[OP], self.watch.slots[WAITS_FOR] = OUTSIDE, -1


def member(rank: int, scene: Scene) -> Told | None:
    def alone(kind: str) -> bytes:
        return os.urandom(16) if kind == "pid" else namespace_id(kind)

    with mock.patch.object(watch_module, "namespace_id", alone if scene.apart else namespace_id):
        here = Member(rank, scene)
    try:
        for step in range(1_000_000):
            here.step(step)
    except RankLostError as error:
        if scene.apart and scene.fault == "stop" and rank == 0:
            os.kill(int((scene.directory / "pid").read_text()), signal.SIGCONT)
        return Told(error.rank, error.kind, error.op, error.waiting_for, str(error), time.monotonic())
    except ValueError as error:
        here.watch.raised(error)
        raise
    return None


def all_tell(scene: Scene, kind: str) -> list[Outcome[Told | None]]:
    """All others name the lost rank: a hang soon after the deadline, anything else long before it."""
    fault = scene.directory / "time"
    return hold_to(
        fault,
        deadlines_for(scene.fault),
        lambda deadline_s: run_ranks(4, member, replace(scene, deadline_s=deadline_s), new=True),
        partial(judge, scene, kind, fault),
    )


def judge(
    scene: Scene, kind: str, fault: Path, outcomes: list[Outcome[Told | None]], deadline_s: float
) -> list[Outcome[Told | None]]:
    fault_s, allowed_s = float(fault.read_text()), SOON_S + (deadline_s if scene.fault in HANGS else 0.0)
    for told in check([outcome for outcome in outcomes if outcome.rank != scene.lost]):
        assert told is not None
        print(f"{told.at_s - fault_s:.2f} s: {told.text}")  # noqa: T201
        assert (told.rank, told.kind) == (scene.lost, kind)
        assert told.op == name(scene.lost, COMPUTE) or scene.apart
        assert told.at_s - fault_s < allowed_s
    return outcomes


@pytest.mark.parametrize(("place", "lost"), [(ring, 0), (ring, 2), (torus, 0), (torus, 3)])
def test_a_rank_is_killed(place: Callable[[int, str, Path], Scene], lost: int, tmp_path: Path) -> None:
    outcomes = all_tell(place(lost, "kill", tmp_path), "killed")
    assert outcomes[lost].exitcode == -signal.SIGKILL


def test_a_rank_is_killed_whose_child_holds_its_connections(tmp_path: Path) -> None:
    all_tell(ring(2, "kill with child", tmp_path), "killed")


@pytest.mark.parametrize(("place", "lost"), [(ring, 2), (torus, 0)])
def test_a_rank_is_stopped(place: Callable[[int, str, Path], Scene], lost: int, tmp_path: Path) -> None:
    outcomes = all_tell(place(lost, "stop", tmp_path), "hung")
    assert outcomes[lost].exitcode == -signal.SIGKILL, "its neighbour ends it"


def test_a_rank_is_stopped_before_anyone_waits_too_long(tmp_path: Path) -> None:
    all_tell(replace(ring(1, "stop", tmp_path), patient=True), "hung")


@pytest.mark.parametrize(("place", "lost"), [(ring, 0), (torus, 3)])
def test_a_rank_hangs_in_its_work(place: Callable[[int, str, Path], Scene], lost: int, tmp_path: Path) -> None:
    outcomes = all_tell(place(lost, "sleep", tmp_path), "hung")
    assert outcomes[lost].exitcode == EXIT_LOST, "it ends itself"
    assert f"rank {lost} did not react" in outcomes[lost].stderr


@pytest.mark.parametrize(("place", "lost"), [(ring, 2), (torus, 1)])
def test_a_rank_raises(place: Callable[[int, str, Path], Scene], lost: int, tmp_path: Path) -> None:
    outcomes = all_tell(place(lost, "raise", tmp_path), "raised")
    error, told = outcomes[lost].error, outcomes[0].value
    assert error is not None
    assert error.type == "ValueError"
    assert told is not None
    assert f"raised ValueError at C{lost} (step 3): the loss is nan. This rank (0) was at " in told.text


def test_a_rank_leaves_in_the_middle_of_a_step(tmp_path: Path) -> None:
    all_tell(ring(2, "leave", tmp_path), "left")


def test_a_rank_of_another_host_is_killed(tmp_path: Path) -> None:
    outcomes = all_tell(ring(2, "kill", tmp_path, apart=True), "killed")
    told = outcomes[0].value
    assert told is not None
    assert "killed, last seen " in told.text


def test_a_rank_of_another_host_is_stopped_and_comes_back(tmp_path: Path) -> None:
    outcomes = all_tell(ring(2, "stop", tmp_path, apart=True), "hung")
    assert outcomes[2].exitcode == EXIT_LOST, "nobody can kill it, but it must not go on"


def goes_in_turn(rank: int) -> bool:
    """Each rank ends some time after the one before; the odd ones without closing."""
    watch = Watch.join([range(dist.get_world_size())], gather, rank=rank, name=name, deadline_s=PATIENT_S)
    time.sleep(0.3 * (rank + 1))
    is_well = watch.alarm is None
    if rank % 2 == 0:
        watch.close()
        watch.close()
    return is_well


def test_goodbyes_are_no_losses() -> None:
    assert check(run_ranks(4, goes_in_turn, new=True)) == [True] * 4


def goes_on_between_steps(rank: int) -> str:
    """Rank 1 is killed while rank 0 is outside a step for longer than a main thread in a step would be given."""
    watch = Watch.join([range(dist.get_world_size())], gather, rank=rank, name=name, deadline_s=PATIENT_S)
    dist.barrier()  # rank 0 has seen rank 1's page
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3.6)
    until = time.monotonic() + SOON_S
    while watch.alarm is None and time.monotonic() < until:
        time.sleep(0.05)
    return str(watch.noticed())


def test_a_loss_between_steps_is_told_at_the_next() -> None:
    outcomes = run_ranks(2, goes_on_between_steps, new=True)
    assert outcomes[0].value == (
        "rank 1 was lost first: killed before its first step. This rank (0) was between steps."
    )
