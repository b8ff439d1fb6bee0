"""Profiles where commands take schedules and traces: a directory is a target, and what is written is reported."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.command import treadle as run
from tests.support.injected_causes import Run, write
from tests.support.paths import ROOT

PROFILE = ROOT / "examples" / "profiles" / "torch"


def test_the_directory_of_a_profile_is_a_target(tmp_path: Path) -> None:
    imported = json.loads(run("import", str(PROFILE), "--json").stdout)
    simulated = json.loads(run("simulate", str(PROFILE), "--json").stdout)
    assert simulated["makespan"] == imported["makespan"]
    drawn = run("draw", str(PROFILE))
    assert drawn.returncode == 0, drawn.stderr
    assert [line.split()[0] for line in drawn.stdout.splitlines() if line[:1].isdigit()][:4] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("import", str(PROFILE), "-o"), "run.json.gz"),
        (("import", str(PROFILE), "--fit"), "job.toml"),
        (("import", str(PROFILE), "--schedule"), "ran.txt"),
        (("why", str(PROFILE), "-o"), "why.html"),
        (("simulate", "1f1b", "--pp", "2", "-m", "2", "-o"), "trace.npz"),
        (("draw", "1f1b", "--pp", "2", "-m", "2", "-o"), "page.html"),
        (("show", "1f1b", "--pp", "2", "-m", "2", "--lower", "-o"), "program.npz"),
    ],
)
def test_a_file_that_was_written_is_reported(command: tuple[str, ...], name: str, tmp_path: Path) -> None:
    done = run(*command, name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"wrote {name}" in done.stderr
    assert (tmp_path / name).is_file()


def test_all_doors_fit_the_same_costs_and_say_how_far_they_are_off(tmp_path: Path) -> None:
    imported = run("import", str(PROFILE), "-o", "run.json.gz", "--fit", "imported.toml", cwd=tmp_path)
    for name in ("run.json.gz", str(PROFILE)):
        compared = run("compare", name, "--fit", "compared.toml", cwd=tmp_path)
        assert (tmp_path / "compared.toml").read_text() == (tmp_path / "imported.toml").read_text()
        assert "the fitted costs predict" in imported.stderr
        assert compared.stderr.partition("predict ")[2].startswith(imported.stderr.partition("predict ")[2][:10])
    costs = ("--costs", "compared.toml")
    same = run("simulate", "interleaved", "--pp", "4", "--vpp", "2", "-m", "8", *costs, "--json", cwd=tmp_path)
    again = json.loads(same.stdout)
    assert f"predict {again['makespan'] / 1e6:.4g} s" in compared.stderr
    other = run("simulate", "interleaved", "--pp", "4", "--vpp", "4", "-m", "8", *costs, cwd=tmp_path)
    assert "of a cut into 8 stages, and the schedule has 16" in other.stderr


def test_a_cut_that_gives_nothing_is_not_proposed(tmp_path: Path) -> None:
    """With a layer for each stage no cut shortens a long head's stage."""
    size = ("interleaved", "--pp", "4", "--vpp", "2", "-m", "8", "--costs", "job.toml")
    for layers, is_proposed in ((8, False), (32, True)):
        model = f"[model]\nlayers = {layers}\nf = {layers}000\nb = {layers}000\n"
        (tmp_path / "job.toml").write_text(model + "[ends]\nhead_f = 2500\nhead_b = 2500\n")
        assert run("simulate", *size, "-o", "run.npz", cwd=tmp_path).returncode == 0
        done = run("why", "run.npz", cwd=tmp_path)
        assert done.stdout.startswith("Stage 7, the last, takes "), done.stdout + done.stderr
        assert ("treadle balance" in done.stdout) == is_proposed
        assert ("no cut of (t|)*7tL into whole layers" in done.stderr) == (not is_proposed)
    layout, _, told = done.stdout.splitlines()[3].strip().removeprefix("finds ").partition(": ")
    again = run("simulate", *size, "--layout", layout, "--json", cwd=tmp_path)
    assert told.startswith(f"{json.loads(again.stdout)['makespan'] / 1000:.4g} ms from begin to end"), told


@pytest.mark.slow
def test_a_slow_stage_is_cut_better_by_the_commands_that_are_printed(tmp_path: Path) -> None:
    runs = (Run("slow stage", "NDTimeline", 4, 4, seed=seed) for seed in range(9))
    cause = next(each for each in runs if each.at[1] in (1, 2))
    (tmp_path / "profile").mkdir()
    write(cause, tmp_path / "profile")
    told = run("why", "profile", cwd=tmp_path).stdout.splitlines()
    assert told[0].startswith(f"Stage {cause.at[1]} takes ")
    for line in told[1:3]:
        done = run(*shlex.split(line)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    layout, _, gain = told[3].strip().removeprefix("finds ").partition(": ")
    assert done.stdout.splitlines()[-1] == f"balanced, as Megatron reads it: {layout}"
    size = ("1f1b", "--pp", "4", "-m", "8", "--costs", "job.toml")
    spans = [
        json.loads(run("simulate", *size, "--layout", cut, "--json", cwd=tmp_path).stdout)["makespan"]
        for cut in ("Et*4|t*4|t*4|t*4L", layout)
    ]
    assert 1 - spans[1] / spans[0] == pytest.approx(float(gain.split()[-2].rstrip("%")) / 100, abs=0.01)
    assert spans[1] < 0.95 * spans[0]


def test_factors_of_stages_are_refused_where_schedules_cut_differently(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text("[model]\nlayers = 16\nf = 16\nb = 32\n[stage.1]\nfactor = 2\n")
    size = ("--pp", "4", "-m", "8", "--costs", "slow.toml")
    differ = run("compare", "1f1b", "interleaved", *size, cwd=tmp_path)
    assert differ.returncode == 2
    assert "whose layers depend on the cut: 1f1b has 4 stages, interleaved has 8" in differ.stderr
    assert run("compare", "1f1b", "gpipe", *size, cwd=tmp_path).returncode == 0


def test_a_directory_without_a_profile_is_refused_with_its_files_and_why(tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    (tmp_path / "notes.txt").write_text("no profile\n")
    done = run("import", str(tmp_path))
    assert done.returncode == 2
    assert f"not read: {tmp_path}/empty.json: empty" in done.stderr
    assert f"{tmp_path}/notes.txt: not read: no profile of a form that Treadle knows" in done.stderr


def test_a_figure_names_a_schedule_as_its_file_does(tmp_path: Path) -> None:
    rows = run("show", "1f1b", "--pp", "2", "-m", "2", "--rows").stdout
    (tmp_path / "a.txt").write_text(f"# name: mine\n{rows}")
    (tmp_path / "b.txt").write_text(rows)
    both = run("draw", "a.txt", "b.txt", cwd=tmp_path).stdout
    assert "mine: 2 devices" in both
    assert "b.txt: 2 devices" in both
    (tmp_path / "b.txt").write_text(f"# name: mine\n{rows}")
    assert "a.txt: 2 devices" in run("draw", "a.txt", "b.txt", cwd=tmp_path).stdout
