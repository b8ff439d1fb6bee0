"""Faults of update ranks: a rank that is killed, and a byte that changes between source and worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.update import Updater
from treadle.update.memory.copying import finish_copies
from treadle.update.protocol.control import Enter, Report
from treadle.update.protocol.update_messages import Move

METHODS = ("close", "begin", "load", "finish", "invalidate", "open")
PHASES = ("enter", "settle", "plan", "begin", "finish", "open")
KINDS = ("raise", "kill", "socket", "rank", "decision", "flip", "hang")
DECISIONS = ("before commit", "after commit", "amid telling")


@dataclass(frozen=True)
class Crash:
    """Kills an update rank: at a bucket, before or after it reports a phase, or around the decision.

    A campaign does something else there (`act_at`).
    """

    rank: int
    when: str
    phase: str = ""
    bucket: int = 0


@dataclass(frozen=True)
class Flip:
    """Changes a byte of a bucket after its broadcast, before the worker reads it."""

    rank: int
    bucket: int


def arm(updater: Updater, crash: Crash | None, flip: Flip | None, marks: Path) -> None:
    """Arm the fault on the rank that it names."""
    if crash is not None and crash.rank == updater.rank:

        def die() -> None:
            marks.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        act_at(updater, crash, die)
    if flip is not None and flip.rank == updater.rank:
        _arm_flip(updater, flip)


def act_at(updater: Updater, crash: Crash, act: Callable[[], None]) -> None:
    """Do something on this rank where the crash would be."""
    if crash.when == "bucket":
        seen = iter(range(1 << 30))
        updater.context.progress = lambda done, total: act() if next(seen) == crash.bucket else None
    elif crash.when in ("before", "after"):
        member, send = updater.context.coordinator, updater.context.coordinator.send

        def sending(message: Any, phase: Any) -> None:
            named = "enter" if isinstance(message, Enter) else message.phase
            here = isinstance(message, Enter | Report) and named == crash.phase
            if here and crash.when == "before":
                act()
            send(message, phase)
            if here:
                act()

        member.send = sending  # type: ignore[method-assign]
    else:
        _arm_decision(updater, crash, act)


def _arm_decision(updater: Updater, crash: Crash, act: Callable[[], None]) -> None:
    coordinator = updater.coordinator
    assert coordinator is not None
    commit, tell = coordinator.ledger.commit, coordinator.links.tell

    def committing(version: int, epoch: int) -> None:
        if crash.when == "before commit":
            act()
        commit(version, epoch)
        if crash.when == "after commit":
            act()
        coordinator.links.tell = telling  # type: ignore[method-assign]

    def telling(rank: int, body: bytes, timeout_s: float) -> None:
        tell(rank, body, timeout_s)
        if rank == 1:
            act()

    coordinator.ledger.commit = committing  # type: ignore[method-assign]


def _arm_flip(updater: Updater, flip: Flip) -> None:
    beside, send = updater.context.worker, updater.context.worker.send

    def sending(message: Any, fds: Any = ()) -> None:
        if isinstance(message, Move) and message.bucket >= flip.bucket:
            share = updater.attempt.loop.shares.of_worker(updater.rank, exports=False).shares  # type: ignore[union-attr]
            mine = next(part for part in share if part.bucket == message.bucket)
            take = mine.takes[-1]
            item = mine.items[take.item]
            low = take.box.slices(item.piece.box)
            buffer = updater.context.buffers.all[message.buffer].tensor
            strides = [1]
            for length in reversed(item.piece.box.shape[1:]):
                strides.insert(0, strides[0] * length)
            at = sum(s.start * stride for s, stride in zip(low, strides, strict=True))
            buffer[item.offset_bytes + 2 * at] ^= 1
            finish_copies(buffer.device)
            beside.send = send  # type: ignore[method-assign]
        send(message, fds)

    beside.send = sending  # type: ignore[method-assign]
