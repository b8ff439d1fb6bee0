"""Output of the commands: results on stdout, the rest on stderr, hints and progress only on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

PATIENCE_S = 1.0
"""A command that is done sooner shows no progress."""


class Advance(Protocol):
    """Tells how far the work is: `advance(done, total)`."""

    def __call__(self, done: int, total: int) -> None: ...


def fail(message: str) -> None:
    """A user's mistake, in a sentence."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def note(message: str) -> None:
    """Something to know about a result, on stderr."""
    err.print(f"[dim]note:[/] {escape(message)}", soft_wrap=True)


def plain(text: str) -> None:
    """Output that others read: no colour, no wrapping."""
    out.file.write(text)
    out.file.flush()


def suggest(command: str) -> None:
    """The next command worth trying, for a person at a terminal."""
    if out.is_terminal and err.is_terminal:
        err.print(f"[dim]next:[/] {escape(command)}", soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[Advance]:
    """A progress bar on stderr, once the work has taken longer than a person likes to wait."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err, transient=True)
    task = bar.add_task(what, total=None)
    timer = threading.Timer(PATIENCE_S, bar.start)
    timer.daemon = True

    def advance(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    if err.is_terminal:
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        if bar.live.is_started:
            bar.stop()
