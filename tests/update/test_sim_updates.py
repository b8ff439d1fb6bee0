"""Updates on the device of threads: every byte is right however late its kernels are, and planted mistakes show."""

from __future__ import annotations

import pytest

from tests.support.update import sim_updates
from tests.support.update_plants import UPDATE_PLANTS


@pytest.mark.slow
def test_every_byte_arrives_however_late_a_device_is() -> None:
    assert sim_updates.draw("", 0) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("plant", UPDATE_PLANTS)
def test_a_planted_mistake_is_found(plant: str) -> None:
    assert sim_updates.find(plant, 10, 1)["found"]
