"""Times that add up to more than 64 bits hold are refused, never wrapped."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

import treadle
from treadle.costs import Costs, durations, load_costs, ticks
from treadle.ir.trace import MICROSECONDS
from treadle.lowering import LoweringOptions, lower

SCHEDULE = treadle.generate("1f1b", pp=4, microbatches=8)


def _costs(time: int) -> Costs:
    return Costs("long", MICROSECONDS, layer=dict.fromkeys(("attn_f", "attn_b", "attn_w", "mlp_f", "mlp_b"), time))


@pytest.mark.parametrize("time", [10**17, 2**62, 10**19, 10**30])
def test_times_that_do_not_add_up_are_refused(time: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"costs 'long' are too long to add up: .* units of the costs"):
            lower(SCHEDULE, _costs(time), LoweringOptions(layers=2, moe=True))


def test_times_below_add_up_exactly() -> None:
    program = lower(SCHEDULE, _costs(1), LoweringOptions(layers=2, moe=True))
    long = 2**62 // (4 * program.num_ops)
    one, many = (treadle.simulate(program, _costs(time)).makespan for time in (1, long))
    assert many == long * one


def test_slow_ranks_and_stages_count() -> None:
    costs = _costs(10**15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = lower(SCHEDULE, costs, LoweringOptions(layers=2, moe=True))
    for takes in (ticks, durations):
        with pytest.raises(ValueError, match="too long"):
            takes(program, costs, slowness=np.array([1, 1, 1, 1e4]))
    with pytest.raises(ValueError, match="too long"):
        ticks(program, replace(costs, stage={2: {"factor": 1e6}}))


def test_replicas_do_not_wait_for_each_other() -> None:
    unit = load_costs("unit")
    program = lower(SCHEDULE, unit, LoweringOptions(dp=64, every_gpu=True))
    long = 2**62 // program.num_ops * 32
    costs = replace(unit, cells={"f": long, "i": long, "w": long, "b": long, "fb": long})
    assert treadle.simulate(program, costs).makespan > 0
