"""Buckets: where reductions and gathers stand, what they wait for, and how long they are hidden."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import treadle
from treadle.costs import durations
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.verifier import verify_program


def lowered(name: str, **options: int | bool) -> tuple[Program, treadle.Costs]:
    """Two layers' worth of buckets on four ranks, and costs in which a bucket takes as long as a layer's dgrad."""
    costs = treadle.load_costs("unit")
    costs = replace(costs, message={**costs.message, "reduce_scatter": 1000}, step={"gather_params": 1000})
    shape = treadle.LoweringOptions(layers=3, by_layer=True, dp=2, buckets=1, **options)  # type: ignore[arg-type]
    return treadle.lower(treadle.generate(name, pp=4, microbatches=8), costs, shape), costs


def dp_lane(program: Program, rank: int) -> list[str]:
    (lane,) = np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == LaneKind.DP))
    return [program.op(op).label for op in range(program.lane_ptr[lane], program.lane_ptr[lane + 1])]


def waits(program: Program, label: str, rank: int) -> set[str]:
    (op,) = [
        op
        for op in range(program.num_ops)
        if program.op(op).label == label
        and program.op(op).lane.rank == rank
        and program.op(op).lane.kind is LaneKind.DP
    ]
    return {program.op(dep).label for dep in program.deps(op)}


def test_a_lane_gathers_in_the_order_of_forwards_and_reduces_in_that_of_backwards() -> None:
    program, _ = lowered("1f1b")
    assert dp_lane(program, 1) == [
        "gather_params .0 b2",
        "gather_params .0 b1",
        "gather_params .0 b0",
        "reduce_scatter .0 b0",
        "reduce_scatter .0 b1",
        "reduce_scatter .0 b2",
    ]
    assert waits(program, "reduce_scatter .0 b2", 0) == {"attn_w 7.0 L0"}
    assert waits(program, "reduce_scatter .0 b0", 0) == {"attn_w 7.0 L2"}
    first = next(op for op in range(program.num_ops) if program.op(op).label == "attn_f 0.0 L1")
    assert "gather_params .0 b1" in {program.op(dep).label for dep in program.deps(first)}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "dualpipe", "dualpipev"])
def test_buckets_are_hidden_but_for_the_ends(name: str) -> None:
    """Against one op at each end: the last bucket's reduction and the first one's gather are what is left."""
    program, costs = lowered(name)
    assert verify_program(program, durations(program, costs)).clean
    whole = replace(costs, message={**costs.message, "reduce_scatter": 0}, step={"gather_params": 0})
    exposed = treadle.simulate(program, costs).makespan - treadle.simulate(program, whole).makespan
    num = int((program.kind == OpKind.REDUCE_SCATTER).sum()) // 4
    assert exposed < 0.8 * num * 2000


def test_a_reduction_that_does_not_wait_for_its_gradient_is_found() -> None:
    program, costs = lowered("1f1b")
    early = program.dep.copy()
    op = int(np.flatnonzero(program.kind == OpKind.REDUCE_SCATTER)[0])
    early[program.dep_ptr[op]] -= 3
    report = verify_program(replace(program, dep=early), durations(program, costs))
    assert any(finding.code == "T401" and "reduce_scatter .0 b0" in str(finding) for finding in report.findings)


def test_a_forward_that_does_not_wait_for_its_parameters_is_found() -> None:
    program, costs = lowered("1f1b")
    gather = int(np.flatnonzero(program.kind == OpKind.GATHER_PARAMS)[2])
    early = np.where(program.dep == gather, gather - 1, program.dep).astype(np.int32)
    report = verify_program(replace(program, dep=early), durations(program, costs))
    assert any(finding.code == "T401" and "gather_params .0 b0" in str(finding) for finding in report.findings)


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        (((1, 0),), "buckets are given of each of 4 stages"),
        (((1,), (0,), (0,), (0,)), "each below the one before and the last 0"),
        (((0, 1, 0), (0,), (0,), (0,)), "each below the one before and the last 0"),
        (((3, 0), (0,), (0,), (0,)), "begin at its blocks 0 to 2, got 3,0"),
    ],
)
def test_buckets_that_are_none_are_refused(buckets: tuple[tuple[int, ...], ...], said: str) -> None:
    schedule, costs = treadle.generate("1f1b", pp=4, microbatches=8), treadle.load_costs("unit")
    with pytest.raises(ValueError, match=said):
        treadle.lower(schedule, costs, treadle.LoweringOptions(layers=3, by_layer=True, dp=2, buckets=buckets))
