"""`treadle plan --from` and `--for`: a launch is judged, bettered, written back and read again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command import treadle
from tests.support.json_output import read_json

SCRIPT = """\
TP=2
ARGS=(
    --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 32000
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 4 --sequence-parallel
    --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --tp-comm-overlap --brand-new-option 3 --log-interval 5
)
torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "ours.sh"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_a_launch_is_judged_bettered_and_written_back(script: Path, tmp_path: Path) -> None:
    judged = read_json("judged", treadle("plan", "--from", str(script), "--cluster", "h100:16", "--json").stdout)
    assert judged["fits"]
    assert (judged["trainer"], judged["job"]["pp"], judged["job"]["recompute"]) == ("megatron", 4, ["full"])
    assert judged["changes"]
    assert all(change["step"] < -judged["error"] for change in judged["changes"])
    assert {"setting": "--tp-comm-overlap", "value": "True", "matters": "step"} in judged["unread"]
    assert {"setting": "--brand-new-option", "value": "3", "matters": "unknown"} in judged["unread"]
    assert not any("log-interval" in each["setting"] for each in judged["unread"])
    better = tmp_path / "better.sh"
    command = ("plan", "--from", str(script), "--cluster", "h100:16", "--for", "megatron", "-o", str(better))
    printed = treadle(*command).stdout
    best = judged["pair"] or judged["changes"][0]
    setting, value = next((name, value) for name, value in best["settings"].items() if value is not None)
    assert f"{setting} {value}".strip() in printed
    again = read_json("judged", treadle("plan", "--from", str(better), "--cluster", "h100:16", "--json").stdout)
    assert again["job"]["step_s"] == pytest.approx(judged["job"]["step_s"] * (1 + best["step"]))
    assert again["unread"] == []


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("pipeline-model-parallel-size 4", "pipeline-model-parallel-size 3", "world size (16) is not divisible by"),
        ("num-layers 16", "num-layers 18", "--num-layers (18) is not divisible by --pipeline-model-parallel-size"),
        ("global-batch-size 64", "global-batch-size 7", "--global-batch-size (7) is not divisible by --micro-batch"),
        ("TP=2", "TP=$(nproc)", "--tensor-model-parallel-size takes a whole number"),
        ("--num-layers 16", "", "--num-layers is missing"),
    ],
)
def test_what_does_not_divide_is_refused_in_the_words_of_the_trainer(
    script: Path, option: str, value: str, message: str
) -> None:
    assert option in SCRIPT
    script.write_text(SCRIPT.replace(option, value))
    done = treadle("plan", "--from", str(script), "--cluster", "h100:16")
    assert done.returncode == 2
    assert message in done.stderr
    assert re.search("Megatron-LM: ", done.stderr)


@pytest.mark.slow
def test_a_plan_for_a_trainer_has_only_what_it_runs_and_writes_its_launch(tmp_path: Path) -> None:
    launch = tmp_path / "launch.sh"
    search = ("--tp", "2", "--pp", "2", "--micro-batch-size", "1", "--json")
    done = treadle(
        "plan", "--model", "llama3-8b", "--cluster", "h100:16", *search, "--for", "megatron", "-o", str(launch)
    )
    plan = read_json("plan", done.stdout)
    assert {each["schedule"] for each in plan["front"]} <= {"1f1b", "interleaved"}
    read = read_json("judged", treadle("plan", "--from", str(launch), "--cluster", "h100:16", "--json").stdout)
    assert read["job"]["step_s"] == pytest.approx(plan["chosen"]["step_s"])
    assert read["job"]["layout"] == plan["chosen"]["layout"]


def test_options_that_do_not_go_together_are_refused(script: Path) -> None:
    done = treadle("plan", "--from", str(script), "--cluster", "h100:16", "--tp", "2")
    assert (done.returncode, "searches nothing" in done.stderr) == (2, True)
    done = treadle("plan", "--cluster", "h100:16")
    assert (done.returncode, "--model is missing" in done.stderr) == (2, True)
    done = treadle("plan", "--from", str(script), "--cluster", "h100:16", "--for", "megatrn")
    assert (done.returncode, "megatron" in done.stderr) == (2, True)
