"""CUDA graphs of a plan: none unless asked for, and what partial ones would change."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.support.json_output import read_json
from treadle.cli.app import app
from treadle.estimate import load_model
from treadle.planner import SearchSpace, find_plan

PUBLISHED = (
    *("--model", "qwen3-235b-a22b", "--cluster", "h100:256", "--precision", "fp8", "--tokens-per-batch", "32Mi"),
    *("--tp", "2", "--pp", "8", "--vpp", "4", "--ep", "32", "--micro-batch-size", "1"),
    *("--schedule", "interleaved-overlap", "--recompute", "no"),
)
"""A run of Megatron-Bridge as a person types it: 1,611 to 1,712 tokens/s/GPU, without graphs."""

SPACE = SearchSpace(tp=(1,), pp=(1,), ep=(8,), micro_batch_size=(1,), schedules=("1f1b",), recompute=((),))


def run(*args: str) -> str:
    done = CliRunner().invoke(app, ("plan", *args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_a_published_run_as_typed_is_inside_its_range() -> None:
    chosen = read_json("plan", run(*PUBLISHED, "--json"))["chosen"]
    assert chosen["cuda_graph"] == "none"
    tokens = chosen["global_batch_size"] * chosen["seq_len"] / 256
    low, high = (tokens / chosen["uncertainty"][end] for end in ("high_s", "low_s"))
    assert low <= 1611 <= 1712 <= high


def test_no_graphs_unless_asked_for_and_partial_ones_are_an_alternative() -> None:
    found = find_plan("qwen3-30b-a3b", "h100:32", space=SPACE)
    assert found.best.job.cuda_graph == found.fastest.job.cuda_graph == "none"
    (other,) = (each for each in found.alternatives if each.knob == "cuda_graph")
    assert other.value == "partial"
    assert other.estimate.job.cuda_graph == "partial"
    assert other.slower == pytest.approx(other.estimate.step_s / found.best.step_s - 1)
    assert other.estimate.step_s < found.best.step_s


def test_graphs_are_searched_where_they_are_asked_for() -> None:
    typed = ("--model", "qwen3-30b-a3b", "--cluster", "h100:32", "--tp", "1", "--pp", "1", "--ep", "8")
    size = ("--micro-batch-size", "1", "--schedule", "1f1b", "--recompute", "no")
    lines = run(*typed, *size, "--cuda-graph", "none,partial").splitlines()
    shown = next(line for line in lines if line.startswith("CUDA graphs"))
    assert shown.split()[2] == "partial"
    assert "--cuda-graph-impl transformer_engine" in " ".join(lines)
    assert load_model("qwen3-30b-a3b").is_moe
    assert "--cuda-graph-modules attn moe_router moe_preprocess" in " ".join(" ".join(lines).split())
