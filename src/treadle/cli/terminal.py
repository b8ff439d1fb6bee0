"""Output of the commands: results on stdout, the rest on stderr, hints and progress only on a terminal.

`out` and `err` are rich's consoles. They are made when they are first used: plain text is printed without rich.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from treadle.cli.wording import as_typed

if TYPE_CHECKING:
    from rich.console import Console

    out: Console
    err: Console

PATIENCE_S = 1.0
"""A command that is done sooner shows no progress."""


def __getattr__(name: str) -> Any:
    """Make a console."""
    if name not in ("out", "err"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rich.console import Console

    globals()[name] = console = Console(stderr=name == "err", highlight=False)
    return console


def _say(head: str, style: str, message: str) -> None:
    from rich.markup import escape

    _console("err").print(f"[{style}]{head}:[/] {escape(as_typed(message))}", soft_wrap=True)


def _console(name: str) -> Any:
    return globals().get(name) or __getattr__(name)


class Advance(Protocol):
    """Tells how far the work is: `advance(done, total)`; `what` is new text beside the bar."""

    def __call__(self, done: int, total: int, what: str | None = None) -> None: ...


def fail(message: str) -> None:
    """A user's mistake, in a sentence."""
    _say("error", "bold red", message)


def note(message: str) -> None:
    """Something to know about a result, on stderr."""
    _say("note", "dim", message)


def wrote(path: str | Path, about: str = "") -> None:
    """Report a file that was written, on stderr."""
    from rich.markup import escape

    _console("err").print(f"wrote {escape(str(path))}{f' ({about})' if about else ''}", soft_wrap=True)


def plain(text: str) -> None:
    """Output that others read: no colour, no wrapping."""
    sys.stdout.write(text)
    sys.stdout.flush()


def again(more: str) -> str:
    """The command as it was typed, with more options."""
    return " ".join(["treadle", *map(shlex.quote, sys.argv[1:]), more])


def suggest(command: str) -> None:
    """The next command worth trying, for a person at a terminal."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        _say("next", "dim", command)


@contextmanager
def working(what: str) -> Iterator[Advance]:
    """A progress bar on stderr, once the work has taken longer than a person likes to wait."""
    bar = _ProgressBar(what)
    timer = threading.Timer(PATIENCE_S, bar.start)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield bar.advance
    finally:
        timer.cancel()
        bar.stop()


class _ProgressBar:
    """A bar that a timer starts, if it comes to that, while the work goes on."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._progress: Any = None
        self._task: Any = None
        self._lock = threading.Lock()
        self._over = False

    def start(self) -> None:
        """Show the bar, unless the work is over."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with self._lock:
            if not self._over:
                self._progress = Progress(*columns, console=_console("err"), transient=True)
                self._task = self._progress.add_task(self._what, total=None)
                self._progress.start()

    def advance(self, done: int, total: int, what: str | None = None) -> None:
        """Say how far the work is."""
        self._what = what if what is not None else self._what
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, description=self._what)

    def stop(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._over = True
            if self._progress is not None:
                self._progress.stop()
