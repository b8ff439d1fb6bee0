"""Kernels in plain Python and compiled give the same results; small programs are done before numba is imported."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import walk_packages
from random import Random
from typing import Any

import numpy as np
import pytest

import treadle
from tests.support.program_mutations import mutate_program
from tests.verifier.test_program_mutations import random_durations, random_program
from treadle.costs import durations
from treadle.ir import kernel
from treadle.ir.execute import execute, makespans
from treadle.ir.kernel import Compiled
from treadle.ir.program import Program
from treadle.schedules import SCHEDULES
from treadle.simulator import critical_path, summarize_path
from treadle.simulator.difference import difference
from treadle.verifier import verify_program

ROOMS = ("costs", "folding", "ir", "lowering", "passes", "schedules", "simulator", "verifier", "weights")


def kernels() -> set[str]:
    """The names of all kernels."""
    found = set()
    for room in ROOMS:
        package = import_module(f"treadle.{room}")
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(import_module(module.name)).values():
                if isinstance(value, Compiled) and value._options.get("cache"):
                    found.add(f"{value.__module__}.{value.__name__}")  # type: ignore[attr-defined]
    return found


def same(one: Any, other: Any) -> bool:
    """Are two results, or what became of two arguments, the same."""
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels called. Each call runs both ways, on arguments of its own."""
    called: set[str] = set()

    def both(self: Compiled[..., Any], *args: Any) -> Any:
        name = f"{self.__module__}.{self.__name__}"  # type: ignore[attr-defined]
        called.add(name)
        given = copy.deepcopy(args)
        plain, compiled = self.plain(*given), self.compiled(*args)
        assert same(plain, compiled), name
        assert same(given, args), name
        return compiled

    monkeypatch.setattr(Compiled, "__call__", both)
    return called


def programs() -> Iterator[Program]:
    """Sound programs of every schedule, and what damage makes of them."""
    for number, family in enumerate(SCHEDULES.values()):
        random = Random(number)
        program = random_program(family, random)
        yield program
        for _ in range(3):
            yield mutate_program(program, random)


@pytest.mark.slow
def test_both_ways_give_the_same(seen: set[str]) -> None:
    for number, program in enumerate(programs()):
        ticks = random_durations(program, Random(number))
        verify_program(program, ticks, ring=number % 3 or None)
        execute(program, ticks)
        execute(program, ticks, own_ends=True)
        makespans(program, np.stack([ticks, ticks - 2]))
    for number, name in enumerate(SCHEDULES):
        schedule = treadle.generate(name, pp=2, microbatches=4)
        costs = treadle.load_costs("deepseek-v3-h800")
        options = treadle.LoweringOptions(layers=(2, *(1,) * (schedule.placement.num_stages - 1)), moe=True)
        if name != "dualpipe":  # which torch's CSV cannot carry
            treadle.dumps(schedule, "torch-comms", receives="late")
        for program in (treadle.lower(schedule, costs), treadle.lower(schedule, costs, options)):
            slowness = 1 + np.random.default_rng(number).random(program.num_ranks)
            durations(program, costs, slowness=slowness)
            trace, slower = (
                treadle.simulate(program, costs),
                treadle.simulate(program, costs, slowness=0.3, seed=number),
            )
            treadle.measure(slower)
            summarize_path(slower, critical_path(slower))
            difference(trace, slower)
            treadle.fit(slower)
    assert seen == kernels()


def test_a_damaged_schedule_is_told_of_alike(seen: set[str]) -> None:
    report = treadle.verify(treadle.loads("0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n"))
    assert [finding.code for finding in report.findings] == ["T201"]
    assert {"treadle.verifier.graph._shortest", "treadle.verifier.graph._walk_back"} <= seen


SMALL_STEP = """
import sys
import treadle
from treadle.simulator import critical_path
schedule = treadle.generate("dualpipe", pp=8, microbatches=20)
assert treadle.verify(schedule).clean
costs = treadle.load_costs("unit")
trace = treadle.simulate(treadle.lower(schedule, costs), costs)
assert treadle.measure(trace).makespan == 66 * costs.clock.ticks
critical_path(trace)
sys.exit("numba" in sys.modules)
"""


def test_a_small_step_needs_no_compiler() -> None:
    assert subprocess.run([sys.executable, "-c", SMALL_STEP]).returncode == 0


def summed(values: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    total = 0
    for value in values:
        total += value
    return total


def ways(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> list[str]:
    """Which way a new kernel took for arrays of these sizes, one call after the other."""
    taken: list[str] = []

    def way(name: str) -> property:
        def take(self: Compiled[..., int]) -> Callable[..., int]:
            taken.append(name)
            self._compiled = self._compiled if name == "plain" else summed
            return summed

        return property(take)

    monkeypatch.setattr(Compiled, "plain", way("plain"))
    monkeypatch.setattr(Compiled, "compiled", way("compiled"))
    made = kernel.kernel(summed)
    for size in sizes:
        made(np.ones(size, np.int64))
    return taken


def test_large_arrays_are_for_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways(monkeypatch, kernel.SMALL, kernel.SMALL + 1, 5) == ["plain", "compiled", "compiled"]


def test_so_are_many_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    size, times = kernel.SMALL // 2, 2 * kernel.BUDGET // kernel.SMALL
    assert ways(monkeypatch, *[size] * (times + 2)) == ["plain"] * times + ["compiled"] * 2


def test_compiling_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[None] = []
    monkeypatch.setattr(Compiled, "compiling", staticmethod(lambda: told.append(None)))
    for _ in range(2):
        kernel._announce(Held())
    assert len(told) == 1


class Held:
    """What numba says of a function that the disk does not hold."""

    py_func = staticmethod(summed)

    class stats:  # noqa: N801
        cache_path = None
