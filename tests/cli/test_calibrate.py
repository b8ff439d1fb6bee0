"""`treadle calibrate`: its estimates are plan's, its file goes through plan, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.json_output import read_json
from treadle.cli.app import app
from treadle.estimate import load_cluster

PLAN = ("--model", "llama3-8b", "--tp", "2", "--pp", "2", "--micro-batch-size", "1", "--schedule", "1f1b",
        "--tokens-per-batch", "524288")  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def chosen(cluster: str) -> dict[str, object]:
    job = read_json("plan", run("plan", "--cluster", cluster, *PLAN, "--json")[0])["chosen"]
    assert isinstance(job, dict)
    return job


def write(job: dict[str, object], *factors: float) -> None:
    """Write runs of a planned job, and of smaller batches of it, as so many times slower than planned."""
    names = ("tp", "pp", "micro_batch_size", "schedule", "precision", "cuda_graph", "layout", "sharding")
    rows = [f"model,{','.join(names)},recompute,offload,global_batch_size,step_s"]
    recompute, offload = (" ".join(job[name]) for name in ("recompute", "offload"))  # type: ignore[arg-type]
    for index, factor in enumerate(factors):
        batch = int(job["global_batch_size"]) >> index  # type: ignore[call-overload]
        step = factor * float(job["step_s"]) / 2**index  # type: ignore[arg-type]
        rows.append(f"llama3-8b,{','.join(str(job[name]) for name in names)},{recompute},{offload},{batch},{step}")
    Path("runs.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.slow
def test_estimates_before_and_after_are_those_of_plan() -> None:
    """With the plan's own layout the same job has the same step, before and with the written file."""
    job = chosen("h100:16")
    write(job, 1.2)
    printed, _ = run("calibrate", "--cluster", "h100:16", "--measured", "runs.csv", "-o", "ours.toml", "--json")
    (found,) = read_json("calibrate", printed)["runs"]
    assert found["before_s"] == pytest.approx(job["step_s"], rel=1e-12)
    assert job["step_s"] < found["after_s"] < found["measured_s"]
    again = chosen("ours.toml")
    assert (again["layout"], again["recompute"]) == (job["layout"], job["recompute"])
    assert again["step_s"] == pytest.approx(found["after_s"], rel=1e-12)
    printed, _ = run("calibrate", "--cluster", "ours.toml", "--measured", "runs.csv", "-o", "more.toml", "--json")
    assert read_json("calibrate", printed)["runs"][0]["before_s"] == pytest.approx(found["after_s"], rel=1e-12)
    assert load_cluster("more.toml").name == "more"


@pytest.mark.slow
def test_table_has_every_run_medians_and_constants() -> None:
    write(chosen("h100:16"), 1.2, 1.2, 1.25)
    printed, notes = run("calibrate", "--cluster", "h100:16", "--measured", "runs.csv")
    lines = printed.splitlines()
    assert lines[0].split() == ["run", "measured", "before", "after", "leave-one-out"]
    medians = next(line for line in lines if line.startswith("median")).split()[-3:]
    before, after, left_out = (float(share.rstrip("%")) for share in medians)
    assert after < left_out < before
    assert any(line.startswith("gemm_bf16 ") for line in lines)
    assert "not constrained by these runs: " in printed
    assert "ep_nic" in printed.partition("not constrained by these runs: ")[2]
    assert "-o ours.toml writes them" in notes
    assert "suspicious" not in printed


@pytest.mark.slow
def test_a_run_far_off_is_pointed_out() -> None:
    write(chosen("h100:16"), 1.0, 1.0, 3.0)
    printed, _ = run("calibrate", "--cluster", "h100:16", "--measured", "runs.csv", "-o", "ours.toml")
    assert "suspicious: line 4, " in printed
    assert "suspicious: line 2, " not in printed
    assert "wrote ours.toml" in printed


def test_a_run_that_should_not_fit_is_noted() -> None:
    head = "model,num_gpus,global_batch_size,seq_len,micro_batch_size,step_s\n"
    Path("runs.csv").write_text(head + "llama3-8b,8,64,8192,4,40\n")
    _, notes = run("calibrate", "--cluster", "h100:8", "--measured", "runs.csv")
    assert "line 2, llama3-8b 8 GPUs" in notes
    assert "more than fit, and it ran" in notes


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--measured", "none.csv"), "there is no file none.csv"),
        (("--measured", "runs.csv", "-o", "ours.json"), "a cluster's file ends in .toml, got 'ours.json'"),
        (("--measured", "runs.csv", "-o", "no/ours.toml"), "there is no directory no"),
        (("--measured", "runs.csv"), "runs.csv is empty"),
    ],
)
def test_mistakes_are_named(args: tuple[str, ...], told: str) -> None:
    Path("runs.csv").write_text("")
    with pytest.raises(ValueError, match=told):
        run("calibrate", "--cluster", "h100:16", *args)
