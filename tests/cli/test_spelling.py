"""Names from elsewhere, or in other letters: taken where they are plain, else the message has what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

import treadle
from tests.support.command import treadle as run
from treadle.cli.common_options import parse_count
from treadle.estimate import load_cluster, load_model
from treadle.schedules import SCHEDULES, TORCH_NAMES, family


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("simulate 1f1b -pp 4 -m 8", "there is no -pp; write --pp"),
        ("simulate 1f1b --pp 4 --mb 8", "there is no --mb; write --microbatches"),
        ("compare 1f1b zb-h1 --pp 4 --num-microbatches=8", "there is no --num-microbatches; write --microbatches"),
        ("plan --model llama3-8b --gpus 512", "follows the cluster's name, as in --cluster h100:512"),
        ("plan --model llama3-8b --cluster 512xh100", "got '512xh100'; write h100:512"),
        ("plan --model llama3-8b --cluster H100x512", "got 'H100x512'; write h100:512"),
        ("plan --model deepseek-ai/DeepSeek-V3 --cluster h100:512", "did you mean 'deepseek-v3'?"),
        (
            "plan --model llama3-8b --cluster h100:8 --tokens-per-batch 4M",
            "or another sequence length; 4Mi are 4,194,304",
        ),
        ("plan --model llama3-8b --cluster h100:8 --tokens-per-batch 4m", "write 4194304, 4M (4,000,000) or 4Mi"),
        ("simulate 1f1b --pp 4 -m 8 --costs h100", "'treadle plan --model NAME --cluster GPU:COUNT --files DIR'"),
        ("show ZBVZeroBubble --pp 4 -m 8", "did you mean 'zb-v'?"),
        ("show ScheduleInterleaved1F1B --pp 4 -m 8", "did you mean 'interleaved'?"),
        ("show 1f1b --pp 4 -m 8 --format torch", "'torch-csv'"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_the_one_that_is_meant(command: str, told: str) -> None:
    done = run(*command.split())
    assert done.returncode == 2
    assert told in " ".join(done.stderr.replace("│", " ").split())


def test_names_are_taken_in_upper_and_lower_case() -> None:
    assert run("show", "1F1B", "--pp", "2", "-m", "2") == run("show", "1f1b", "--pp", "2", "-m", "2")
    compared = run("compare", "1F1B", "Interleaved:vpp=2", "--pp", "2", "-m", "4")
    assert compared.returncode == 0, compared.stderr
    assert treadle.generate("DualPipeV", pp=2, microbatches=4) == treadle.generate("dualpipev", pp=2, microbatches=4)
    assert load_cluster("H100:16") == load_cluster("h100:16")
    assert load_model("DeepSeek-V3") == load_model("deepseek-v3")


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_name_of_torchs_stands_for_a_schedule_here(name: str) -> None:
    if name in SCHEDULES:
        assert family(name).name == TORCH_NAMES[name]
        return
    with pytest.raises(ValueError, match=f"did you mean '{TORCH_NAMES[name]}'"):
        family(f"Schedule{name.upper()}")


@pytest.mark.parametrize(
    ("text", "count"),
    [("4194304", 4194304), ("4,194,304", 4194304), ("4Mi", 4194304), ("4M", 4_000_000), ("1.5K", 1500), ("2Gi", 2**31)],
)
def test_counts_have_decimal_and_binary_prefixes(text: str, count: int) -> None:
    assert parse_count(text) == count


def test_a_cluster_without_a_number_is_said_to_be_one_host() -> None:
    done = run("plan", "--model", "llama3-8b", "--cluster", "h100", "--tokens-per-batch", "5")
    assert "note: h100 is one host of 8 GPUs; --cluster h100:512 has 512 of them" in done.stderr


@pytest.mark.parametrize("name", ["mine.txt", "mine.json", "mine.csv"])
def test_show_writes_the_form_that_the_ending_says(name: str, tmp_path: Path) -> None:
    done = run("show", "zb-v", "--pp", "2", "-m", "4", "-o", name, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"wrote {name}\n")
    loaded = treadle.load(tmp_path / name)
    assert isinstance(loaded, treadle.Schedule)
    assert loaded.rows == treadle.generate("zb-v", pp=2, microbatches=4).rows
    form = {".txt": "text", ".json": "json", ".csv": "torch-csv"}[Path(name).suffix]
    printed = run("show", "zb-v", "--pp", "2", "-m", "4", "--format", form).stdout
    assert (tmp_path / name).read_text() == printed
