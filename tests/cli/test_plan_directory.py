"""The directory that `treadle plan --files` writes, as a target of other commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command import treadle as run
from tests.support.json_output import read_json
from treadle.estimate import Job, load_cluster, load_model
from treadle.ir.show import show_time
from treadle.planner.job_estimate import estimate_candidate
from treadle.planner.plan_directory import read_plan
from treadle.planner.plan_files import write_files
from treadle.planner.planned_step import PlannedStep
from treadle.planner.space import Candidate

NAME = "my plan"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlannedStep, Path]:
    """A plan with tensor and expert parallelism, recomputation, and replicas of experts; where its directory is."""
    job = Job(
        load_model("qwen3-30b-a3b"),
        load_cluster("h100:32"),
        tp=2,
        pp=4,
        ep=4,
        global_batch_size=32,
        recompute=("attn",),
    )
    chosen = PlannedStep.of(estimate_candidate(Candidate(job, balanced=True)).simulated_whole())
    directory = tmp_path_factory.mktemp("plans")
    write_files(chosen, directory / NAME)
    return chosen, directory


def test_simulate_gives_the_plans_step_and_memory(made: tuple[PlannedStep, Path]) -> None:
    chosen, directory = made
    found = read_json("simulate", run("simulate", NAME, "--json", cwd=directory).stdout)
    assert found["makespan"] / 1e6 == pytest.approx(chosen.step_s, rel=1e-9)
    assert found["peak"]["most"] == chosen.metrics.peak


def test_options_beside_the_directory_replace_the_plans(made: tuple[PlannedStep, Path]) -> None:
    chosen, directory = made
    for more in (("--layout", "Et*9|(t*13|)*2t*13L"), ("--recompute", "attn,mlp"), ("--costs", "unit")):
        found = read_json("simulate", run("simulate", NAME, *more, "--json", cwd=directory).stdout)
        assert found["makespan"] / 1e6 != pytest.approx(chosen.step_s, rel=1e-3), more


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--layers", "4"), "my plan is a plan with its own layers, got --layers 4; leave it out, or give --layout"),
        (("--dense", "1"), "got --dense 1; leave it out"),
        (("--pp", "8"), "my plan has pp 4, got --pp 8; leave the option out"),
        (("--placement", "v"), "my plan has its placement, got --placement v; leave the option out"),
    ],
)
def test_options_that_do_not_fit_are_refused(made: tuple[PlannedStep, Path], more: tuple[str, ...], told: str) -> None:
    done = run("simulate", NAME, *more, cwd=made[1])
    assert done.returncode == 2
    assert told in done.stderr


def test_every_command_takes_it(made: tuple[PlannedStep, Path]) -> None:
    chosen, directory = made
    ops = chosen.trace.program.num_ops
    assert f"clean: 4 ranks, {ops} ops" in run("verify", NAME, cwd=directory).stdout
    assert run("draw", NAME, cwd=directory).stdout.count("\n") > 4
    assert run("show", NAME, "--rows", cwd=directory).stdout.startswith("0: F0.0")
    assert "attn" in run("show", NAME, "--lower", cwd=directory).stdout
    step = show_time(chosen.trace.clock, chosen.trace.makespan)
    assert f"a step takes {step} to the begin of the next, " in run("why", NAME, cwd=directory).stdout
    assert run("dryrun", NAME, "--width", "8", "--tokens", "8", cwd=directory).returncode == 0


def test_schedules_beside_it_have_its_model_and_size(made: tuple[PlannedStep, Path]) -> None:
    chosen, directory = made
    found = read_json("compare", run("compare", NAME, "1f1b", "interleaved:vpp=2", "--json", cwd=directory).stdout)
    plan, same, other = found["rows"]
    assert plan["makespan"]["value"] == same["makespan"]["value"]
    assert other["makespan"]["value"] != plan["makespan"]["value"]
    told = run("compare", NAME, "interleaved:vpp=2", cwd=directory).stdout
    size = f"same for all: 48 layers, 4 ranks, {chosen.estimate.job.num_microbatches} micro-batches"
    assert size in told, told


def test_its_schedule_alone_is_noted(made: tuple[PlannedStep, Path]) -> None:
    done = run("verify", f"{NAME}/schedule.txt", cwd=made[1])
    assert done.returncode == 0
    assert (
        "my plan/schedule.txt is of a plan; name my plan instead to have its costs, layout and mesh too" in done.stderr
    )


def test_import_refuses_what_nobody_measured(made: tuple[PlannedStep, Path]) -> None:
    done = run("import", NAME, cwd=made[1])
    assert done.returncode == 2
    assert "my plan is a plan, of which nothing was measured; 'treadle simulate' predicts its step" in done.stderr


@pytest.mark.parametrize(
    ("pattern", "instead", "told"),
    [
        ("ep = .*", 'ep = "x"', "plan.toml: ep is a whole number from 1, got 'x'"),
        ("ep = .*", "epp = 2", "plan.toml: epp is not known; did you mean 'ep'?"),
        ("layout = .*", "", "plan.toml: layout is missing; it has layout, "),
        ("recompute = .*", 'recompute = ["atn"]', "plan.toml: recompute[0] is "),
        ("layout = .*", 'layout = "Et|qL"', "plan.toml: layout, character 4: 'q' is not a block"),
        ("moe = .*", "", "plan.toml: expert parallelism needs MoE layers"),
    ],
)
def test_a_damaged_file_is_named(
    made: tuple[PlannedStep, Path], tmp_path: Path, pattern: str, instead: str, told: str
) -> None:
    write_files(made[0], tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text(re.sub(f"(?m)^{pattern}$", instead, path.read_text()))
    with pytest.raises(ValueError, match=re.escape(told)):
        read_plan(tmp_path)


def test_a_missing_file_is_named(made: tuple[PlannedStep, Path], tmp_path: Path) -> None:
    write_files(made[0], tmp_path)
    (tmp_path / "schedule.txt").unlink()
    done = run("simulate", str(tmp_path))
    assert done.returncode == 2
    assert f"there is no file {tmp_path}/schedule.txt" in done.stderr
