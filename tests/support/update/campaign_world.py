"""The world of a campaign: workers that live on, watchers of each, and the ranks and agents that bring versions."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from shaped_link import ShapedLink
from tests.support.rank_pool import SHOW_STACKS
from tests.support.update.agents import AgentFleet, Bring, Calling, Outcome, free_port
from tests.support.update.crashes import Crash, act_at
from tests.support.update.log_watch import LogWatcher, Right, Watched, committed
from tests.support.update.workers import Asker, Workers, ask_once
from treadle.update import Source, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Answer
from treadle.weights.tensor_boxes import Holding

ENDS_S = 60.0
"""An attempt of ranks that live ends within so long, and so does a process that is interrupted."""

SERVES_S = 60.0
"""Within so long after an update that succeeded every worker serves."""

MOST_FIRST = 10
"""Tries to bring a first version, before any fault."""


class ViolationError(Exception):
    """Something is not as it is promised."""


@dataclass(frozen=True)
class Setup:
    """What a campaign plays against. `callers` ranks call; `agents`: each worker has one, else a rank of its own."""

    want: Holding
    make: Callable[[int, int], Source]
    right: Right
    compare: Callable[[int], Callable[[Any], list[str]]]
    """An order to a worker: name the tensors that differ from a version's."""
    callers: int
    agents: bool = False

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(range(len(self.want.pieces)))


@dataclass(frozen=True)
class BringUntil:
    """Brings a version with these options, and waits at a place of a phase until it may go on."""

    version: int
    options: UpdateOptions
    place: Crash | None = None
    signs: Path = Path()

    def __call__(self, updater: Updater, how: Calling) -> Outcome:
        updater.options = self.options
        if self.place is not None and self.place.rank == updater.rank:
            act_at(updater, self.place, self._wait)
        return Bring(self.version)(updater, how)

    def _wait(self) -> None:
        (self.signs / "there").touch()
        until = time.monotonic() + ENDS_S
        while not (self.signs / "go").exists() and time.monotonic() < until:
            time.sleep(0.002)


