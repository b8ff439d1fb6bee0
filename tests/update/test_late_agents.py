"""Agents that are late or cannot join: an update waits for one once, and answers to an earlier call end none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from treadle.cli.commands.agent import agent as agent_command
from treadle.dist.clock import host_number
from treadle.dist.rank_world import RankWorld
from treadle.update import agent as agent_module
from treadle.update.agent import Agent, Meeting
from treadle.update.protocol.attempt import Attempt
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
from treadle.update.rank.rendezvous import CoordinatorContact, Rendezvous
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


def test_ranks_with_buffers_on_other_devices_are_refused_before_they_make_a_group(place: Path) -> None:
    """One kind would make a group of gloo and the other one of NCCL, and both would wait for its deadline."""
    store = HashStore()
    first = Rendezvous(place, None, RankWorld(store, 0, 2), UpdateOptions())
    other = Rendezvous(place, None, RankWorld(store, 1, 2), UpdateOptions(), device="cuda")
    first._publish(CoordinatorContact(number=host_number(), world=2, device=first.device))
    with pytest.raises(ValueError, match="rank 0 are on cpu and this rank's on cuda, so they would make different"):
        other.call(1.0)


class JoinedError(Exception):
    """With the device of the updater that an agent would make."""


@pytest.mark.parametrize(("theirs", "own"), [("cpu", None), ("cuda", torch.device("cuda", 3))])
def test_an_agents_buffers_are_where_those_of_the_ranks_that_call_are(
    theirs: str, own: torch.device | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = RankWorld(HashStore(), 0, 1)
    caller = Rendezvous(place, None, world, UpdateOptions(), device=theirs)
    caller._publish(CoordinatorContact(number=host_number(), world=1, device=caller.device))
    caller._store.set("newest", caller.name)

    def made(directory: Path, **given: Any) -> None:
        raise JoinedError(given["device"])

    monkeypatch.setattr(RankWorld, "join", lambda *_: world)
    monkeypatch.setattr(agent_module, "Updater", made)
    joining = Agent(place, 0, Meeting("127.0.0.1", 1, None), torch.device("cuda", 3), lambda text: None)
    with pytest.raises(JoinedError) as joined:
        joining._join()
    assert joined.value.args == (own,)


@pytest.mark.parametrize(
    ("worker", "local", "gpu"), [(0, {}, 0), (3, {}, 3), (11, {}, 3), (11, {"LOCAL_RANK": "5"}, 5)]
)
def test_an_agents_gpu_is_its_workers_on_any_host(
    worker: int, local: dict[str, str], gpu: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are counted over all hosts, of 8 GPUs each: eight agents of a host are on eight GPUs."""
    made: list[torch.device | None] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(os, "environ", local)
    monkeypatch.setattr(Agent, "run", lambda self: made.append(self.device))
    agent_command(place, "127.0.0.1:1", worker)
    assert made == [torch.device("cuda", gpu)]
