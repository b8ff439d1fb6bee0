"""Configurations from TOML and the command line: names and values that are not allowed are refused in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from treadle.train.checking import learning_rate, note_on_decay
from treadle.train.command import parse_command
from treadle.train.config_reading import flag_names, read_config
from treadle.train.run_config import ParallelConfig, TrainConfig

TINY = ROOT / "configs" / "moe_tiny.toml"


def test_flags_replace_values_of_the_file() -> None:
    flags = "--parallel.pp 2 --parallel.ep=2 --training.steps 30 --output here --parallel.recompute attn mlp --dry-run"
    config = parse_command(["--config", str(TINY), *flags.split()])
    file = read_config(TINY)
    assert file.parallel.pp == 1
    assert config.parallel == replace(file.parallel, pp=2, ep=2, recompute=("attn", "mlp"))
    assert config.training == replace(file.training, steps=30)
    assert (config.output, config.dry_run, config.model) == ("here", True, file.model)


def test_hyphens_and_underscores_are_the_same() -> None:
    for flag in ("--training.seq-len", "--training.seq_len"):
        assert parse_command([flag, "64"]).training.seq_len == 64
    assert parse_command(["--checkpoint.no-resume"]).checkpoint.resume is False


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--parallel.ppp 2", "'--parallel.ppp' is not an option; did you mean '--parallel.pp'?"),
        ("--trainning.steps=2", "'--trainning.steps' is not an option; did you mean '--training.steps'?"),
        ("--training.learning_rate 1", "did you mean '--training.lr'?"),
        ("--training.batch-size 1", "did you mean '--training.global_batch_size'?"),
        ("--parallel.pp x", "Error parsing --parallel.pp: invalid literal for int() with base 10: 'x'"),
        ("--parallel.saved out", "invalid choice 'out' for argument '--parallel.saved'. Expected one of ('leave', "),
        ("--parallel.pp 0", "parallel.pp is 1 or more, got 0"),
        ("--data.held_out 1.5", "data.held_out is a share from 0 to below 1, got 1.5"),
        ("--parallel.ep 3", "parallel.ep divides the 8 experts, got 3"),
        ("--parallel.exchange nvshmem", "Expected one of ('all_to_all', 'deepep')"),
        ("--parallel.exchange deepep", "ep of 2 or more and training.dtype bfloat16, got 1 and float32; set these, or"),
        ("--parallel.exchange deepep --parallel.ep 2", "got 2 and float32; set these, or use all_to_all"),
        ("--training.decay_steps -1", "training.decay_steps is 0 or more, got -1"),
        ("--model.head_dim 3", "head_dim is even"),
        ("--config nowhere.toml", "there is no file nowhere.toml"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(arguments: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        parse_command(arguments.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "cut", "rates"),
    [
        ("--training.steps 10", "decays over the last 5 steps", [0.6e-3, 1.2e-3, 1.8e-3, 2.4e-3, 3e-3, 3e-3, 2.4e-3]),
        ("--training.steps 5", "does not decay", [0.6e-3, 1.2e-3, 1.8e-3, 2.4e-3, 3e-3]),
        ("--training.steps 2", "does not decay", [0.6e-3, 1.2e-3]),
        ("--training.steps 25", None, [0.6e-3, 1.2e-3, 1.8e-3, 2.4e-3, 3e-3, 3e-3, 2.85e-3]),
    ],
)
def test_a_short_run_cuts_its_decay_and_says_so(arguments: str, cut: str | None, rates: list[float]) -> None:
    config = parse_command(["--config", str(TINY), *arguments.split()])
    assert [learning_rate(config)(step) for step in range(len(rates))] == pytest.approx(rates)
    note = note_on_decay(config)
    steps = config.training.steps
    assert note == (
        f"training.warmup_steps 5 and training.decay_steps 20 are more than training.steps {steps}: the learning rate "
        f"{cut}"
        if cut is not None
        else None
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[paralel]\npp = 2", "paralel is not known; did you mean 'parallel'?"),
        ("[parallel]\npp_size = 2", "parallel.pp_size is not known; did you mean 'pp'?"),
        ("[parallel]\npp = 'two'", "run.toml:2: parallel.pp is a whole number, got 'two'"),
        ("[parallel]\nrecompute = ['attn', 'moe']", "parallel.recompute[1] is one of attn, mlp, got 'moe'"),
        ("parallel = 2", "parallel is an object, got 2"),
        ("[model]\nnum_experts_per_tok = 9", "[model] a token goes to 1 to 8 of 8 experts"),
        ("[parallel", "Expected ']' at the end of a table"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        read_config(path)
    assert "run.toml:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_field_is_a_flag_with_a_text_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(["--help"])
    told = capsys.readouterr().out
    assert all(f"--{name}" in told for name in flag_names())
    assert "Seconds that a rank waits" in told


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest() -> None:
    config = TrainConfig(parallel=ParallelConfig(pp=2))
    assert config.num_microbatches(4) == 4
    with pytest.raises(ValueError, match=r"1 x 3 .dp x ep., got 16; the nearest is 15"):
        config.num_microbatches(3)
