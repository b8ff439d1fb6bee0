"""`treadle balance`: the cuts it weighs, the layout it prints, the mistakes it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.json_output import read_json
from treadle.cli.app import app
from treadle.cli.wording import as_typed
from treadle.estimate import Job, load_cluster, load_model
from treadle.ir.blocks import parse_layout
from treadle.planner.job_estimate import estimate_job

COSTS = """
unit = "us"
[layer]
attn_f = 1
attn_b = 2
mlp_f = 3
mlp_b = 4
[dense]
mlp_f = 1
mlp_b = 1
[ends]
head_f = 10
head_b = 10
[saved_bytes]
attn = 5
mlp = 7
dense_mlp = 2
embed = 1
head = 100
[stage.1]
factor = 2
saved_factor = 3
"""
"""A layer takes 10 and saves 12, a dense one 5 and 7, the head 20 and 100; stage 1 takes twice that, saves thrice."""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(COSTS, "utf-8")


def run(*args: str) -> str:
    done = CliRunner().invoke(app, ("balance", *args), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_stages_are_weighed_and_the_layout_can_be_pasted() -> None:
    shown = run("--pp", "3", "--costs", "mine.toml", "--model-layers", "6", "--dense", "2", "--layout", "Et|tt|t*3L")
    lines = [line.split() for line in shown.splitlines()]
    assert ["0", "Edd", "10", "us", "15", "bytes"] in lines  # the default cut: two layers each
    assert ["2", "ttL", "40", "us", "124", "bytes"] in lines
    assert ["1", "t", "20", "us", "36", "bytes"] in lines  # the balanced one
    assert ["1", "dt", "30", "us", "57", "bytes"] in lines  # the layout: its second layer is dense
    assert ["default", "1:", "40", "us", "1:", "40", "us"] in lines
    assert ["balanced", "0:", "30", "us", "0:", "30", "us"] in lines
    assert ["Et|tt|t*3L", "2:", "50", "us", "2:", "50", "us"] in lines
    assert lines[-1] == ["balanced,", "as", "Megatron", "reads", "it:", "Ettttt|t|L"] or lines[-1][-1].count("|") == 2


def test_a_rank_holds_several_stages_and_a_schedule_makes_a_step() -> None:
    size = ("--pp", "2", "--costs", "mine.toml", "--model-layers", "8", "--json")
    loop = read_json("balance", run(*size, "--vpp", "2"))
    v = read_json("balance", run(*size, "--placement", "v"))
    step = read_json("balance", run(*size, "--schedule", "zb-v", "-m", "4"))
    assert (loop["placement"], v["placement"], step["placement"]) == ([[0, 2], [1, 3]], *[[[0, 3], [1, 2]]] * 2)
    default = v["cuts"][0]
    assert [stage["time"] for stage in default["stages"]] == [20, 40, 20, 40]
    assert (default["slowest_rank"], default["slowest_rank_time"]) == (0, 60)
    assert loop["cuts"][0]["slowest_rank_time"] == 80
    assert default["step"] is None
    assert step["cuts"][0]["step"]["makespan"] >= 4 * 60
    assert (step["schedule"], step["microbatches"]) == ("zb-v", 4)


def test_published_layout_of_deepseek_v3_is_the_balanced_one() -> None:
    published = "Et*3|(tt|)*29m|L"
    size = ("--pp", "16", "--vpp", "2", "--costs", "deepseek-v3-model", "--layout", published, "--json")
    _, balanced, given = read_json("balance", run(*size, "--block-in-each"))["cuts"]
    assert balanced["stages"] == given["stages"]
    _, with_layers, _ = read_json("balance", run(*size))["cuts"]
    assert with_layers["slowest_stage_time"] > 1.5 * balanced["slowest_stage_time"]


def test_a_model_on_a_cluster_is_cut_as_a_plan_does() -> None:
    """The blocks are the model's, and their times those of a plan with the same sizes."""
    job = ("--model", "deepseek-v3", "--cluster", "h100:512", "--tp", "2", "--ep", "64", "--micro-batch-size", "1")
    size = ("--pp", "8", "--vpp", "2", "--schedule", "interleaved", "-m", "16")
    found = read_json("balance", run(*job, *size, "--json"))
    model = load_model("deepseek-v3")
    assert found["model"] == model.blocks
    default, balanced = found["cuts"]
    assert balanced["slowest_stage_time"] < default["slowest_stage_time"]
    planned = Job(
        model, load_cluster("h100:512"), tp=2, pp=8, vpp=2, ep=64, schedule="interleaved", global_batch_size=32 * 16,
        layout=parse_layout(balanced["layout"]),
    )  # fmt: skip
    step_s = estimate_job(planned).simulated_whole().step_s
    assert balanced["step"]["makespan"] / 1e6 == pytest.approx(
        step_s, rel=0.01
    )  # the optimizer's share by rank differs


