"""What holds for all tests: two tiers, one schedule, one device, a thread a worker, hypothesis without seconds.

`pytest` alone runs the quick tier: tests that are not marked `slow`, and of a test with parameters its first case.
`pytest -m all` runs everything; naming a file or a test runs all of it. `pytest --schedule NAME` runs every test that
has that schedule among its parameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported, and for the processes that tests start. With as many threads as cores in each, threads
    # wait for one another while they keep the cores busy: a test of 5 s then takes 60.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("treadle", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treadle")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`: none where a file or a test is named, else at most four (tests start ranks)."""
    return 0 if _is_named(config) else min(4, os.cpu_count() or 1)


def _is_named(config: pytest.Config) -> bool:
    return any(".py" in arg for arg in config.args)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--schedule`."""
    parser.addoption("--schedule", metavar="NAME", help="run every test that has this schedule among its parameters")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of one schedule, or the quick tier, unless a marker, a file or a test was asked for."""
    for item in items:
        item.add_marker("all")
    schedule: str | None = config.getoption("--schedule")
    if schedule is not None:
        kept = [item for item in items if schedule in set(_schedules_of(item))]
        if not kept:
            raise pytest.UsageError(f"no test has a schedule {schedule!r}; `treadle schedules` lists them")
    elif config.option.markexpr or _is_named(config):
        return
    else:
        kept = list(_quick(items))
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def _quick(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name not in seen and item.get_closest_marker("slow") is None:
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


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that tests run on: the CPU, or what TREADLE_TEST_DEVICE says."""
    from tests.support.devices import device_of

    return device_of()
