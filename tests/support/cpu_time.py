"""CPU seconds of tests, the processes that they start included: `pytest --cpu 20`.

A test's CPU is what its worker and all that descends from it used between its setup and the end of its teardown: ranks
of a fork server too, dead or alive. A process that ends is counted with the one that waits for it (`cutime`), so the
sum over a tree of processes only grows. A process whose parent died before it is lost to the count once it has ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from heapq import nlargest
from operator import itemgetter
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
PROPERTY, RANKS = "cpu_s", "ranks"


def tree_seconds(pid: int) -> float:
    """CPU seconds of a process and of all that descends from it; 0.0 of one that is not there (any more)."""
    return sum(_ticks(Path(f"/proc/{member}/stat")) for member in _tree(pid)) / TICKS


def _ticks(stat: Path) -> int:
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime


def _tree(pid: int) -> Iterator[int]:
    """A process and all that descends from it: children are listed under the thread that forked them."""
    yield pid
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        try:
            children = (thread / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            yield from _tree(int(child))


def _ranks() -> tuple[int, int] | None:
    """How many ranks this process has run so far, and in how many processes, if it has."""
    module = sys.modules.get("tests.support.rank_pool")  # it brings torch
    return (module.POOL.num_taken, module.POOL.num_started) if module is not None else None


class CpuTimes:
    """Measures in the process that runs tests, and prints in the one that has the terminal."""

    def __init__(self, num_shown: int) -> None:
        self.num_shown = num_shown
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.started_s = time.monotonic()
        self.ranks: dict[str, tuple[int, int]] = {}
        self._before = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._before = tree_seconds(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A test has ended: its report takes the seconds to the process that prints."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, tree_seconds(os.getpid()) - self._before))
            report.user_properties.append((RANKS, _ranks()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A report arrives, from this process or from a worker."""
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == PROPERTY and isinstance(value, float):
                self.seconds[report.nodeid] += value
            elif name == RANKS and isinstance(value, tuple | list):
                taken, started = value
                self.ranks[getattr(report, "worker_id", "")] = (taken, started)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The dearest files and tests, and all of them together."""
        files: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        for title, counted in (("files", files), ("tests", self.seconds)):
            terminalreporter.section(f"CPU seconds: the dearest {self.num_shown} {title}")
            for name, seconds in nlargest(self.num_shown, counted.items(), key=itemgetter(1)):
                terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        taken, started = (sum(column) for column in zip(*(self.ranks.values() or [(0, 0)]), strict=True))
        terminalreporter.write_line(f"{taken} ranks ran in {started} processes")
        workers = tree_seconds(os.getpid())
        terminalreporter.write_line(
            f"tests took {time.monotonic() - self.started_s:.0f} s, {workers:.0f} s of CPU with their processes; "
            f"{sum(self.seconds.values()):.0f} s of it between setup and teardown of {len(self.seconds)} tests"
        )
