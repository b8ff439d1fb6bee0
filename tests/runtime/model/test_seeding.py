"""The generator that a rank seeds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from treadle.runtime.model.seeding import generator_of


@pytest.mark.parametrize(("device", "number"), [("cuda", 3), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_device_without_an_index_is_the_current_one(
    device: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [torch.Generator() for _ in range(4)]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(default_generators=made))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert generator_of(torch.device(device)) is made[number]
