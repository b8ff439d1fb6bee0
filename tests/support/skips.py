"""Skips are counted by their reasons; one that `.ci/skips` does not list fails the run: `pytest --skips day`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

LISTED = ROOT / ".ci" / "skips"
SKIPPED = "skipped"
_LINE = re.compile(r"(.+) \[([^\]]+)\]")


def allowed(run: str, listed: Path = LISTED) -> list[str]:
    """The patterns of reasons that a run may skip for."""
    lines = [line for line in listed.read_text("utf-8").splitlines() if not line.startswith("#")]
    found = [_LINE.fullmatch(line) for line in lines]
    assert all(found), f"{listed}: a line is `pattern [where, where]`: {lines[found.index(None)]}"
    return [line[1] for line in found if line is not None and run in line[2].split(", ")]


class Skips:
    """Counts in the process that runs tests, and judges in the one that has the terminal."""

    def __init__(self, config: pytest.Config, run: str) -> None:
        self.config, self.run, self.patterns = config, run, allowed(run)
        self.reasons: dict[str, str] = {}
        """Of each test, or of a whole file."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test was skipped, here or in a worker."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was skipped."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[report.nodeid] = reason.removeprefix("Skipped: ")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist has ended: files are skipped there alone."""
        self.reasons |= getattr(node, "workeroutput", {}).get(SKIPPED, {})

    @property
    def unlisted(self) -> dict[str, str]:
        """Tests that were skipped for a reason that is not listed."""
        return {
            test: reason
            for test, reason in self.reasons.items()
            if not any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in self.patterns)
        }

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run, or hand what was skipped to the process that has the terminal."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[SKIPPED] = self.reasons
        elif self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print each reason with its number, and those that are not listed."""
        terminalreporter.section("skipped")
        for reason, number in Counter(self.reasons.values()).most_common():
            terminalreporter.write_line(f"{number:5}  {reason}")
        for test, reason in self.unlisted.items():
            terminalreporter.write_line(f"not in .ci/skips for {self.run}: {test}: {reason}", red=True)
