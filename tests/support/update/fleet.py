"""A fleet under leases: ranks that follow a script, and a hand that does to workers what the script says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from tests.support.patience import PATIENT_S
from tests.support.update.crashes import Crash, arm
from tests.support.update.faults import Seen
from tests.support.update.models import SMALL
from tests.support.update.workers import Asker, Troubled, Workers
from tests.support.watching import Watching
from treadle.host.processes import stopped
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Answer
from treadle.wire.errors import PeerGoneError

LEASE_S = 5.0

Make = Callable[[int, int], Source]


def options(least: int, deadline_s: float = PATIENT_S) -> UpdateOptions:
    return UpdateOptions(SMALL, deadline_s=deadline_s, drain_s=0.5, lease_s=LEASE_S, policy=least)


@dataclass(frozen=True)
class Step:
    """Orders to the hand, in turn; then an update to `version`, or, if that is 0, recoveries until `serving` do."""

    orders: tuple[str, ...] = ()
    version: int = 0
    serving: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fleet:
    """Where the workers and the log are, what the ranks' weights are, and how many replicas an update needs."""

    sockets: Path
    ledger: Path
    hand: Path
    make: Make
    least: int
    deadline_s: float = PATIENT_S


def follow(rank: int, fleet: Fleet, script: tuple[Step, ...], crash: Crash | None = None) -> list[tuple[str, ...]]:
    """One update rank: the notes of each step's last attempt."""
    notes = []
    how = options(fleet.least, fleet.deadline_s)
    with Updater(fleet.sockets, ledger=fleet.ledger, options=how) as updater:
        arm(updater, crash, None, fleet.hand / "mark")
        for number, step in enumerate(script):
            dist.barrier()
            if rank == 0:
                for order in step.orders:
                    _bid(fleet.hand, f"{number} {order}")
            dist.barrier()
            notes.append(_take(updater, fleet, step, number))
    return notes


def _take(updater: Updater, fleet: Fleet, step: Step, number: int) -> tuple[str, ...]:
    """Try until the step has been taken; all ranks fail alike."""
    until, tries = time.monotonic() + PATIENT_S, 0
    while True:
        tries += 1
        try:
            if step.version:
                return updater.update(fleet.make(updater.rank, step.version), step.version).notes
            notes = updater.recover().notes
            said = [_bid(fleet.hand, f"{number}.{tries} serving") if updater.rank == 0 else ""]
            dist.broadcast_object_list(said)
            if {str(worker) for worker in step.serving} <= set(said[0].split()):
                return notes
            assert time.monotonic() < until, f"{said[0]} serve"
        except UpdateError as error:
            if "start the update ranks again" in str(error) or time.monotonic() > until:
                raise
        time.sleep(0.1)


def _bid(hand: Path, order: str) -> str:
    """Have the hand do something; its answer."""
    asked, done = hand / order.replace(" ", "_"), hand / f"{order.replace(' ', '_')}.done"
    asked.touch()
    while not done.exists():
        time.sleep(0.01)
    return done.read_text()


@dataclass
class Hand(Watching):
    """Does to workers what ranks ask for, and asks all workers all the time.

    `cut`: the worker lives, answers at another path, and its rank does not find it.
    """

    workers: Workers
    restarts: bool = False
    seen: list[Seen] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)
    _askers: dict[int, Asker] = field(default_factory=dict)
    _paused: set[int] = field(default_factory=set)

    @property
    def place(self) -> Path:
        return self.workers.directory / "hand"

    @property
    def elsewhere(self) -> Path:
        return self.workers.directory / "e"

    def __enter__(self) -> Hand:
        for path in (self.place, self.elsewhere):
            path.mkdir(mode=0o700, exist_ok=True)
        return super().__enter__()

    def _run(self) -> None:
        while not self._stop.is_set():
            for path in sorted(self.place.iterdir()):
                if path.suffix != ".done" and path.name != "mark" and not path.with_name(f"{path.name}.done").exists():
                    self._do(path)
            for worker in range(len(self.workers.want.pieces)):
                if self.restarts and not self.workers.processes[worker].is_alive():
                    self.workers.restart(worker)
                self._ask(worker)
            time.sleep(0.01)
        for asker in self._askers.values():
            asker.close()

    def _do(self, path: Path) -> None:
        _, act, *rest = path.name.split("_")
        said = ""
        if act == "serving":
            said = " ".join(str(worker) for worker in range(len(self.workers.want.pieces)) if self._ask(worker))
        else:
            getattr(self, f"_{act}")(int(rest[0]))
        part = path.with_name(f"{path.name}.part.done")
        part.write_text(said)
        part.rename(path.with_name(f"{path.name}.done"))

    def _ask(self, worker: int) -> bool:
        """Ask a worker that is not stopped; whether it answers."""
        if worker in self._paused:
            return False
        try:
            if worker not in self._askers:
                hidden = (self.elsewhere / f"worker-{worker}.sock").exists()
                self._askers[worker] = Asker(self.elsewhere if hidden else self.workers.sockets, worker)
            asked = time.monotonic()
            answer = self._askers[worker].ask()
        except (PeerGoneError, TimeoutError, OSError):
            self._askers.pop(worker, None)
            return False
        if isinstance(answer, Answer):
            self.seen.append(Seen(worker, answer.version, answer.body.decode(), asked, time.monotonic()))
            self.newest[worker] = answer.version
            return True
        self.closed.append(worker)
        return False

    # ---- what may be done to a worker --------------------------------------------------------------------------------

    def _kill(self, worker: int) -> None:
        self._askers.pop(worker, None)
        self.workers.kill(worker)

    def _start(self, worker: int) -> None:
        self.workers.start(worker)
        self.workers.await_up(worker)

    def _stopped(self, worker: int) -> None:
        pid = self._pid(worker)
        self._paused.add(worker)
        os.kill(pid, signal.SIGSTOP)
        while not stopped(pid):
            time.sleep(0.01)

    def _cont(self, worker: int) -> None:
        os.kill(self._pid(worker), signal.SIGCONT)
        self._paused.discard(worker)

    def _cut(self, worker: int) -> None:
        name = f"worker-{worker}.sock"
        (self.workers.sockets / name).rename(self.elsewhere / name)
        self.workers.tell(worker, Unplug())
        self._askers.pop(worker, None)

    def _mend(self, worker: int) -> None:
        name = f"worker-{worker}.sock"
        (self.elsewhere / name).rename(self.workers.sockets / name)

    def _pid(self, worker: int) -> int:
        pid = self.workers.processes[worker].pid
        assert pid is not None
        return pid


@dataclass(frozen=True)
class Unplug:
    """End all connections of a worker."""

    def __call__(self, adapter: Troubled) -> None:
        assert adapter.endpoint is not None
        for link in list(adapter.endpoint._links.links):
            link.shut()
