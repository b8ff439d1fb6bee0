"""`treadle plan`: what it prints and writes, and the mistakes it names."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import treadle
from tests.support.json_output import read_json
from treadle.cli.app import COMMANDS, app
from treadle.cli.plan_knobs import Knobs, parse_sizes
from treadle.estimate import load_cluster, load_model
from treadle.planner import SearchResult, find_plan
from treadle.planner.find_plan import usable_bytes
from treadle.planner.job_estimate import describe
from treadle.planner.ranked_search import OnBetter
from treadle.planner.space import TRAINED_RECOMPUTE, recompute_sets

SMALL = ("--model", "llama3-8b", "--cluster", "h100:16", "--tp", "2", "--pp", "2", "--micro-batch-size", "1")
"""A search of a second."""

EIGHT = ("--model", "llama3-8b", "--cluster", "h100:8")

CONFIG = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000,
          "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096}  # fmt: skip


def run(*args: str) -> str:
    done = CliRunner().invoke(app, ("plan", *args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_plan_says_what_was_chosen_and_why_not_another() -> None:
    lines = run(*SMALL, "--schedule", "1f1b", "--schedule", "zb-h1").splitlines()
    assert lines[0].startswith("llama3-8b on 16 h100: ")
    first = [line.split()[0] for line in lines if line.strip()]
    assert "batch                  524,288 tokens: 128 sequences of 4,096, in bf16" in [line.rstrip() for line in lines]
    assert any(re.fullmatch(r"1T tokens +[\d,.]+ days, [\d,]+ GPU-hours *", line) for line in lines)
    for word in (
        "step",
        "throughput",
        "MFU",
        "idle",
        "memory",
        "layout",
        "verified",
        "rank",
        "alternatives",
        "Pareto",
    ):
        assert word in first, word


@pytest.mark.slow
def test_the_directory_of_a_plan_simulates_to_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run("--model", "qwen3-30b-a3b", "--cluster", "h100:16", "--pp", "2", "--ep", "8", "--tp", "1",
                  "--micro-batch-size", "1", "--files", "plan", "-o", "plan.html")  # fmt: skip
    assert "  treadle draw plan" in [line.rstrip() for line in printed.splitlines()]
    done = CliRunner().invoke(app, ("simulate", "plan", "--json"), catch_exceptions=False)
    simulated = read_json("simulate", done.stdout)
    step = next(line.split()[1] for line in printed.splitlines() if line.startswith("step "))
    assert f"{simulated['makespan'] / 1e6:.3f}" == step
    assert treadle.verify(treadle.load("plan/schedule.txt")).clean
    svg = (tmp_path / "plan.html").read_text().split('<svg class="scatter"', 1)[1].split("</svg>")[0]
    dots = ElementTree.fromstring(f"<svg{svg}</svg>").findall(".//circle")
    assert len(dots) > 3


def test_knobs_are_kept() -> None:
    """Every option that names a value is in the job that is chosen."""
    layout = "Et*17|t*15L"
    args = (*SMALL, "--schedule", "1f1b", "--layout", layout, "--recompute", "mlp", "--offload", "no",
            "--sharding", "none", "--gradients", "bf16", "--tokens", "15T", "--json")  # fmt: skip
    chosen = read_json("plan", run(*args))["chosen"]
    assert (chosen["layout"], chosen["recompute"], chosen["sharding"]) == (layout, ["mlp"], "none")
    assert chosen["gradient_bytes"] == 2
    assert not chosen["offload"]
    assert chosen["run_tokens"] == 15 * 10**12
    assert chosen["run_gpu_hours"] == pytest.approx(15e12 / chosen["tokens_per_s_per_gpu"] / 3600)
    assert chosen["run_days"] == pytest.approx(chosen["run_gpu_hours"] / 16 / 24)


def test_offload_takes_no_more_than_the_hosts_memory() -> None:
    """What fits with a large host does not with a small one; the line names the share."""
    args = (*SMALL, "--schedule", "1f1b", "--recompute", "no", "--memory-limit", "30GiB", "--offload", "yes")
    large = run(*args, "--host-memory", "512GiB")
    assert re.search(r"^pinned host memory +up to [\d.]+ GiB per GPU, of its share of 512\.0 *$", large, re.MULTILINE)
    assert "without offload" not in large  # which was not searched
    with pytest.raises(ValueError, match=r"offload needs .* of host memory a GPU, more than its share of 1\.0 GiB"):
        run(*args, "--host-memory", "1GiB")


@pytest.mark.slow
def test_an_interrupt_leaves_the_best_job_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is a real one, and Ctrl-C comes right after its first answer."""
    seen: list[SearchResult] = []

    def interrupted(*args: Any, on_better: OnBetter, **more: Any) -> SearchResult:
        def better(found: SearchResult) -> None:
            on_better(found)
            seen.append(found)
            raise KeyboardInterrupt

        return find_plan(*args, on_better=better, **more)

    monkeypatch.setattr("treadle.cli.commands.plan.find_plan", interrupted)
    done = CliRunner().invoke(app, ("plan", "--model", "llama3-70b", "--cluster", "h100:512"))
    assert done.exit_code == 130
    assert "interrupted: this is the best job so far" in done.stderr
    (found,) = seen
    assert f"llama3-70b on 512 h100: {describe(found.best.job)}" in done.stdout
    assert re.search(rf"^step +{found.best.step_s:.3f} s", done.stdout, re.MULTILINE)


