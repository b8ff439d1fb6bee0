"""Steps under injected delays: one lap of draws, and races planted that they have to find.

`python -m tests.support.fuzz` and `python -m tests.support.planted` run as many as one likes.
"""

from __future__ import annotations

import argparse
import threading
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import fuzz
from tests.support.delays import Delays
from tests.support.fuzz_models import DTYPES, KINDS, combinations
from tests.support.patience import PATIENT_S
from tests.support.planted import ALL, PLANTS, changed
from treadle.schedules import SCHEDULES

PARTS = 5
"""Into which the draws are dealt, for workers side by side."""

SEED = 28
"""Of a lap that has expert parallelism, recomputation and unequal micro-batches too."""

STEPS = 3
"""Draws of a pipeline: the first learns the shapes, and two batches take turns."""


def draws_of(*more: str) -> argparse.Namespace:
    """One lap: each schedule once, all kinds and all dtypes among them."""
    size = ["--draws", str(STEPS * len(SCHEDULES)), "--steps", str(STEPS), "--seed", str(SEED)]
    return fuzz.parser().parse_args([*size, *more])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_steps_under_delays_are_those_of_one_process_and_of_serial_lanes(
    part: int, capfd: pytest.CaptureFixture[str]
) -> None:
    args = draws_of("--part", f"{part}/{PARTS}", "--jobs", "1", "--deadline", str(PATIENT_S))
    said = fuzz.fuzz(args)
    assert said["failures"] == 0, capfd.readouterr().err
    assert said["draws"] == sum(life.num_steps for life in fuzz.lives(args))


def test_one_lap_of_draws_has_every_schedule_kind_and_dtype() -> None:
    configs = [life.config for part in range(PARTS) for life in fuzz.lives(draws_of("--part", f"{part}/{PARTS}"))]
    assert sorted(c.schedule for c in configs) == sorted(SCHEDULES)
    assert {c.kind for c in configs} == set(KINDS)
    assert {c.dtype for c in configs} == set(DTYPES)
    assert {c.ep for c in configs} == {1, 2}
    assert {c.recompute for c in configs} == {"", "attn", "mlp", "attn+mlp"}
    assert {c.aux for c in configs} == {"none", "own", "bf16"}
    assert {(c.layered, c.unequal) for c in configs} == set(product((True, False), repeat=2))
    assert {c.dropout for c in configs} == {c.mtp for c in configs} == {c.dense for c in configs} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANTS if name != "ledger-without-lock"])  # minutes: planted.py
def test_a_planted_race_is_found(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = fuzz.find(name, PLANTS[name].only, draws=150)  # most within 10
    assert said["failures"], f"{PLANTS[name].about}: not found in {said['draws']} draws\n{capfd.readouterr().err}"


@pytest.mark.parametrize("name", ALL)
def test_a_plant_has_its_place(name: str) -> None:
    file = import_module(ALL[name].module).__file__
    assert file is not None
    text = Path(file).read_text()
    assert changed(ALL[name], text) != text
    with pytest.raises(ValueError, match="2 times, and a plant replaces what is there once"):
        changed(ALL[name], text + text)


def test_draws_go_through_everything() -> None:
    args = fuzz.parser().parse_args(["--draws", str(2 * len(combinations({}))), "--steps", "2"])
    configs = [life.config for life in fuzz.lives(args)]
    assert {(c.schedule, c.kind, c.dtype) for c in configs} == set(combinations({}))
    assert len(combinations({})) == len(SCHEDULES) * len(KINDS) * len(DTYPES)
    assert any(c.num_classes == 32000 for c in configs)
    assert any(c.dropout for c in configs)
    assert [str(life) for life in fuzz.lives(args)] == [str(life) for life in fuzz.lives(args)]


def test_only_what_is_known_can_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"--only takes schedule, kind, .*got 'colour'"):
        fuzz.parse_only("colour=red")
    args = fuzz.parser().parse_args(["--only", "schedule=none-such"])
    with pytest.raises(ValueError, match="--only schedule=none-such leaves no schedule"):
        list(fuzz.lives(args))


RACE = """
def work(counter, rounds):
    for _ in range(rounds):
        add(counter)

def add(counter):
    value = counter[0]
    counter[0] = value + 1
"""


def race(tmp_path: Path, seed: str) -> int:
    """How many additions two threads lose that read and write a number, one after the other."""
    file = tmp_path / "race.py"
    file.write_text(RACE)
    module = ModuleType("race")
    exec(compile(RACE, str(file), "exec"), module.__dict__)
    delays, counter = Delays([tmp_path]), [0]
    delays.install()
    try:
        with delays.armed(seed):
            threads = [threading.Thread(target=module.work, args=(counter, 100), name=f"lane {i}") for i in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        delays.remove()
    return 200 - counter[0]


def test_threads_are_paused_between_bytecodes(tmp_path: Path) -> None:
    assert any(race(tmp_path, f"seed {number}") for number in range(20))


def test_code_elsewhere_is_left_alone(tmp_path: Path) -> None:
    delays = Delays([tmp_path])
    delays.install()
    try:
        with delays.armed("seed"):
            sorted(range(1000), key=lambda x: -x)
        assert not delays._visits.get("MainThread")
    finally:
        delays.remove()