def test_a_faster_cut_with_stages_that_have_no_layer_is_printed() -> None:
    size = ("--pp", "32", "--costs", "deepseek-v3-model")
    printed = run(*size)
    freer = read_json("balance", run(*size, "--block-in-each", "--json"))["cuts"][-1]
    assert f"faster, without a layer in some stages (--block-in-each): {freer['layout']}, the slowest" in printed
    assert "no cut with a layer in each stage has a faster slowest stage than the default" in printed


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--costs", "mine.toml"), "add --pp N"),
        (("--pp", "2"), "not known without --model; give --model llama3-8b --cluster h100:64, or --costs mine.toml"),
        (("--pp", "2", "--model", "llama3-8b"), "not known without --cluster"),
        (("--pp", "2", "--costs", "unit", "--tp", "2"), "--costs unit has what blocks take, got --tp 2; leave one out"),
        (("--pp", "3", "--model", "llama3-8b", "--cluster", "h100:8"), "is 3 and does not divide 8 GPUs"),
        (("--pp", "2", "--model", "llama3-8b", "--cluster", "h100:8", "--ep", "2"), "has no experts, got ep=2"),
        (("--pp", "2", "--costs", "mine.toml"), "add --model-layers N, or a [model] section with layers"),
        (("--pp", "0", "--costs", "unit", "--model-layers", "4"), "--pp is a whole number from 1, got 0"),
        (("--pp", "2", "--costs", "unit", "--model-layers", "0"), "a model has at least 1 layer, got 0"),
        (("--pp", "8", "--costs", "unit", "--model-layers", "4"), "cannot be cut into 8 stages"),
        (("--pp", "2", "--costs", "unit", "--layout", "tt|tL"), "stage 0: the first block is E"),
        (("--pp", "3", "--costs", "unit", "--layout", "Ett|ttL"), "the layout has 2 stages, and 3 ranks of 1 chunks"),
        (
            ("--pp", "2", "--costs", "unit", "--layout", "Ett|ttL", "--layout", "Ett|tL"),
            "layout Ett|tL has 3 layers (0 dense) and 0 MTP blocks, and the model 4 layers",
        ),
        (("--pp", "2", "--costs", "deepseek-v3-model", "--model-layers", "4"), "are of a model of 61 layers, got 4"),
        (("--pp", "2", "--costs", "unit", "--model-layers", "4", "--dense", "5"), "layers can be dense, got 5"),
        (
            ("--pp", "2", "--costs", "unit", "--model-layers", "4", "--mtp", "-1"),
            "mtp is a whole number from 0, got -1",
        ),
        (("--pp", "2", "--costs", "unit", "--model-layers", "4", "-m", "4"), "add --schedule 1f1b"),
        (("--pp", "2", "--costs", "unit", "--model-layers", "4", "--placement", "w"), "loop or v, got 'w'"),
        (
            ("--pp", "2", "--costs", "unit", "--schedule", "1f1b", "-m", "4", "--placement", "v"),
            "1f1b brings its own placement, got --placement v",
        ),
    ],
)
def test_mistakes_are_told(args: tuple[str, ...], told: str) -> None:
    error = CliRunner().invoke(app, ("balance", *args)).exception
    assert isinstance(error, ValueError)
    assert told in as_typed(str(error))
