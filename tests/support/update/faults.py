"""One fault at a time: the fault, who commits it, what askers see meanwhile, and whether all is well after.

A set of workers lives through many cases. Each case has update ranks of its own; those that survive try again, and
where one was lost, new ranks do.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.patience import SOON_S
from tests.support.ranks import Outcome, run_ranks
from tests.support.update.crashes import DECISIONS, KINDS, METHODS, PHASES, Crash, Flip, arm
from tests.support.update.workers import Asker, Trouble, Workers
from tests.support.watching import Watching
from treadle.update import Source, UpdateError, UpdateOptions, Updater
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.protocol.update_messages import Answer
from treadle.wire.errors import PeerGoneError

HANG_S = 4.5
"""How long a worker hangs: longer than the deadline of its case, which all others keep on a busy machine."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    number: int
    worker: int = -1
    trouble: Trouble | None = None
    crash: Crash | None = None
    flip: Flip | None = None

    @property
    def culprit(self) -> str:
        """The name that the error must contain."""
        if self.crash is not None:
            return "the coordinator (update rank 0" if self.crash.rank == 0 else f"update rank {self.crash.rank} "
        if self.flip is not None:
            return f"worker {self.flip.rank} "
        return f"worker {self.worker}"

    @property
    def deadline_s(self) -> float:
        """Short only for a process that hangs: other faults are noticed at once."""
        return 3.0 if self.trouble is not None and self.trouble.act == "hang" else 15.0


def draw(number: int, world: int, num_buckets: int) -> Case:
    """The case with this number: kinds of faults take turns, and each is at a random place."""
    chance, kind = random.Random(number), KINDS[number % len(KINDS)]
    if kind in ("rank", "decision"):
        rank = 0 if kind == "decision" else chance.randrange(world)
        when = (
            chance.choice(DECISIONS) if kind == "decision" else chance.choice(("bucket", "bucket", "before", "after"))
        )
        return Case(number, crash=Crash(rank, when, chance.choice(PHASES), chance.randrange(num_buckets)))
    if kind == "flip":
        return Case(number, flip=Flip(chance.randrange(world), chance.randrange(num_buckets)))
    method = chance.choice((*METHODS, "load", "load", "load"))
    at = chance.randrange(num_buckets) if method == "load" else 0
    return Case(number, worker=chance.randrange(world), trouble=Trouble(kind, method, at, hang_s=HANG_S))


@dataclass
class Report:
    """The outcome of an update on one rank."""

    error: str = ""
    who: str = ""
    committed: bool = False
    corrupt: bool = False
    raised_s: float = 0.0
    retried: int = 0
    served: int = 0


def attempt(
    rank: int, workers: tuple[Path, Path], make: Callable[[int, int], Source], version: int, case: Case, marks: Path
) -> Report:
    """Update with a fault, then try until an update succeeds."""
    options = _options(case)
    report = Report()
    with Updater(workers[0], ledger=workers[1], options=options) as updater:
        arm(updater, case.crash, case.flip, marks)
        try:
            updater.update(make(rank, version), version)
            report.served = version
        except UpdateError as error:
            report.error, report.who, report.committed = str(error), error.who, error.committed
            report.raised_s, report.corrupt = time.monotonic(), error.corrupt
        if case.crash is None:
            version += 1
            again(updater, make(rank, version), version, report)
    return report


def again(updater: Updater, source: Source, version: int, report: Report) -> None:
    """Try until an update succeeds: a worker that hangs is busy for a while, one that was killed restarts."""
    until = time.monotonic() + 30
    while True:
        report.retried += 1
        try:
            report.served = updater.update(source, version).version
        except UpdateError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def fresh(
    rank: int, workers: tuple[Path, Path], make: Callable[[int, int], Source], version: int, case: Case
) -> Report:
    """Update from new ranks, after some were lost."""
    report = Report()
    with Updater(workers[0], ledger=workers[1], options=_options(case)) as updater:
        again(updater, make(rank, version), version, report)
    return report


