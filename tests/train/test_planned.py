"""A run as `treadle plan` chose it: four real processes train from its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.ranks import check, run_ranks
from tests.train.tiny import SOURCES
from train_runs import losses_of
from treadle.cli.app import app
from treadle.train.config_reading import read_config
from treadle.train.main import main

MODEL = """
hidden_size = 32
num_hidden_layers = 8
vocab_size = 257
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 64
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
"""
CLUSTER = """
gpu = "h100"
num_gpus = 4
"""


@pytest.mark.slow
def test_the_trainer_runs_a_plan(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(MODEL)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    sizes = ("--pp", "2", "--ep", "2", "--vpp", "2", "--seq-len", "32", "--tokens-per-batch", "256")
    asked = ("--model", str(tmp_path / "model.toml"), "--cluster", str(tmp_path / "cluster.toml"), *sizes)
    planned = CliRunner().invoke(app, ("plan", *asked, "--trainable", "--files", str(tmp_path)), catch_exceptions=False)
    assert planned.exit_code == 0, planned.output
    config = read_config(tmp_path / "train.toml")
    assert (config.parallel.pp, config.parallel.ep, config.parallel.dp) == (2, 2, 1)
    steps = ("--training.steps", "4", "--training.lr", "1e-2")
    here = ("--training.dtype", "float32", "--training.device", "cpu", "--output", str(tmp_path / "run"))
    flags = [*steps, *here, "--logging.no-tensorboard", "--data.paths", *SOURCES]
    assert check(run_ranks(4, _command, ["--config", str(tmp_path / "train.toml"), *flags])) == [0] * 4
    losses = losses_of(tmp_path / "run")
    assert len(losses) == 4
    assert losses[4] < losses[1] - 0.3


def _command(rank: int, arguments: list[str]) -> int:
    """What `python -m treadle.train` does on a rank."""
    return main(arguments)
