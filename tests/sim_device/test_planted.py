"""Mistakes that are planted on the device: where the text is that each changes, and the page that counts them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.planted import changed
from tests.support.stream_plants import STREAM_PLANTS


@pytest.mark.parametrize("name", STREAM_PLANTS)
def test_a_planted_mistake_changes_its_module(name: str) -> None:
    plant = STREAM_PLANTS[name]
    spec = find_spec(plant.module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    compile(changed(plant, text), spec.origin, "exec")
    assert changed(plant, text) != text


def test_the_page_names_each_mistake() -> None:
    page = (ROOT / "docs" / "find_races.md").read_text().replace("\n", " ")
    assert [plant.about for plant in STREAM_PLANTS.values() if plant.about not in page] == []
