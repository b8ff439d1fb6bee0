"""`treadle simulate --every-gpu`: folded where it can be, and the same numbers either way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from treadle.cli.app import app
from treadle.cli.slow import parse_share

MESH = ("simulate", "zb-v", "--pp", "4", "-m", "8", "--layers", "1", "--moe", "--ep", "4", "--dp", "3", "--every-gpu")
COSTS = ("--costs", "deepseek-v3-h800")


def run(*args: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, args)
    assert done.exception is None, done.exception
    return done.stdout, done.stderr


def numbers(*args: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run(*args, "--json")[0])
    for key in ("about", "critical_path"):  # of several paths either may be shown
        told.pop(key)
    return told


@pytest.mark.parametrize(
    "slow",
    [
        ("--stragglers", "5%", "--straggler-factor", "1.5", "--seed", "3"),
        (),
        ("--slowness", "0.1", "--seed", "1"),
        ("--slowness", "0.1", "--stragglers", "0.1"),
    ],
    ids=str,
)
def test_folded_and_unfolded_tell_the_same_numbers(slow: tuple[str, ...]) -> None:
    folded = numbers(*MESH, *COSTS, *slow)
    assert folded == numbers(*MESH, *COSTS, *slow, "--unfolded")
    assert len(folded["ranks"]) == 48
    if slow:
        assert folded["makespan"] > numbers(*MESH, *COSTS)["makespan"]


def test_a_line_says_that_the_mesh_is_folded() -> None:
    slow = ("--stragglers", "1", "--straggler-factor", "2")
    first = run(*MESH, *COSTS, *slow)[0].splitlines()[0]
    assert first.endswith("48 of 48 ranks slower, folded: 1 different of 3 replicas")
    assert "folded" not in run(*MESH, *COSTS, *slow, "--unfolded")[0]
    assert "busiest" in run(*MESH, *COSTS, "--stragglers", "2%")[0]


def test_stragglers_and_slowness_are_drawn_apart() -> None:
    """Stragglers that are no slower show the slowness alone: another draw than without them, of the same seed."""
    step = ("simulate", "gpipe", "--pp", "8", "-m", "8")
    alone = numbers(*step, "--slowness", "0.5")
    both = numbers(*step, "--slowness", "0.5", "--stragglers", "50%", "--straggler-factor", "1")
    assert [rank["busy"] for rank in both["ranks"]] != [rank["busy"] for rank in alone["ranks"]]
    assert both["makespan"] > numbers(*step)["makespan"]


def test_a_trace_to_write_has_the_ops_of_all_gpus(tmp_path: Path) -> None:
    out, _ = run(*MESH, *COSTS, "-o", str(tmp_path / "trace.npz"))
    assert "folded" not in out
    assert run("simulate", str(tmp_path / "trace.npz"))[0].startswith(out.split(",")[0])


def test_a_mesh_that_cannot_be_folded_is_simulated_unfolded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.step.why_not", lambda program: "attn_f 0.0 waits for all replicas")
    out, told = run(*MESH, *COSTS)
    assert "every GPU is simulated, unfolded: attn_f 0.0 waits for all replicas" in told
    assert "folded" not in out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--stragglers", "x"), "'x' is not a share; write 0.1% or 0.001"),
        (("--stragglers", "120%"), "up to 100% or 1"),
        (("--straggler-factor", "2"), "give their share: --stragglers 0.1%"),
        (("--stragglers", "1%", "--straggler-factor", "0.5"), "a factor from 1 to 1000"),
        (("--slowness", "-1"), "a share from 0 to 10"),
    ],
)
def test_slow_ranks_that_make_no_sense_are_refused(args: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        CliRunner().invoke(app, [*MESH, *COSTS, *args], catch_exceptions=False)


def test_unfolded_without_every_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="add --every-gpu"):
        CliRunner().invoke(app, ["simulate", "1f1b", "--pp", "2", "-m", "4", "--unfolded"], catch_exceptions=False)


def test_shares_are_read_in_percent_or_not() -> None:
    assert [parse_share(text) for text in ("0.1%", "0.001", "1", "100%", "0")] == [0.001, 0.001, 1, 1, 0]


BIG = ("--pp", "16", "--vpp", "4", "-m", "128", "--layers", "1", "--moe", "--ep", "64", "--dp", "128", "--every-gpu")


@pytest.mark.parametrize(
    "command",
    [
        ("verify",),
        ("draw",),
        ("draw", "-o", "x.html"),
        ("simulate", "--unfolded"),
        ("simulate", "-o", "x.json"),
        ("simulate", "-o", "x.json", "--ranks", "0-7"),
        ("compare",),
    ],
    ids=" ".join,
)
def test_a_mesh_that_memory_does_not_hold_is_refused(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is built: no test machine has 55 GiB to spare, or this one is told so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("treadle.passes.mesh.available_bytes", lambda: 40 << 30)
    name, *rest = command
    targets = ("interleaved-overlap", "interleaved") if name == "compare" else ("interleaved-overlap",)
    done = CliRunner().invoke(app, (name, *targets, *rest, *BIG, *COSTS))
    assert done.exit_code != 0
    told = " ".join((done.stderr or str(done.exception)).split()) or str(done.exception)
    assert re.search(r"131,072 GPUs as a rank makes [\d,]{13,} ops, about \d+\.\d GiB, .* 40\.0 GiB left", told), told
    assert "leave `every_gpu` out" in told
    assert "--ranks" not in told
    assert not list(tmp_path.iterdir())


def test_a_mesh_whose_gpus_all_differ_says_how_much_is_simulated() -> None:
    told = run(*MESH, *COSTS, "--slowness", "0.1")[1]
    found = re.search(r"nothing folds, as every replica differs: ([\d,]+) ops are simulated", told)
    assert found is not None
    unfolded = json.loads(run(*MESH, *COSTS, "--unfolded", "--json")[0])
    assert unfolded["num_ops"] == int(found[1].replace(",", ""))
    assert "nothing folds" not in run(*MESH, *COSTS)[1]
    assert "nothing folds" not in run(*MESH, *COSTS, "--stragglers", "1")[1]


def test_replicas_that_memory_does_not_hold_are_refused_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.passes.mesh.available_bytes", lambda: 10_000)
    done = CliRunner().invoke(app, (*MESH, *COSTS, "--slowness", "0.1"))
    assert done.exit_code != 0
    assert "GiB left" in " ".join((done.stderr + str(done.exception)).split())
