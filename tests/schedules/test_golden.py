"""Golden files: the exact rows of each schedule at one size, as published."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import GOLDEN
from treadle.ir import text
from treadle.schedules import SCHEDULES, generate

FILES = sorted(GOLDEN.glob("*.txt"))


def test_golden_files_are_those_of_schedules() -> None:
    assert {text.parse(path.read_text(), path.name).name for path in FILES} == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_golden_file(name: str) -> None:
    assert name in {text.parse(path.read_text(), path.name).name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_generator_makes_the_golden_rows(path: Path) -> None:
    content = path.read_text()
    golden = text.parse(content, path.name)
    made = generate(golden.name, pp=golden.pp, vpp=golden.vpp, microbatches=golden.num_microbatches)
    assert made == golden
    assert [line for line in content.splitlines() if not line.startswith("#")] == text.dump(
        made, header=False
    ).splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_file_names_its_size_and_source(path: Path) -> None:
    content = path.read_text()
    golden = text.parse(content, path.name)
    family = SCHEDULES[golden.name]
    chunks = "" if golden.vpp == family.default_vpp and family.vpps else f"_v{golden.vpp}"
    assert path.stem == f"{golden.name}_p{golden.pp}{chunks}_m{golden.num_microbatches}"
    assert [line for line in content.splitlines() if line.startswith("## ")] == [f"## published in: {family.source}"]