class World:
    """Workers, watchers, and ranks that can be lost. Attempts have versions of their own, each above all before."""

    def __init__(self, setup: Setup, options: UpdateOptions, link: ShapedLink | None) -> None:
        self.setup, self.options, self.link = setup, options, link
        self.workers = Workers(setup.want)
        self.away: set[int] = set()
        """Workers that are gone, or on a host that is."""
        self.version = self.draws = self.tries = 0
        self.reached = True
        """Whether the last draw's update came to its place."""
        self.errors: list[str] = []
        """Those of the last draw's updates."""
        self.logged: set[int] = set()
        """Versions that were committed."""
        self._timers: list[threading.Timer] = []
        self._key = self.workers.directory / "key"
        self._key.write_text(secrets.token_hex(32))
        self._key.chmod(0o600)
        right, places = setup.right, (self.workers.sockets, self.workers.ledger)
        self.watchers = [LogWatcher(*places, worker, right) for worker in setup.workers]
        self.fleet = self.new_fleet()
        self.start_ranks()
        while errors := self.update(options):
            if self.version > MOST_FIRST:
                raise RuntimeError(f"no first version is brought: {errors}")

    # ---- ranks and agents --------------------------------------------------------------------------------------------

    def new_fleet(self) -> AgentFleet:
        fleet = AgentFleet(self.workers, self.setup.make, self.options)
        num = self.setup.callers
        fleet.how = replace(fleet.how, link=self.link, key=self._key, num=num, port=free_port())
        return fleet

    def start_ranks(self, fleet: AgentFleet | None = None, *, takeover: bool = False) -> None:
        """Start the ranks that call, and agents that are not there, for all workers that are not away."""
        fleet = fleet if fleet is not None else self.fleet
        speaks = tuple(worker for worker in self.setup.workers if worker not in self.away)
        if self.setup.agents:
            self.start_agents(fleet)
            fleet.call(self.setup.callers, agents=len(speaks), takeover=takeover)
        else:
            fleet.how = replace(fleet.how, port=free_port())
            fleet.call(len(speaks), speaks=speaks, takeover=takeover)

    def start_agents(self, fleet: AgentFleet | None = None) -> None:
        fleet = fleet if fleet is not None else self.fleet
        for worker in self.setup.workers:
            if worker not in self.away and (worker not in fleet.agents or not fleet.agents[worker].is_alive()):
                fleet.start_agent(worker)

    def restart_ranks(self, *, takeover: bool = False) -> None:
        self.fleet.kill_callers()
        self.start_ranks(takeover=takeover)

    def processes(self, whom: str, number: int) -> list[ForkServerProcess]:
        """Those that a fault is for: `number` says which."""
        if whom == "worker":
            return [self.workers.processes[number]]
        if whom == "agent":
            return [self.fleet.agents[number]]
        callers = [process for process, _ in self.fleet.callers]
        return callers if whom == "all" else [callers[0 if whom == "coordinator" else number % len(callers)]]

    def host(self, whom: str, number: int) -> int:
        """The host of a rank or an agent."""
        return self.setup.callers + number if whom == "agent" else number % len(self.fleet.callers)

    @property
    def is_broken(self) -> bool:
        return not self.fleet.callers or not all(process.is_alive() for process, _ in self.fleet.callers)

    # ---- attempts ----------------------------------------------------------------------------------------------------

    @property
    def signs(self) -> Path:
        return self.workers.directory / f"signs{self.draws}"

    def begin(self, options: UpdateOptions, place: Crash | None = None, fleet: AgentFleet | None = None) -> None:
        self.version += 1
        (fleet or self.fleet).begin(BringUntil(self.version, options, place, self.signs))

    def await_place(self) -> bool:
        """Wait until the ranks are where they wait; False where the attempt has ended before."""
        pipes: list[Any] = [part for process, pipe in self.fleet.callers for part in (pipe, process.sentinel)]
        while not (self.signs / "there").exists():
            if connection.wait(pipes, 0.003):
                return False
        return True

    def go_on(self) -> None:
        (self.signs / "go").touch()

    def outcomes(self, fleet: AgentFleet | None = None) -> list[Outcome]:
        """What the attempt came to, of ranks that live. Raises ViolationError where it does not end."""
        fleet = fleet if fleet is not None else self.fleet
        found, until = list[Outcome](), time.monotonic() + ENDS_S
        for process, pipe in fleet.callers:
            if not connection.wait([pipe, process.sentinel], max(0.0, until - time.monotonic())):
                os.kill(process.pid or 0, SHOW_STACKS)
                raise ViolationError(f"process {process.pid} neither ends its attempt nor itself within {ENDS_S:g} s")
            found += _received(pipe)
        self.errors += {outcome.error for outcome in found if outcome.error}
        self.logged.add(committed(self.workers.ledger))
        self.logged |= {outcome.version for outcome in found}
        return found

    def update(self, options: UpdateOptions) -> list[str]:
        """The errors of an update, by new ranks where any was lost."""
        if self.is_broken:
            try:
                self.restart_ranks()
            except EOFError:
                self.fleet.kill_callers()
                return ["the ranks could not start"]
        self.begin(options)
        outcomes = self.outcomes()
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if any("start the update ranks again" in error for error in errors):
            self.fleet.kill_callers()
        return errors if len(outcomes) >= len(self.fleet.callers) else [*errors, "a rank has ended"]

    # ---- workers -----------------------------------------------------------------------------------------------------

    def revive(self) -> None:
        """Start workers and agents that have ended, but for those that are away."""
        for worker in self.setup.workers:
            if worker not in self.away and not self.workers.processes[worker].is_alive():
                self.workers.restart(worker)
        if self.setup.agents and self.fleet.callers:
            self.start_agents()

    def version_of(self, worker: int) -> int | None:
        """The version that a worker serves."""
        answer = ask_once(self.workers.sockets, worker)
        return answer.version if isinstance(answer, Answer) else None

    def unserved(self, version: int) -> dict[int, int | None]:
        """Workers that do not serve a version, and what they serve."""
        served = {worker: self.version_of(worker) for worker in self.setup.workers if worker not in self.away}
        return {worker: found for worker, found in served.items() if found != version}

    def await_served(self, version: int) -> None:
        """Wait until all workers serve a version; under leases, ranks without agents recover those left out."""
        until = time.monotonic() + SERVES_S
        while unserved := self.unserved(version):
            if time.monotonic() > until:
                raise ViolationError(f"closed for good, by worker {unserved}, not {version}: {self.states()}")
            if self.options.lease_s is not None and not self.setup.agents:
                self.fleet.begin(Bring(0))
                self.outcomes()
            time.sleep(0.1)

    def compare(self, version: int) -> None:
        """Compare every element of the workers with the version's."""
        order = self.setup.compare(version)
        for worker in self.setup.workers:
            if worker not in self.away and (names := self.workers.tell(worker, order)):
                raise ViolationError(f"worker {worker} differs from version {version} in {names}")

    def states(self) -> list[str]:
        """How the workers stand, for people."""
        found = []
        for worker in self.setup.workers:
            with suppress(Exception):
                asker = Asker(self.workers.sockets, worker)
                status = asker.status()
                asker.close()
                about = f"attempt {status.epoch}, staged {status.staged}, process {status.pid}"
                found.append(f"worker {worker}: {status.state} {status.version}, {about}")
        return found

    def watched(self) -> Watched:
        """What watchers have seen since the last time."""
        for watcher in self.watchers:
            watcher.ask()
        all_seen = Watched()
        for watcher in self.watchers:
            seen = watcher.report()
            all_seen.answers += seen.answers
            all_seen.refused += seen.refused
            all_seen.wrong += seen.wrong
            self.logged |= seen.logged
        strange = sorted(all_seen.answers.keys() - self.logged)
        all_seen.wrong += [f"version {version} was served and never committed" for version in strange]
        return all_seen

    # ---- time --------------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Undo a fault after a while."""
        timer = threading.Timer(delay_s, call)
        timer.start()
        self._timers.append(timer)

    def settle(self) -> None:
        """Wait until all faults are undone."""
        while self._timers:
            self._timers.pop().join()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
        for watcher in self.watchers:
            watcher.close()
        self.fleet.__exit__(None, None, None)
        for process in self.workers.processes.values():
            process.kill()
        self.workers.__exit__(None, None, None)


def _received(pipe: Connection) -> list[Outcome]:
    with suppress(EOFError, ConnectionResetError):
        if pipe.poll():
            return [pipe.recv()]
    return []