def _options(case: Case) -> UpdateOptions:
    from tests.support.update.models import SMALL

    rollback = random.Random(-case.number).choice(("host", "host", "disk", "none"))
    transfer = random.Random(case.number).choice(("broadcast", "targeted"))
    changed = random.Random(-case.number - 1).choice(("tensors", "elements"))
    return UpdateOptions(
        memory=SMALL,
        rollback=rollback,  # type: ignore[arg-type]
        deadline_s=case.deadline_s,
        drain_s=0.2,
        transfer=transfer,  # type: ignore[arg-type]
        changed=changed,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Seen:
    """An answer, and when it was asked for and came."""

    worker: int
    version: int
    body: str
    asked_s: float
    came_s: float


@dataclass
class Watcher(Watching):
    """Asks every worker in a loop, from a process outside of the update; restarts killed workers."""

    workers: Workers
    seen: list[Seen] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def _run(self) -> None:
        askers: dict[int, Asker] = {}
        while not self._stop.is_set():
            for worker in range(len(self.workers.want.pieces)):
                if not self.workers.processes[worker].is_alive():
                    self.workers.restart(worker)
                    askers.pop(worker, None)
                try:
                    if worker not in askers:
                        askers[worker] = Asker(self.workers.sockets, worker)
                    asked = time.monotonic()
                    answer = askers[worker].ask()
                except (PeerGoneError, TimeoutError, OSError):
                    askers.pop(worker, None)
                    continue
                if isinstance(answer, Answer):
                    self.seen.append(Seen(worker, answer.version, answer.body.decode(), asked, time.monotonic()))
                else:
                    self.closed.append(worker)
            time.sleep(0.01)
        for asker in askers.values():
            asker.close()


def mixtures(seen: list[Seen], right: Callable[[int, int], str]) -> list[str]:
    """Answers that are of no version, and answers of an old version after one of a newer one had come."""
    wrong = [f"{one} is no answer of its version" for one in seen if one.body != right(one.worker, one.version)]
    newest, since = 0, 0.0
    for one in sorted(seen, key=lambda one: one.came_s):
        if one.version > newest:
            newest, since = one.version, one.came_s
        elif one.version < newest and one.asked_s > since:
            wrong.append(f"{one} came after an answer of {newest} at {since}")
    return wrong


def play(workers: Workers, case: Case, version: int, make: Any, right: Callable[[int, int], str]) -> int:
    """Play a case on workers that serve `version`; the version they serve then. Raises AssertionError."""
    marks = workers.directory / f"mark{case.number}"
    marks.unlink(missing_ok=True)
    places = workers.sockets, workers.ledger
    world = len(workers.want.pieces)
    if case.trouble is not None:
        workers.tell(case.worker, case.trouble)
        workers.tell(case.worker, Marker(marks))
    with Watcher(workers) as watcher:
        outcomes = run_ranks(world, attempt, places, make, version + 1, case, marks)
        told = f"{case}\n" + "\n".join(map(str, outcomes))
        version = _judge(case, outcomes, marks, version, told)
        served = {status.version for status in statuses(workers) if status.state == "serving"}
        assert len(served) <= 1, f"{served} are served\n{told}"
        if case.crash is not None:
            committed = _committed(workers.ledger)
            assert served <= {committed}, f"{served} served, {committed} committed\n{told}"
            version += 2
            for outcome in run_ranks(world, fresh, places, make, version, case):
                assert outcome.ok, f"{outcome}\n{told}"
    for worker in range(world):
        asker = Asker(workers.sockets, worker)
        answer = asker.ask()
        asker.close()
        assert isinstance(answer, Answer), f"worker {worker}: {answer}\n{told}"
        assert (answer.version, answer.body.decode()) == (version, right(worker, version)), told
    assert not mixtures(watcher.seen, right), f"{mixtures(watcher.seen, right)[:3]}\n{told}"
    return version


def _judge(case: Case, outcomes: list[Outcome[Report]], marks: Path, version: int, told: str) -> int:
    """Check that every survivor raised in time and named the culprit; the version served if all tried again."""
    for outcome in outcomes:
        if case.crash is not None and outcome.rank == case.crash.rank:
            assert outcome.exitcode == -signal.SIGKILL, told
            continue
        assert outcome.ok, told
        report = outcome.value
        assert report is not None
        assert report.error, f"no error\n{told}"
        assert case.culprit in report.who, f"{report.who!r} named, not {case.culprit!r}\n{told}"
        assert report.corrupt == (case.flip is not None), told
        if marks.exists():
            late_s = report.raised_s - float(marks.read_text()) - (case.deadline_s if _hangs(case) else 0)
            assert late_s < SOON_S, f"{late_s} s\n{told}"
    return version + 2 if case.crash is None else version


def _hangs(case: Case) -> bool:
    return case.trouble is not None and case.trouble.act == "hang"


def statuses(workers: Workers) -> list[Any]:
    found = []
    for worker in range(len(workers.want.pieces)):
        try:
            asker = Asker(workers.sockets, worker)
            found.append(asker.status())
            asker.close()
        except (OSError, PeerGoneError):
            continue
    return found


def _committed(directory: Path) -> int | None:
    ledger = CommitLog(directory)
    ledger.close()
    return ledger.record.version


@dataclass(frozen=True)
class Marker:
    """Have a worker note when its fault happens."""

    path: Path

    def __call__(self, adapter: Any) -> None:
        adapter.marks = self.path


OTHERS = ("vllm", "psm_", "sem.mp-")
"""Names that engines and multiprocessing give in other processes of this machine; updates make none."""


def shared_memory() -> set[str]:
    """Names in /dev/shm that may be ours."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(OTHERS)}