def test_an_interrupt_before_an_answer_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> SearchResult:
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.cli.commands.plan.find_plan", interrupted)
    done = CliRunner().invoke(app, ("plan", *SMALL, "--schedule", "1f1b"))
    assert done.exit_code != 0
    assert "step" not in done.stdout


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1,2,4", (1, 2, 4)), ("1-8", (1, 2, 4, 8)), ("3-20", (4, 8, 16)), ("3,6", (3, 6)), ("1-4,6,4", (1, 2, 4, 6))],
)
def test_a_range_has_its_powers_of_two(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text, "--tp") == sizes


def test_recompute_is_left_out_or_asked_for() -> None:
    model = load_model("qwen3-30b-a3b")
    every = recompute_sets(model)
    assert Knobs(recompute="no").space(model).recompute == ((),)
    assert Knobs(recompute="yes").space(model).recompute == every[1:]
    assert Knobs(recompute="core_attn,moe_act").space(model).recompute == (("core_attn", "moe_act"),)
    assert Knobs(recompute="yes", trainable=True).space(model).recompute == TRAINED_RECOMPUTE[1:]


@pytest.mark.slow
def test_steps_with_slow_gpus_stand_beside_those_without() -> None:
    args = (*SMALL, "--schedule", "1f1b", "--schedule", "zb-h1", "--stragglers", "10%", "--draws", "3")
    lines = [line.split() for line in run(*args).splitlines()]
    step = next(words[1] for words in lines if words[:1] == ["step"])
    head = next(number for number, words in enumerate(lines) if words[-6:-3] == ["step", "median", "p10"])
    assert lines[head + 1][1:3] == [step, "s"]
    made = read_json("plan", run(*args, "--json"))
    study, (row, *_) = made["stragglers"], made["stragglers"]["rows"]
    assert study["share"] == 0.1
    assert row["step_s"] == pytest.approx(made["chosen"]["step_s"])
    assert row["median_s"] == pytest.approx(row["step_s"] * (1 + row["p50"]))


@pytest.mark.slow
def test_names_may_have_any_letter(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b" \\c'
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(CONFIG))
    run("--model", str(odd), "--cluster", "a100:8", "--tp", "1", "--pp", "2", "--schedule", "1f1b", "--files", str(odd))
    made = tomllib.loads((odd / "train.toml").read_text())
    assert (made["output"], made["costs"]) == (f"runs/{odd.name}", str(odd / "costs.toml"))
    assert treadle.load_costs(made["costs"]).name == f"{odd.name} on 8 a100"


def test_a_config_json_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = ("--model", str(tmp_path), "--cluster", "a100:8", "--tp", "1", "--pp", "2", "--schedule", "1f1b", "--json")
    made = read_json("plan", run(*args))
    chosen = made["chosen"]
    assert chosen["dp"] == 4
    assert made["memory_limit_bytes"] == usable_bytes(load_cluster("a100:8"))
    assert sum(stage.count("t") for stage in chosen["layout"].split("|")) > 0


NARROW = {
    "kimi-k2": ("--tp", "1", "--pp", "16", "--ep", "32", "--tokens-per-batch", "8388608"),
    "config.json": ("--tp", "1", "--pp", "2"),
    "qwen3-30b-a3b": ("--pp", "2", "--ep", "8"),
}
"""Options that leave little to search, for the model of each example."""


