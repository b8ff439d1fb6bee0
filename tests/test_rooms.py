"""ARCHITECTURE.md draws the rooms as they are: the layers as import-linter enforces them, the arrows as imports go."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support.paths import ROOT
from tests.support.rooms import SOURCE, arrows, drawn, lines, room_of

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def section(title: str) -> str:
    return ARCHITECTURE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_arrows_are_the_imports() -> None:
    found = {room: rooms for room, rooms in arrows().items() if rooms}
    assert drawn(section("Rooms")) == found, "python -m tests.support.rooms prints the lines as they should be"


def test_layers_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    enforced = [layer.replace("treadle.", "").split(" | ") for layer in layers]
    shown = re.findall(r"^    ([a-z]+(?: \| [a-z]+)*)  ", section("Layers"), re.MULTILINE)
    assert [layer.split(" | ") for layer in shown] == enforced


def test_files_of_the_tour_exist() -> None:
    named = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", ARCHITECTURE.replace("`src/treadle`", ""))
    assert len(named) > 20
    assert [path for path in named if not (SOURCE / path).exists()] == []


@pytest.mark.parametrize(
    ("module", "room"),
    [
        ("treadle.dist.groups", "dist"),
        ("treadle.runtime.pipeline", "runtime"),
        ("treadle.runtime.run.lanes.thread", "runtime.run"),
        ("treadle.api", "api"),
        ("treadle", "treadle"),
    ],
)
def test_a_module_is_in_the_room_of_its_folder(module: str, room: str) -> None:
    assert room_of(module) == room


def test_an_arrow_that_is_not_there_is_seen() -> None:
    text = "\n".join(lines())
    assert drawn(text) == {room: rooms for room, rooms in arrows().items() if rooms}
    assert drawn(text.replace("    ir ", "    ira")) != drawn(text)
