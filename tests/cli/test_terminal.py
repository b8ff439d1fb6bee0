"""Progress on a terminal: a bar once work takes long, by a timer that a test lets run out; none where nobody looks."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
from rich.console import Console

from tests.support.command import Screen
from treadle.cli import terminal


class Timer:
    """A timer that runs out when a test says so."""

    made: list[Timer]

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self.interval, self.run_out = interval, function
        self.started = self.cancelled = False
        self.made.append(self)

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    """The timers that are made."""
    monkeypatch.setattr(Timer, "made", [], raising=False)
    monkeypatch.setattr(threading, "Timer", Timer)
    return Timer.made


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """What is seen of stderr."""
    made = Screen()
    monkeypatch.setattr(terminal, "err", Console(file=made, force_terminal=True, width=80), raising=False)
    return made


def test_work_that_takes_long_shows_a_bar_and_how_far_it_is(timers: list[Timer], screen: Screen) -> None:
    with redirect_stderr(screen), terminal.working("generating zb-h1") as advance:
        (timer,) = timers
        assert (timer.started, timer.interval) == (True, terminal.PATIENCE_S)
        advance(1, 3)
        assert screen.getvalue() == ""
        timer.run_out()
        assert "generating zb-h1" in screen.getvalue()
        advance(2, 3, "lowering it")
    assert "lowering it" in screen.getvalue()
    assert timer.cancelled


def test_work_that_is_done_sooner_shows_nothing(timers: list[Timer], screen: Screen) -> None:
    with redirect_stderr(screen), terminal.working("generating zb-h1"):
        (timer,) = timers
    assert timer.cancelled
    timer.run_out()  # as one does that was past cancelling
    assert screen.getvalue() == ""


def test_work_that_fails_takes_its_bar_away(timers: list[Timer], screen: Screen) -> None:
    def work() -> None:
        with terminal.working("generating zb-h1"):
            timers[0].run_out()
            raise ValueError("no")

    with redirect_stderr(screen), pytest.raises(ValueError, match="no"):
        work()
    shown = screen.getvalue()
    timers[0].run_out()
    assert screen.getvalue() == shown
    assert shown.endswith("\x1b[1A\x1b[2K"), "the line of the bar is cleared"


def test_no_bar_where_nobody_looks(timers: list[Timer]) -> None:
    with redirect_stderr(io.StringIO()), terminal.working("generating zb-h1"):
        assert not timers[0].started
