"""What holds for all tests: three tiers, one schedule, one device, a thread a worker, hypothesis without seconds.

`pytest` alone runs the quick tier: tests that are not marked `slow`, and of a test with parameters its first case.
`pytest -m all` runs what a change must pass, and naming a file or a test that part of it. `pytest -m "all or nightly"
--budget 10` has the rest of each grid too (`support/grid.py`), and ten times the draws (`support/budget.py`).
`pytest --schedule NAME` runs every test that has that schedule among its parameters, `pytest --since REV` those of the
files that a change can affect (`support/since.py`).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.support.budget import KEPT, Budget, KeptDraw
from tests.support.cpu_time import CpuTimes
from tests.support.sim_skips import why_not_on_sim
from tests.support.since import SINCE, Since
from tests.support.skips import Skips

if TYPE_CHECKING:
    import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported, and for the processes that tests start. With as many threads as cores in each, threads
    # wait for one another while they keep the cores busy: a test of 5 s then takes 60.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

COVERED = "covered"
BUDGET = pytest.StashKey[Budget]()

BY_DAY, AT_NIGHT = "by day", "at night"
settings.register_profile(
    BY_DAY, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile(
    AT_NIGHT,
    settings.get_profile(BY_DAY),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis"),
)
settings.load_profile(BY_DAY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`: none where a file or a test is named, else at most four (tests start ranks)."""
    return 0 if _is_named(config) else min(4, os.cpu_count() or 1)


def _is_named(config: pytest.Config) -> bool:
    return any(".py" in arg for arg in config.args)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--schedule`, `--since`, `--skips`, `--budget`, `--seed` and `--cpu`."""
    parser.addoption("--schedule", metavar="NAME", help="run every test that has this schedule among its parameters")
    parser.addoption("--since", metavar="REV", help="only test files that what changed since this commit can affect")
    parser.addoption("--skips", metavar="RUN", help="fail on skips that .ci/skips does not allow this run")
    parser.addoption("--budget", metavar="N", type=float, default=1.0, help="N times the draws of tests that draw")
    parser.addoption("--seed", metavar="N", type=int, default=0, help="other draws than those of every day")
    parser.addoption(
        "--cpu", metavar="N", type=int, help="print CPU seconds, children included, of the N dearest files and tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draws by the seed and counts CPU seconds where they were asked for, in every process that runs tests."""
    if config.getoption("--seed"):
        settings.load_profile(AT_NIGHT)
    num_shown: int | None = config.getoption("--cpu")
    if num_shown is not None:
        config.pluginmanager.register(CpuTimes(num_shown))
    skipping: str | None = config.getoption("--skips")
    if skipping is not None:
        config.pluginmanager.register(Skips(config, skipping))
    revision: str | None = config.getoption("--since")
    if revision is not None:
        config.pluginmanager.register(Since(revision, getattr(config, "workerinput", {}).get(SINCE)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of one schedule, or the quick tier, unless a marker, a file or a test was asked for."""
    for item in items:
        if item.get_closest_marker("nightly") is None:
            item.add_marker("all")
        why = why_not_on_sim(item.nodeid) if os.environ.get("TREADLE_TEST_DEVICE") == "sim" else None
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
    _give_examples(items, config.getoption("--budget"))
    schedule: str | None = config.getoption("--schedule")
    if schedule is not None:
        kept = [item for item in items if schedule in set(_schedules_of(item))]
        if not kept:
            raise pytest.UsageError(f"no test has a schedule {schedule!r}; `treadle schedules` lists them")
    elif config.option.markexpr:
        return
    elif _is_named(config):
        kept = [item for item in items if item.get_closest_marker("nightly") is None]
    else:
        kept = list(_quick(items))
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _give_examples(items: list[pytest.Item], factor: float) -> None:
    """Give tests of hypothesis so many times the examples that they ask for."""
    for function in {getattr(item, "obj", None) for item in items if factor != 1.0}:
        asked = getattr(function, "_hypothesis_internal_use_settings", None)
        if asked is not None:
            more = settings(asked, max_examples=max(1, round(asked.max_examples * factor)))
            function._hypothesis_internal_use_settings = more  # type: ignore[union-attr]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that draws for its kept draws, too."""
    kept = [row for row in KEPT if row.test == metafunc.definition.nodeid.partition("[")[0]]
    if "budget" in metafunc.fixturenames and kept:
        ids = ["", *(f"seed {row.seed}" for row in kept)]
        metafunc.parametrize("budget", [None, *kept], indirect=True, ids=ids)


def _quick(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name not in seen and not {"slow", "nightly"} & {mark.name for mark in item.iter_markers()}:
            yield item
        seen.add(name)


def _schedules_of(item: pytest.Item) -> Iterator[str]:
    """The schedules among a test's parameters: by name, as golden files, and themselves."""
    from treadle.ir import Schedule  # here: it brings numpy, which reads OMP_NUM_THREADS when it is imported

    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec is not None else ():
        if isinstance(value, str):
            yield value
        elif isinstance(value, Path):
            yield value.stem.partition("_p")[0]
        elif isinstance(value, Schedule):
            yield value.name


@pytest.fixture
def budget(request: pytest.FixtureRequest) -> Iterator[Budget]:
    """What a test that draws may use; `--budget` times as much."""
    kept: KeptDraw | None = getattr(request, "param", None)
    seed, factor = request.config.getoption("--seed"), request.config.getoption("--budget")
    made = Budget(factor, seed) if kept is None else Budget(1.0, kept.seed, kept.number)
    request.node.stash[BUDGET] = made
    yield made
    request.node.user_properties += [(COVERED, told) for told in made.told]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that draws and fails says which draw it was."""
    report = yield
    made = item.stash.get(BUDGET, None)
    if report.failed and made is not None:
        report.sections.append(("draw", made.drawn(item.nodeid)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests that draw have covered."""
    told = [
        f"{report.nodeid.partition('::')[2]}: {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == COVERED and report.when == "teardown"
    ]
    if told:
        terminalreporter.section("covered by draws")
        for line in sorted(told):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that tests run on: the CPU, or what TREADLE_TEST_DEVICE says."""
    from tests.support.devices import device_of

    return device_of()
