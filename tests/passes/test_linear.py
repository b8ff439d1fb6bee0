"""Work grows with the ops of a Program, not with their square. Counted in lines that Python runs: no clock is asked."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

import treadle
from treadle.ir.ops import LaneKind, OpKind
from treadle.passes.layers import CellKind, ShapeKey, template


def lines_of(layers: int) -> int:
    """How many lines of Treadle's own a lowering and a verification run, in Python."""
    schedule = treadle.generate("1f1b", pp=1, microbatches=1)
    count = 0

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        del argument
        if "treadle" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        treadle.verify(treadle.lower(schedule, "unit", treadle.LoweringOptions(layers=layers, moe=True, offload=True)))
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
def test_four_times_the_layers_are_four_times_the_work() -> None:
    lines_of(1)  # imports and caches
    few, many = lines_of(50), lines_of(200)
    assert many < 4.5 * few, (few, many)


def test_a_template_counts_the_compute_parts_before_each_of_its_slots() -> None:
    key = ShapeKey(frozenset(OpKind), hold=False, early=False, early_recompute=False)
    for cell in CellKind:
        made = template(cell, "Ettt", "tttL", key, False, False)
        assert list(made.slots) == sorted(made.slots)
        assert made.slots[0] == 0
        assert made.slots[-1] < len(made.on(LaneKind.COMPUTE))
