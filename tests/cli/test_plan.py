"""`treadle plan`: what it prints and writes, and the mistakes it names."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import treadle
from tests.support.json_output import read_json
from treadle.cli.app import app

SMALL = ("--model", "llama3-8b", "--cluster", "h100:16", "--tp", "2", "--pp", "2", "--micro-batch-size", "1")
"""A search of a second."""


def run(*args: str) -> str:
    done = CliRunner().invoke(app, ("plan", *args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_plan_says_what_was_chosen_and_why_not_another() -> None:
    lines = run(*SMALL, "--schedule", "1f1b", "--schedule", "zb-h1").splitlines()
    assert lines[0].startswith("llama3-8b on 16 h100: ")
    first = [line.split()[0] for line in lines if line.strip()]
    for word in ("step", "tokens", "MFU", "bubble", "memory", "layout", "verified", "rank", "why", "nothing"):
        assert word in first, word


@pytest.mark.slow
def test_files_give_the_same_step_to_simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed command's options and files make the Program of the plan."""
    monkeypatch.chdir(tmp_path)
    printed = run("--model", "qwen3-30b-a3b", "--cluster", "h100:16", "--pp", "2", "--ep", "8", "--tp", "1",
                  "--micro-batch-size", "1", "--files", "plan", "-o", "plan.html")  # fmt: skip
    command = next(line.split() for line in printed.splitlines() if line.startswith("  treadle draw"))
    options = [word.strip("'") for word in command[3:]]
    done = CliRunner().invoke(app, ("simulate", "plan/schedule.txt", *options, "--json"), catch_exceptions=False)
    simulated = read_json("simulate", done.stdout)
    step = next(line.split()[1] for line in printed.splitlines() if line.startswith("step "))
    assert f"{simulated['makespan'] / 1e6:.3f}" == step
    assert treadle.verify(treadle.load("plan/schedule.txt")).clean
    svg = (tmp_path / "plan.html").read_text().split("<svg", 1)[1].split("</svg>")[0]
    dots = ElementTree.fromstring(f"<svg{svg}</svg>").findall(".//circle")
    assert len(dots) > 3


def test_a_config_json_is_taken_as_it_is(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000,
              "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ("--model", str(tmp_path), "--cluster", "a100:8", "--tp", "1", "--pp", "2", "--schedule", "1f1b", "--json")
    chosen = read_json("plan", run(*args))["chosen"]
    assert chosen["dp"] == 4
    assert sum(stage.count("t") for stage in chosen["layout"].split("|")) > 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--model", "llama3-71b", "--cluster", "h100:8"), "llama3-70b"),
        (("--model", "llama3-8b", "--cluster", "h101"), "a cluster is a .toml file or one of"),
        (("--model", "llama3-8b", "--cluster", "h100:many"), "h100:2048"),
        (("--model", "llama3-8b", "--cluster", "h100:8", "--precision", "nvfp4"), "computes in bf16, fp8"),
        (("--model", "llama3-8b", "--cluster", "h100:8", "--pp", "0"), "--pp takes whole numbers from 1"),
        (("--model", "llama3-8b", "--cluster", "h100:8", "--tokens-per-batch", "1"), "at least one sequence"),
        (("--model", "llama3-8b", "--cluster", "h100:8", "--tokens-per-batch", "10000"), "take 8,192 or 12,288"),
        (
            ("--model", "llama3-8b", "--cluster", "h100:8", "--memory-limit", "90GiB"),
            "has 80.0 GiB, got a limit of 90.0",
        ),
        (("--model", "llama3-8b", "--cluster", "h100:8", "-o", "plan.png"), "a page's name ends in .html"),
        (("--model", "llama3-8b", "--cluster", "h100:8", "--schedule", "2f2b"), "is not a schedule"),
        (("--model", "llama3-405b", "--cluster", "h100:8", "--pp", "1"), "take more GPUs than 8, or a higher limit"),
    ],
)
def test_a_mistake_is_named_with_a_way_out(args: tuple[str, ...], told: str) -> None:
    error = CliRunner().invoke(app, ("plan", *args)).exception
    assert isinstance(error, ValueError)
    assert told in str(error)
