"""Agents that are late or cannot join: an update waits for one once, and answers to an earlier call end none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from treadle.dist.rank_world import RankWorld
from treadle.update.protocol.attempt import Attempt, AttemptRefusedError
from treadle.update.protocol.buffer_device import BufferDevice, common_device
from treadle.update.protocol.control import Asked, Call, Enter, Fault, Go
from treadle.update.protocol.coordinator_decisions import (
    CoordinatorState,
    Open,
    Step,
    Tell,
    hear,
    leave_out,
    opened,
    stop,
)
from treadle.update.protocol.leases import Leases
from treadle.update.protocol.record import Record
from treadle.update.protocol.update_messages import Status
from treadle.update.rank.rendezvous import Rendezvous
from treadle.update.update_options import UpdateOptions

RECORD = Record(1, (1,), "A", term=1, lease_ns=10)
START = CoordinatorState(1, Attempt(1), leases=Leases(10, 1), agents=frozenset({1, 2}))
"""A rank that calls, and two agents, of which one is enough."""


def asked(version: int) -> Asked:
    return Asked("update", version)


def entry(state: CoordinatorState, rank: int, version: int, call: int = 0) -> Enter:
    if rank == 0:
        return Enter(None, asked(version), "", "", None, 0)
    status = Status(rank - 1, rank, "serving", 1, 1, 0, log="A", origin="A", content=1, incarnation=f"w{rank}")
    return Enter(rank - 1, asked(version), "", "", status, 0, call=call or state.attempt.call)


def called(step: Step) -> set[int]:
    return {rank for act in step[1] if isinstance(act, Tell) and isinstance(act.message, Call) for rank in act.ranks}


def begun(state: CoordinatorState, version: int, *agents: int) -> Step:
    """The caller and these agents have entered."""
    step = hear(state, 0, entry(state, 0, version), RECORD)
    for agent in agents:
        step = hear(step[0], agent, entry(step[0], agent, version), RECORD)
    return step


def gone_on(version: int = 2) -> CoordinatorState:
    """An attempt that has gone on without agent 2, which was late."""
    state, _ = begun(START, version, 1)
    step = leave_out(state, "is stopped", RECORD, 0)
    assert step is not None
    (action,) = step[1]
    assert isinstance(action, Open)
    state, (go,) = opened(step[0], 7, RECORD)
    assert isinstance(go, Tell)
    assert isinstance(go.message, Go)
    assert go.message.cast == (0, 1)
    return state


def test_a_late_agent_is_waited_for_once() -> None:
    state = gone_on()
    over, _ = stop(state, state.attempt.fault("worker 0", "trouble"))
    step = hear(over, 0, entry(over, 0, 3), RECORD)
    assert called(step) == {1}
    assert step[0].attempt.left_out == {2: "is stopped"}
    _, (action,) = hear(step[0], 1, entry(step[0], 1, 3), RECORD)
    assert isinstance(action, Open), "it waits for nobody else"


def test_a_late_agent_that_is_heard_again_is_called_again() -> None:
    state = gone_on()
    late, (turned_away,) = hear(state, 2, entry(state, 2, 2), RECORD)
    assert isinstance(turned_away, Tell)
    assert isinstance(turned_away.message, Fault)
    assert turned_away.message.call == 1
    assert late.attempt == state.attempt, "the attempt goes on"
    over, _ = stop(late, late.attempt.fault("worker 0", "trouble"))
    assert called(hear(over, 0, entry(over, 0, 3), RECORD)) == {1, 2}


def test_an_agent_that_gives_up_an_earlier_call_ends_no_other_attempt() -> None:
    """It has entered by its call, whose attempt was over before it had a number."""
    first, _ = begun(START, 2, 2)
    over, _ = stop(first, first.attempt.fault("update rank 1", "late"))
    state, (action,) = begun(over, 3, 1, 2)
    assert isinstance(action, Open)
    state, _ = opened(state, 7, RECORD)
    gives_up = Fault(0, "update rank 2", "enter", -1, "no answer came", call=1)
    assert hear(state, 2, gives_up, RECORD) == (state, [])
    ended, told = hear(state, 2, replaced(gives_up, call=2), RECORD)
    assert ended.attempt.is_idle
    assert told, "of this call it is heard"


def replaced(fault: Fault, call: int) -> Fault:
    return Fault(fault.epoch, fault.who, fault.phase, fault.bucket, fault.text, call=call)


def test_an_agent_that_cannot_start_is_no_failure_of_the_ranks_that_call(place: Path) -> None:
    store = HashStore()
    caller = Rendezvous(place, None, RankWorld(store, 0, 1), UpdateOptions())
    caller._store.set("newest", caller.name)
    agent = Rendezvous(place, None, RankWorld(store, 3, 1), UpdateOptions())
    with pytest.raises(ValueError, match="no worker"), agent.published():
        raise ValueError("no worker")
    assert caller.start_failure() is None


CUDA, GLOO = BufferDevice("cuda", "nccl", "sends from", "cuda"), BufferDevice(why="serves on")


@pytest.mark.parametrize(
    ("devices", "common"),
    [
        ([CUDA, msgspec.structs.replace(CUDA, why="serves on")], "cuda"),
        ([CUDA, BufferDevice(accelerator="cuda")], "cuda"),
        ([BufferDevice(accelerator="cuda"), GLOO], "cpu"),
        ([BufferDevice(why="is given"), CUDA, GLOO], "cpu"),
        ([BufferDevice(accelerator="cuda")], "cpu"),
    ],
)
def test_buffers_are_where_elements_are_sent_from_and_served(devices: list[BufferDevice], common: str) -> None:
    assert common_device(dict(enumerate(devices))) == common


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ([CUDA, CUDA, GLOO], "rank 0 sends from cuda (nccl), rank 2 serves on cpu (gloo): "),
        ([CUDA, BufferDevice()], "rank 0 sends from cuda (nccl), rank 1 has cpu (gloo): "),
        ([GLOO, msgspec.structs.replace(CUDA, why="is given")], "rank 1 is given cuda (nccl), rank 0 serves on cpu"),
    ],
)
def test_ranks_on_different_devices_are_refused_before_they_make_a_group(
    devices: list[BufferDevice], told: str
) -> None:
    """One kind would make a group of gloo and the other one of NCCL, and both would wait for its deadline."""
    status = Status(0, 1, "serving", 1, 1, 0, log="A", origin="A", content=1, incarnation="w")
    asked = Asked("update", 2)
    entered = {
        rank: Enter(None if rank else 0, asked, "", "", None if rank else status, 0, device=device)
        for rank, device in enumerate(devices)
    }
    with pytest.raises(AttemptRefusedError, match=re.escape(told)) as refused:
        Attempt(len(devices), entered=entered).refuse_entries(RECORD, Leases())
    assert "Updater(..., device=torch.device('cpu'))" in str(refused.value)


def test_a_group_of_another_device_is_not_used_again() -> None:
    status = Status(0, 1, "serving", 1, 1, 0, log="A", origin="A", content=1, incarnation="w")
    entry = Enter(0, Asked("update", 2), "", "", status, 5, device=GLOO)
    attempt = Attempt(1, epoch=7, phase="settle", entered={0: entry}, grouped=(5, (0,), "cpu"))
    assert attempt.with_group().grouped[0] == 5
    moved = replace(attempt, entered={0: msgspec.structs.replace(entry, device=CUDA)})
    assert moved.with_group().grouped == (7, (0,), "cuda")


@pytest.mark.parametrize(("can_export", "calls"), [(True, {1, 2}), (False, set())])
def test_a_recovery_begins_where_engines_can_give_what_they_hold(can_export: bool, calls: set[int]) -> None:
    """Else it is refused, and would be again every five seconds."""
    status = Status(1, 9, "lapsed", None, 0, 0, incarnation="new", can_export=can_export)
    assert called(hear(START, 2, status, RECORD)) == calls


def test_workers_that_are_all_away_are_named() -> None:
    entered = {rank: Enter(rank, Asked("update", 2), "", "", None, 0, away="nobody answers") for rank in range(2)}
    with pytest.raises(AttemptRefusedError, match="no worker takes part; worker 0: nobody answers; worker 1: nobody"):
        Attempt(2, entered=entered).refuse_entries(RECORD, Leases())
