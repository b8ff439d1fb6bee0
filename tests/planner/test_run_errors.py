"""The range beside a printed step: of typed commands whose run was left out, with the same CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from held_to.table import typed_rows
from held_to.typed_left_out import left_out_rows
from treadle.estimate import Job, load_cluster, load_model
from treadle.planner.find_plan import find_plan
from treadle.planner.planned_step import PlannedStep
from treadle.planner.run_errors import INSIDE, interval, run_errors
from treadle.planner.space import SearchSpace
from treadle.planner.uncertainty import doubts

_MOE = Job(load_model("qwen3-30b-a3b"), load_cluster("h100:16"), ep=8, global_batch_size=64)


@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_measured_steps_are_inside_the_range_that_commands_print(kind: str) -> None:
    rows = [row for row in typed_rows() if row.data in ("bridge", "simumax") and row.printed_s and row.kind == kind]
    assert sum(row.inside for row in rows) >= INSIDE * len(rows)


def test_the_range_holds_its_share_of_steps_that_are_printed_without_the_run() -> None:
    for graphs in ("none", "partial"):
        found = run_errors(replace(_MOE, cuda_graph=graphs))
        rows = [row for row in left_out_rows() if row.kind == "MoE"]
        alike = [row for row in rows if row.graphs == graphs] if "any" not in found.like else rows
        held = [found.low <= row.measured_s / row.configuration_s <= found.high for row in alike]
        assert len(held) == found.runs
        assert INSIDE <= sum(held) / len(held) < 0.9


def test_fewer_runs_make_a_wider_range() -> None:
    errors = [0.01 * step for step in range(-10, 11)]
    few, many = interval(errors), interval(errors * 20)
    assert few[0] < many[0] <= many[1] < few[1]


def test_graphs_that_no_run_on_the_gpu_has_are_a_doubt() -> None:
    plain, graphs = run_errors(_MOE), run_errors(replace(_MOE, cuda_graph="partial"))
    assert (plain.on_gpu, plain.like) == (True, "MoE without CUDA graphs")
    assert not graphs.on_gpu
    assert (plain.low, plain.high) != (graphs.low, graphs.high)


def test_the_doubt_is_printed() -> None:
    space = SearchSpace(
        tp=(1,),
        pp=(1,),
        ep=(8,),
        micro_batch_size=(1,),
        recompute=((),),
        cuda_graph=("partial",),
        schedules=("1f1b",),
        gradient_bytes=(2,),
    )
    found = find_plan("qwen3-30b-a3b", "h100:16", space=space)
    errors = run_errors(found.best.job)
    texts = [doubt.text for doubt in doubts(PlannedStep.of(found.best), errors, found.memory_limit)]
    assert any("no published run of this kind is on h100 with partial CUDA graphs" in text for text in texts)
