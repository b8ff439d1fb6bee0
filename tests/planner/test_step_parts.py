"""The parts of a step add up to it, and each has what its knob brings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.job_stages import stage_rows
from treadle.planner.job_estimate import estimate_job
from treadle.planner.planned_step import PlannedStep
from treadle.planner.step_parts import parts_text

QWEN, LLAMA = load_model("qwen3-30b-a3b"), load_model("llama3-8b")


def planned(model: str = "qwen", **given: Any) -> PlannedStep:
    sizes: dict[str, Any] = {"pp": 4, "global_batch_size": 128, "ep": 8 if model == "qwen" else 1, **given}
    job = Job(QWEN if model == "qwen" else LLAMA, load_cluster("h100:64"), **sizes)
    return PlannedStep.of(estimate_job(replace(job, layout=stage_rows(job))))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"recompute": ("full",)},
        {"schedule": "dualpipev", "vpp": 2},
        {"model": "llama", "tp": 2, "recompute": ("layernorm", "mlp")},
        {"model": "llama", "pp": 1, "sharding": "parameters"},
    ],
)
def test_parts_add_up_to_the_step(given: dict[str, Any]) -> None:
    chosen = planned(**given)
    parts = chosen.parts
    assert sum(parts.values()) == pytest.approx(chosen.step_s, rel=1e-9)
    assert all(seconds > 0 for seconds in parts.values())
    shown = chosen.metrics.idle_share - chosen.exposed_share
    assert parts.get("idle", 0.0) / chosen.step_s == pytest.approx(shown, abs=1e-6)


def test_each_part_has_what_its_knob_brings() -> None:
    """TP's collectives, the host's launches where no graph has them, exchanges that an overlap hides."""
    plain = planned("llama").parts
    assert "TP" not in plain
    assert "EP" not in plain
    assert planned("llama", tp=2).parts["TP"] > 0
    eager, graphed = (planned(cuda_graph=graph).parts["launches"] for graph in ("none", "whole"))
    assert eager > graphed
    hidden = planned(schedule="interleaved-overlap", vpp=2, pp=4).parts
    assert hidden.get("EP", 0.0) < planned(schedule="interleaved", vpp=2).parts["EP"]


def test_the_largest_part_is_printed_first() -> None:
    assert parts_text({"idle": 1.0, "GEMM": 2.0, "attention": 1.0}) == "GEMM 50.0%, idle 25.0%, attention 25.0%"
