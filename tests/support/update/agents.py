"""Agents in processes of their own, and the ranks that call them, each of which can be killed and started again."""

from __future__ import annotations

import faulthandler
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shaped_link import ShapedLink
from tests.support import devices
from tests.support.network_spaces import move_to
from tests.support.patience import PATIENT_S
from tests.support.rank_pool import SHOW_STACKS, server
from tests.support.update.workers import Asker, Workers, _end_with_parent, ask_once
from treadle.dist.rank_world import RankWorld
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.update.agent import Agent, Meeting
from treadle.update.protocol.update_messages import Answer


@dataclass(frozen=True)
class Calling:
    """How ranks call: `num` of them, at a port, with these weights, after `agents` agents have joined.

    `speaks`: the worker of each rank, where no agents do. `link`: each rank, and then each agent, is on its own host.
    """

    sockets: Path
    ledger: Path
    port: int
    make: Callable[[int, int], Source]
    options: UpdateOptions
    num: int = 1
    agents: int = 0
    takeover: bool = False
    key: Path | None = None
    speaks: tuple[int, ...] = ()
    link: ShapedLink | None = None

    @property
    def address(self) -> str:
        return self.link.address(0) if self.link is not None else "127.0.0.1"

    def enter(self, host: int) -> None:
        """Become a process of a host, that ends with its parent."""
        torch.set_num_threads(1)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        faulthandler.register(SHOW_STACKS, all_threads=True)
        if self.link is not None:
            move_to(self.link, host)


Order = Callable[[Updater, Calling], "Outcome"]
"""What a calling rank does."""


@dataclass(frozen=True)
class Outcome:
    """What an update came to on rank 0."""

    error: str = ""
    notes: tuple[str, ...] = ()
    who: str = ""
    version: int = 0


def _agent_main(worker: int, how: Calling) -> None:
    how.enter(how.num + worker)
    devices.enter(worker)
    Agent(how.sockets, worker, Meeting(how.address, how.port, str(how.key) if how.key is not None else None)).run()


def _caller_main(rank: int, how: Calling, pipe: Connection) -> None:
    how.enter(rank)
    devices.enter(rank)
    if rank == 0:
        world = RankWorld.host(how.num, how.address, how.port)
    else:
        world = RankWorld.join(how.address, how.port, rank, how.num)
    with Updater(
        how.sockets,
        ledger=how.ledger,
        worker=how.speaks[rank] if how.speaks else None,
        options=how.options,
        world=world,
        agents=how.agents,
        takeover=how.takeover,
        key=how.key,
    ) as updater:
        pipe.send("up")
        while True:
            order: Order = pipe.recv()
            pipe.send(order(updater, how))


@dataclass(frozen=True)
class Bring:
    """Brings a version, or, if that is 0, the committed one to workers that do not serve it."""

    version: int

    def __call__(self, updater: Updater, how: Calling) -> Outcome:
        try:
            if self.version:
                done = updater.update(how.make(updater.rank, self.version), self.version)
            else:
                done = updater.recover()
            return Outcome(notes=done.notes, version=done.version)
        except UpdateError as error:
            return Outcome(str(error), who=error.who)


class AgentFleet:
    """Agents beside workers, and the ranks that call."""

    def __init__(
        self, workers: Workers, make: Callable[[int, int], Source], options: UpdateOptions, key: Path | None = None
    ) -> None:
        self.workers = workers
        self.how = Calling(workers.sockets, workers.ledger, free_port(), make, options, key=key)
        self.agents: dict[int, ForkServerProcess] = {}
        self.callers: list[tuple[ForkServerProcess, Connection]] = []

    def start_agent(self, worker: int) -> None:
        process = server().Process(target=_agent_main, args=(worker, self.how), daemon=True)
        process.start()
        self.agents[worker] = process

    def kill_agent(self, worker: int) -> None:
        process = self.agents.pop(worker)
        process.kill()
        process.join()

    def call(self, num: int = 1, agents: int = 0, **how: Any) -> None:
        """Start the ranks that call."""
        self.how = Calling(**{**vars(self.how), "num": num, "agents": agents, **how})
        for rank in range(num):
            mine, theirs = server().Pipe()
            process = server().Process(target=_caller_main, args=(rank, self.how, theirs), daemon=True)
            process.start()
            theirs.close()
            self.callers.append((process, mine))
        for _, pipe in self.callers:
            assert pipe.poll(PATIENT_S)
            assert pipe.recv() == "up"

    def kill_callers(self) -> None:
        for process, pipe in self.callers:
            process.kill()
            process.join()
            pipe.close()
        self.callers = []

    def begin(self, order: int | Order) -> None:
        """Have the ranks that call follow an order, or update to a version."""
        for _, pipe in self.callers:
            with suppress(BrokenPipeError):
                pipe.send(Bring(order) if isinstance(order, int) else order)

    def outcome(self) -> Outcome:
        outcomes = list[Outcome]()
        for _, pipe in self.callers:
            assert pipe.poll(PATIENT_S)
            outcomes.append(pipe.recv())
        return outcomes[0]

    def update(self, version: int) -> Outcome:
        self.begin(version)
        return self.outcome()

    def update_soon(self, version: int) -> Outcome:
        """Try until an update succeeds: an agent may still have to join."""
        until = time.monotonic() + PATIENT_S
        while True:
            outcome = self.update(version)
            if not outcome.error or time.monotonic() > until:
                return outcome
            time.sleep(0.2)

    def update_until_served(self, worker: int, version: int) -> int:
        """Update until a worker takes part; the version that it serves then."""
        until = time.monotonic() + PATIENT_S
        while time.monotonic() < until:
            outcome = self.update(version)
            if not outcome.error and isinstance(ask_once(self.workers.sockets, worker), Answer):
                return version
            version += 1
        raise AssertionError(f"worker {worker} takes part in no update")

    def await_state(self, worker: int, state: str) -> None:
        """Wait until a worker is in a state."""
        until = time.monotonic() + PATIENT_S
        while time.monotonic() < until:
            asker = Asker(self.workers.sockets, worker)
            now = asker.status().state
            asker.close()
            if now == state:
                return
            time.sleep(0.02)
        raise AssertionError(f"worker {worker} is {now}")

    def await_version(self, worker: int, version: int) -> None:
        """Wait until a worker serves a version."""
        until, last = time.monotonic() + PATIENT_S, None
        while time.monotonic() < until:
            last = ask_once(self.workers.sockets, worker)
            if isinstance(last, Answer) and last.version == version:
                return
            time.sleep(0.1)
        raise AssertionError(f"worker {worker} does not serve version {version}: {last}")

    def __enter__(self) -> AgentFleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill_callers()
        for worker in list(self.agents):
            self.kill_agent(worker)


def free_port() -> int:
    """A port that the system gives to nobody by itself; a store will listen there, and later another one."""
    for port in random.sample(range(20_000, 30_000), 100):
        try:
            world = RankWorld.host(1, port=port)
        except Exception:  # stores raise various types
            continue
        del world
        return port
    raise AssertionError("no port is free")
