"""Updates for each new checkpoint of a directory, until an interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.checkpoints import fault_of
from treadle.cli.terminal import err

if TYPE_CHECKING:
    from treadle.update.checkpoint_watch import Checkpoint

LOOK_S = 1.0
"""Seconds between two looks at the directory."""


def push_each(directory: Path, ledger: Path, push: Callable[[Checkpoint], int]) -> int:
    """Call `push` for each new checkpoint; it returns 0 if the version was committed. Ends with 0 at an interrupt.

    What it raises of a user's mistakes, and a checkpoint that was not committed, are said, and the watch goes on. An
    interrupt lets the update under way end; a second one breaks it off.
    """
    from treadle.update.checkpoint_watch import CheckpointWatch
    from treadle.update.coordinator.commit_log import peek

    if not directory.is_dir():
        raise ValueError(f"--watch {directory}: there is no such directory; give the one that checkpoints appear in")
    watch = CheckpointWatch(directory, fault_of, _say)
    committed = peek(ledger).version or 0
    _say(f"watching {directory} for checkpoints above version {committed}; Ctrl-C ends it")
    with _interrupted() as ended:
        while not ended.wait(LOOK_S):
            found = watch.look(peek(ledger).version or 0)
            if found is None:
                continue
            _say(f"{found.path.name} is loaded as version {found.version}")
            reason = _why_not(found, push)
            if reason is not None and not ended.is_set():
                wait_s = watch.failed(found)
                _say(
                    f"{found.path.name} was not committed{reason}; it is tried again in {wait_s:g} s, "
                    "or passed over for a newer one"
                )
    return 0


def _why_not(found: Checkpoint, push: Callable[[Checkpoint], int]) -> str | None:
    """Why a checkpoint was not committed; None if it was. What ranks print themselves is not repeated."""
    try:
        return "" if push(found) else None
    except (ValueError, OSError) as error:
        return f": {error}"


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """The event of an interrupt or SIGTERM. A second one raises KeyboardInterrupt."""
    came = threading.Event()

    def note(number: int, frame: Any) -> None:
        if came.is_set():
            raise KeyboardInterrupt
        came.set()
        _say("ending; an update under way ends first, unless you interrupt once more")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    err.print(line, soft_wrap=True, markup=False)
