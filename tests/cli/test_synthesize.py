"""`treadle synthesize`: its file goes through every command, and mistakes are named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from treadle.cli.app import app


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, args)
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["found.txt", "found.json", "found.csv"])
def test_the_file_goes_through_the_commands(name: str) -> None:
    code, printed, _ = run("synthesize", "--pp", "2", "-m", "4", "--max-activations", "1", "-o", name)
    assert code == 0
    assert "makespan 20, proven: no order is faster" in printed
    assert "no schedule here keeps placement and limits" in printed
    assert "# pp: 2" in run("show", name)[1]
    assert "clean: 2 ranks, 24 cells, peak 1 activation" in run("verify", name, "--max-activations", "1")[1]
    assert "makespan 20" in run("simulate", name)[1]
    assert run("draw", name)[0] == 0
    assert run("compare", "1f1b", name, "--pp", "2", "-m", "4")[0] == 0


@pytest.mark.slow
def test_the_file_is_rehearsed() -> None:
    run("synthesize", "--pp", "2", "-m", "4", "--max-activations", "1", "-o", "found.txt")
    assert run("dryrun", "found.txt", "--width", "8", "--tokens", "4", "--rank", "1")[0] == 0


def test_a_file_keeps_its_placement() -> None:
    run("synthesize", "--pp", "2", "-m", "4", "--placement", "1,2/0,3", "-o", "table.txt")
    assert "# placement: 1,2/0,3" in Path("table.txt").read_text()
    assert run("verify", "table.txt")[0] == 0


def test_the_best_of_ours_is_named() -> None:
    printed, notes = run("synthesize", "--pp", "2", "-m", "4", "--max-activations", "2")[1:]
    assert "best of the schedules here: zb-h1 13, as fast as this" in printed
    assert "-o schedule.txt writes it" in notes


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--memory-limit", "3GB"), "--memory-limit is about bytes, which need layers"),
        (("--memory-limit", "3GB", "--model-layers", "4"), "the costs do not say what layers save"),
        (("--vpp", "2", "--max-activations", "1"), "rank 0 holds 2 activations of one micro-batch"),
        (
            ("--costs", "deepseek-v3-model", "--memory-limit", "1GB"),
            r"holds [0-9.]+ GB of one micro-batch .* limit is 1 GB; give it [0-9.]+ GB or more",
        ),
        (("--memory-limit", "3g"), "'3g' is not a number of bytes; write 3GiB"),
        (("--vpp", "0"), "vpp is a whole number from 1, got 0"),
        (("--time-limit", "0"), "a time limit is more than 0 seconds, got 0"),
        (("-m", "100000"), "searched for at most 30000 forwards, dgrads and wgrads, got 600000"),
    ],
)
def test_mistakes_are_named(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run("synthesize", "--pp", "2", "-m", "4", *args)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("none/a.txt", "there is no directory none"),
        (".", "is a directory"),
        ("/proc/a.txt", "/proc/a.txt cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    output: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.cli.commands.synthesize.synthesize_schedule", lambda **_: pytest.fail("searched"))
    with pytest.raises(ValueError, match=said):
        run("synthesize", "--pp", "2", "-m", "4", "-o", output)


@pytest.mark.slow
def test_the_limit_that_is_proposed_is_enough() -> None:
    """It is that of the rank that needs most, and rounded up."""
    args = ("synthesize", "--pp", "4", "-m", "4", "--costs", "deepseek-v3-model", "--time-limit", "1")
    with pytest.raises(ValueError, match="give it") as refused:
        run(*args, "--memory-limit", "1GB")
    enough = str(refused.value).partition("give it ")[2].partition(" or more")[0]
    assert run(*args, "--memory-limit", enough)[0] == 0


def test_a_missing_solver_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(ValueError, match="pip install 'ortools>="):
        run("synthesize", "--pp", "2", "-m", "4")
