"""Agents join and leave: an update goes to those that are there, and whoever comes back is brought up to date."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from functools import cache

import pytest

from tests.support.command import TREADLE
from tests.support.patience import PATIENT_S
from tests.support.update.agents import AgentFleet
from tests.support.update.models import SMALL, Compare, SourceMaker, model
from tests.support.update.workers import Trouble, Workers, ask_once
from treadle.update import UpdateOptions
from treadle.update.protocol.update_messages import Answer
from treadle.weights.layouts import Parallel, spread
from treadle.weights.tensor_boxes import Holding

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)
LEASED = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=0.5, lease_s=3.0, policy=2)


@cache
def replicas(num: int) -> Holding:
    return Parallel(replicas=num).holding(model(1, 32))


def fleet(workers: Workers, options: UpdateOptions = OPTIONS, callers: int = 1) -> AgentFleet:
    return AgentFleet(workers, SourceMaker(spread(model(1, 32), callers)), options)


def served(workers: Workers, worker: int) -> int:
    answer = ask_once(workers.sockets, worker)
    assert isinstance(answer, Answer), answer
    return answer.version


@pytest.mark.parametrize("transfer", ["broadcast", "targeted"])
def test_every_byte_arrives_by_agents_with_gaps_in_their_numbers(transfer: str) -> None:
    """Two callers; the agents of workers 0 and 2, while worker 1 is of no set yet; then that one joins, too."""
    with Workers(Parallel(tp=3, dim=lambda name: 0).holding(model(1, 48))) as workers:
        make = SourceMaker(spread(model(1, 48), 2))
        options = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1, transfer=transfer)  # type: ignore[arg-type]
        with AgentFleet(workers, make, options) as fleet:
            for worker in (0, 2):
                fleet.start_agent(worker)
            fleet.call(num=2, agents=2)
            assert not fleet.update(1).error
            assert [workers.tell(worker, Compare(1)) for worker in (0, 2)] == [[], []]
            fleet.start_agent(1)
            version = fleet.update_until_served(1, 2)
            assert [workers.tell(worker, Compare(version)) for worker in range(3)] == [[], [], []]


def test_an_agent_that_is_lost_joins_again_and_no_other_rank_is_started_again() -> None:
    with Workers(replicas(2)) as workers, fleet(workers) as agents:
        for worker in range(2):
            agents.start_agent(worker)
        agents.call(agents=2)
        assert not agents.update(1).error
        agents.kill_agent(1)
        lost = agents.update(2)
        assert lost.who.startswith("worker 1 (process"), lost
        assert "none speaks for this one" in lost.error
        assert [served(workers, worker) for worker in range(2)] == [1, 1]
        agents.start_agent(1)
        assert not agents.update_soon(2).error
        assert [workers.tell(worker, Compare(2)) for worker in range(2)] == [[], []]


def test_an_agent_that_is_lost_in_mid_load_is_named_and_the_next_update_succeeds() -> None:
    with Workers(replicas(2)) as workers, fleet(workers) as agents:
        for worker in range(2):
            agents.start_agent(worker)
        agents.call(agents=2)
        assert not agents.update(1).error
        workers.tell(1, Trouble("hang", "load", hang_s=3.0))
        agents.begin(2)
        agents.await_state(1, "loading")
        agents.kill_agent(1)
        lost = agents.outcome()
        assert "update rank 2 (process" in lost.who, lost
        assert "lost" in lost.error
        agents.start_agent(1)
        assert not agents.update_soon(3).error
        assert [workers.tell(worker, Compare(3)) for worker in range(2)] == [[], []]


@pytest.mark.parametrize("options", [OPTIONS, LEASED], ids=["without leases", "under leases"])
def test_a_worker_that_started_again_is_filled_by_its_peer_and_nobody_asks_for_it(options: UpdateOptions) -> None:
    with Workers(replicas(2)) as workers, fleet(workers, options) as agents:
        for worker in range(2):
            agents.start_agent(worker)
        agents.call(agents=2)
        assert not agents.update(1).error
        workers.restart(1)
        agents.await_version(1, 1)
        assert workers.tell(1, Compare(1)) == []
        assert not agents.update_soon(2).error
        assert [workers.tell(worker, Compare(2)) for worker in range(2)] == [[], []]


def test_a_fleet_goes_on_without_a_lost_host_and_takes_it_back() -> None:
    with Workers(replicas(3)) as workers, fleet(workers, LEASED) as agents:
        for worker in range(3):
            agents.start_agent(worker)
        agents.call(agents=3)
        assert not agents.update(1).error
        workers.kill(2)
        agents.kill_agent(2)
        went_on = agents.update(2)
        assert not went_on.error
        assert any("worker 2 is left out, and its lease is over" in note for note in went_on.notes), went_on
        workers.start(2)
        workers.await_up(2)
        agents.start_agent(2)
        agents.await_version(2, 2)
        assert [workers.tell(worker, Compare(2)) for worker in range(3)] == [[], [], []]


def test_an_agent_that_hangs_is_left_out_where_the_policy_allows_it() -> None:
    options = UpdateOptions(SMALL, deadline_s=5.0, drain_s=0.5, lease_s=3.0, policy=1)
    with Workers(replicas(2)) as workers, fleet(workers, options) as agents:
        for worker in range(2):
            agents.start_agent(worker)
        agents.call(agents=2)
        assert not agents.update_soon(1).error
        pid = agents.agents[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        went_on = agents.update_soon(2)
        assert any("worker 1 is left out" in note for note in went_on.notes), went_on
        assert served(workers, 0) == 2
        os.kill(pid, signal.SIGCONT)
        agents.await_version(1, 2)
        assert workers.tell(1, Compare(2)) == []


def test_agents_outlive_the_ranks_that_call_and_join_the_next_ones() -> None:
    with Workers(replicas(2)) as workers, fleet(workers) as agents:
        for worker in range(2):
            agents.start_agent(worker)
        pids = [agents.agents[worker].pid for worker in range(2)]
        for version in (1, 2):
            agents.call(agents=2)
            assert not agents.update(version).error
            assert [served(workers, worker) for worker in range(2)] == [version, version]
            agents.kill_callers()
        assert [agents.agents[worker].pid for worker in range(2)] == pids
        assert all(agents.agents[worker].is_alive() for worker in range(2))


def test_agents_meet_the_coordinator_behind_a_key() -> None:
    with Workers(replicas(1)) as workers:
        key = workers.directory / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        with AgentFleet(workers, SourceMaker(replicas(1)), OPTIONS, key) as agents:
            agents.start_agent(0)
            agents.call(agents=1)
            assert not agents.update(1).error
            assert workers.tell(0, Compare(1)) == []


def test_the_command_is_an_agent_until_it_is_interrupted() -> None:
    with Workers(replicas(1)) as workers, fleet(workers) as agents:
        at = f"127.0.0.1:{agents.how.port}"
        command = [TREADLE, "agent", "--to", str(workers.sockets), "--at", at]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            agents.call(agents=1)
            assert not agents.update(1).error
            assert workers.tell(0, Compare(1)) == []
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENT_S)
        assert process.returncode == 0, said
        assert "worker 0: joined as update rank 1" in said
        assert "worker 0: version 1" in said
        assert "Traceback" not in said


def test_too_few_agents_are_counted_and_named() -> None:
    options = UpdateOptions(SMALL, deadline_s=2.0, drain_s=0.5)
    with Workers(replicas(1)) as workers, fleet(workers, options) as agents:
        agents.call(agents=1)
        missed = agents.update(1)
        assert missed.who == "the agents", missed
        assert "0 of 1 have joined within" in missed.error
        assert "treadle agent" in missed.error