@pytest.mark.slow
@pytest.mark.parametrize("example", COMMANDS["plan"].examples.removeprefix("Examples: ").split("   |   "))
def test_examples_of_the_help_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as it stands, with options behind it that narrow the search."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("ours.toml").write_text('gpu = "h100"\nnum_gpus = 128\n')
    command, *args = shlex.split(example)[1:]
    assert command == "plan"
    narrow = NARROW[args[args.index("--model") + 1]]
    assert "verified" in run(*args, *narrow, "--schedule", "1f1b", "--micro-batch-size", "1")


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
        ((*EIGHT, "--precision", "fp4"), "one of bf16, fp8, mxfp8, nvfp4, got 'fp4'; 8 h100 has rates for bf16, fp8"),
        ((*EIGHT, "--memory-limit", "70"), "at least 1GiB, got 70: 70 bytes; write 70GiB"),
        (
            (*EIGHT, "--host-memory", "256"),
            "share of its host's memory, at least 1GiB, got 256: 256 bytes; write 256GiB",
        ),
        ((*EIGHT, "--memory-limit", "70MB"), "at least 1GiB, got 70MB: 70 MB"),
        ((*EIGHT, "--memory-limit", "70G"), "'70G' is not a number of bytes; write 70GiB"),
        ((*EIGHT, "--memory-limit", "70gib"), "write 70GiB"),
        ((*EIGHT, "--memory-limit", "70gb"), "write 70GB"),
        ((*EIGHT, "--memory-limit", "much"), "write 80GB, 512MiB or 4e9"),
        (
            (*EIGHT, "--schedule", "1f1b", "--vpp", "2"),
            "1f1b cannot put 2 stages on each rank, got --vpp 2; interleaved, interleaved-overlap, zb-v,",
        ),
        (
            (*EIGHT, "--schedule", "zb-v", "--schedule", "1f1b", "--vpp", "2,4"),
            "cannot put 4 stages on each rank, got --vpp 2,4; interleaved, interleaved-overlap can",
        ),
        ((*EIGHT, "--schedule", "zb-v", "--vpp", "1"), "zb-v cannot put 1 stages"),
        ((*EIGHT, "--tp", "5-7"), "--tp 5-7 has no power of two; name the sizes, such as --tp 5,7"),
        ((*EIGHT, "--tp", "1-"), "whole numbers from 1 such as 1,2,4, or a range such as 1-8, got '1-'"),
        ((*EIGHT, "--offload", "some"), "--offload is no, yes or modules of a layer, got 'some'"),
        ((*EIGHT, "--recompute", "no,full"), "--recompute no is given alone, got 'no,full'; leave no or"),
        ((*EIGHT, "--recompute", "moe-act"), "--recompute is no, yes or modules of a layer, got 'moe-act'; did you"),
        ((*EIGHT, "--gradients", "fp16"), "--gradients is fp32 or bf16, got 'fp16'"),
        ((*EIGHT, "--sharding", "fsdp"), "--sharding is none or optimizer or gradients or parameters, got 'fsdp'"),
        ((*EIGHT, "--layout", "Eq|tL"), "'q' is not a block"),
        ((*EIGHT, "--layout", "Et|tL"), "a layout of llama3-8b has 32 layers and 0 MTP blocks, got 2 and 0"),
        ((*EIGHT, "--pp", "4", "--schedule", "1f1b", "--layout", "Et*16|t*16L"), "has 4 stages, the layout 2"),
        ((*EIGHT, "--tokens", "0"), "--tokens is what the whole run trains on, at least 1, such as 15T, got 0"),
        ((*EIGHT, "--tokens", "1.5"), "a count is whole, got 1.5; write 2, or a prefix such as 1.5T"),
        ((*EIGHT, "--tokens", "a lot"), "'a lot' is not a count"),
        ((*EIGHT, "--trainable", "--tp", "2"), "treadle.train has no TP, got --tp 2; leave one of the two out"),
        ((*EIGHT, "--trainable", "--gradients", "bf16"), "treadle.train has gradients in fp32, got --gradients bf16"),
        ((*EIGHT, "--trainable", "--recompute", "moe_act"), "treadle.train recomputes attn and mlp, got --recompute"),
        ((*EIGHT, "--draws", "5"), "--draws is about stragglers; give their share"),
        ((*EIGHT, "--straggler-factor", "2"), "--straggler-factor is about stragglers"),
        (("--model", "llama3-8b", "--cluster", "h100:8", "-o", "plan.png"), "a page's name ends in .html"),
        (("--model", "llama3-8b", "--cluster", "h100:8", "--schedule", "2f2b"), "is not a schedule"),
        (("--model", "llama3-405b", "--cluster", "h100:8", "--pp", "1"), "take more GPUs than 8, or a higher limit"),
    ],
)
def test_a_mistake_is_named_with_a_way_out(args: tuple[str, ...], told: str) -> None:
    error = CliRunner().invoke(app, ("plan", *args)).exception
    assert isinstance(error, ValueError)
    assert told in str(error)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--stragglers", "1%", "--draws", "0"), "--draws is a whole number from 1, got 0"),
        (("--stragglers", "200%"), "is not a share"),
        (("--files", "/proc/x"), "/proc/x cannot be written"),
        (("--files", "file/x"), "file is a file"),
        (("-o", "none/plan.html"), "there is no directory none"),
        (("-o", "/proc/plan.html"), "/proc/plan.html cannot be written"),
    ],
)
def test_what_follows_the_search_is_checked_before_it(
    args: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr("treadle.cli.commands.plan.find_plan", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(ValueError, match=told):
        CliRunner().invoke(app, ("plan", *EIGHT, *args), catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
