"""The examples in docstrings of the optimizer and the checkpoints run as they stand."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from treadle.train.checkpoint import on_disk, tensor_parts
from treadle.train.optim import division, lr_schedule, optimizer_config, sharded


@pytest.mark.parametrize(
    "module", [sharded, optimizer_config, division, lr_schedule, on_disk, tensor_parts], ids=lambda m: m.__name__
)
def test_examples_run(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
