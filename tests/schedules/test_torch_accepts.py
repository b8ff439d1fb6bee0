"""Schedules that torch's own validation accepts and Treadle does not: each hangs or computes wrong gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import treadle
from treadle.files import torch_csv

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

PAIRED_WITH_ITSELF = "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 B0.0 (F1.0|B1.0)\n"
CIRCLE = "0: F0.0 B0.0 F1.0 B1.0\n1: F0.0 F1.0 B0.0 B1.0\n"
FORWARD_TWICE = "0: F0.0 F1.0 B0.0 B1.0\n1: F0.0 F0.0 B0.0 F1.0 B1.0\n"


def torch_accepts(schedule: treadle.Schedule) -> bool:
    """Does torch's validation of a compute-only schedule pass."""
    rows = torch_csv.dump(schedule).splitlines()
    actions = {rank: [schedules._Action.from_str(entry) for entry in row.split(",")] for rank, row in enumerate(rows)}
    validate: Callable[..., object] = schedules._validate_schedule
    try:
        validate(actions, schedule.pp, schedule.placement.num_stages, schedule.num_microbatches)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(("text", "code"), [(PAIRED_WITH_ITSELF, "T104"), (CIRCLE, "T201"), (FORWARD_TWICE, "T102")])
def test_torch_accepts_and_treadle_does_not(text: str, code: str) -> None:
    schedule = treadle.loads(text)
    assert torch_accepts(schedule)
    assert code in {finding.code for finding in treadle.verify(schedule).findings}


def test_torch_does_check_something() -> None:
    """So that the test above does not pass because nothing is checked."""
    assert not torch_accepts(treadle.loads("0: F0.0 F1.0 B0.0\n1: F0.0 B0.0 F1.0 B1.0\n"))
