"""Watches a worker from a process of its own: each answer is compared with the commit log, read before it and after."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.rank_pool import server
from tests.support.update.workers import Asker
from treadle.update.coordinator.commit_log import peek
from treadle.update.protocol.update_messages import Answer
from treadle.wire.errors import PeerGoneError

Right = Callable[[int, int], str]
"""What a worker answers with a version, whole."""

PAUSE_S = 0.003


def committed(ledger: Path) -> int:
    """The version that the log has, 0 for none."""
    with suppress(FileNotFoundError):
        return peek(ledger).version or 0
    return 0


@dataclass
class Watched:
    """What was seen since the last report: how often each version was served, and what the log had."""

    answers: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    logged: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def _watch_main(sockets: Path, ledger: Path, worker: int, right: Right, pipe: Connection) -> None:
    known, watched, asker, newest = lru_cache(8)(right), Watched(), None, 0

    def read() -> int:
        """What is committed: a log that was put back has less."""
        nonlocal newest
        newest = max(newest, committed(ledger))
        watched.logged.add(newest)
        return newest

    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            if pipe.poll():
                pipe.recv()
                read()
                pipe.send(watched)
                watched = Watched()
            time.sleep(PAUSE_S)
            before = read()
            try:
                asker = asker if asker is not None else Asker(sockets, worker)
                answer = asker.ask()
            except (PeerGoneError, TimeoutError, OSError):
                asker = None
                continue
            after = read()
            if not isinstance(answer, Answer):
                watched.refused += 1
                continue
            watched.answers[answer.version] += 1
            about = f"worker {worker} serves {answer.version}, committed were {before} before and {after} after"
            if not before <= answer.version <= after:
                watched.wrong.append(about)
            if answer.body.decode() != known(worker, answer.version):
                watched.wrong.append(f"{about}: a mixture")


class LogWatcher:
    """A process that asks one worker all the time, for as long as it is watched."""

    def __init__(self, sockets: Path, ledger: Path, worker: int, right: Right) -> None:
        self._pipe, theirs = server().Pipe()
        args = (sockets, ledger, worker, right, theirs)
        self._process = server().Process(target=_watch_main, args=args, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self) -> None:
        """Ask for a report."""
        self._pipe.send("report")

    def report(self) -> Watched:
        """The report that was asked for."""
        assert self._pipe.poll(60), "a watcher hangs"
        watched: Watched = self._pipe.recv()
        return watched

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
