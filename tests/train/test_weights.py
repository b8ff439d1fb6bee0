"""Runs that start from a checkpoint of transformers: the model is the checkpoint's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import saved
from tests.train.tiny import SOURCES
from train_runs import losses_of
from treadle.models.model_config import ModelConfig
from treadle.train.command import parse_command
from treadle.train.data import IGNORED, open_tokens, training_loader
from treadle.train.data.tokenizing import make_tokenizer
from treadle.train.main import main
from treadle.train.run_config import CheckpointConfig, TrainConfig
from treadle.train.trainer import Trainer

THEIRS = ModelConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
    rope_theta=1e6, rms_norm_eps=1e-5, max_position_embeddings=512,
)  # fmt: skip


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with a config.json only: what a command line reads of it."""
    path = tmp_path / "weights"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(THEIRS.to_hf()))
    return path


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def test_the_model_is_that_of_the_weights(weights: Path, tmp_path: Path) -> None:
    assert parse_command(["--checkpoint.weights", str(weights)]).model == THEIRS
    assert parse_command([f"--checkpoint.weights={weights}", "--model.rope_theta", "1e6"]).model == THEIRS
    file = write(tmp_path / "run.toml", "[checkpoint]", f"weights = '{weights}'", "[model]", "hidden_size = 32")
    assert parse_command(["--config", file]).model == THEIRS
    assert parse_command(["--config", file, "--checkpoint.weights", "", "--model.head_dim", "8"]).model == ModelConfig(
        hidden_size=32, head_dim=8
    )


def test_what_only_training_reads_may_differ(weights: Path) -> None:
    config = parse_command(["--checkpoint.weights", str(weights), "--model.router_aux_loss_coef", "0.01"])
    assert config.model == replace(THEIRS, router_aux_loss_coef=0.01)


@pytest.mark.parametrize(
    ("name", "value", "theirs"),
    [
        ("rope_theta", 10000.0, 1000000.0),
        ("norm_topk_prob", True, False),
        ("rms_norm_eps", 1e-6, 1e-5),
        ("num_experts_per_tok", 1, 2),
        ("hidden_size", 64, 32),
        ("vocab_size", 257, 300),
        ("max_position_embeddings", 1024, 512),
        ("tie_word_embeddings", True, False),
    ],
)
def test_a_field_that_differs_from_the_weights_is_refused(
    weights: Path, tmp_path: Path, name: str, value: Any, theirs: Any
) -> None:
    flag = [f"--model.{name}"] if value is True else [f"--model.{name}", str(value)]
    file = write(tmp_path / "run.toml", "[model]", f"{name} = {json.dumps(value)}")
    from_weights = CheckpointConfig(weights=str(weights))
    for call in (
        lambda: parse_command(["--checkpoint.weights", str(weights), *flag]),
        lambda: parse_command(["--config", file, "--checkpoint.weights", str(weights)]),
        lambda: Trainer(TrainConfig(model=replace(THEIRS, **{name: value}), checkpoint=from_weights)),
    ):
        with pytest.raises(ValueError, match=re.escape(f"model.{name} {value!r} (config.json: {theirs!r})")) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_weights_without_a_config_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.weights .*nowhere: there is no config at"):
        parse_command(["--checkpoint.weights", str(tmp_path / "nowhere")])


def reference_loss(model: Any, config: TrainConfig, directory: Path) -> float:
    """The mean loss of the run's first batch by transformers, which finds documents by their positions."""
    store = open_tokens(config.data.paths, make_tokenizer("bytes"), directory, held_out=config.data.held_out)
    packed = store.training(config.training.seq_len)
    batch = next(iter(training_loader(packed, batch_size=config.training.global_batch_size, seed=config.training.seed)))
    assert bool((batch.targets == IGNORED).any()), "a document ends in it"
    with torch.no_grad():
        logits = model(batch.inputs, position_ids=batch.positions, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED))


@pytest.mark.slow
def test_the_first_loss_is_that_of_transformers_and_what_is_exported_says_what_was_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, output = saved(THEIRS, tmp_path / "weights"), tmp_path / "run"
    text = tmp_path / "texts.jsonl"
    lines = Path(SOURCES[0]).parent.joinpath("dis.py").read_text().splitlines()
    text.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    flags = (
        f"--checkpoint.weights {tmp_path / 'weights'} --data.paths {text} --output {output} --training.steps 1 "
        "--training.seq_len 64 --training.warmup_steps 2 --training.decay_steps 3 --data.held_out 0 "
        "--checkpoint.export --logging.no-tensorboard --logging.measure_every 0"
    ).split()
    assert main(flags) == 0
    assert losses_of(output)[1] == pytest.approx(
        reference_loss(model, parse_command(flags), tmp_path / "data"), abs=1e-5
    )
    assert ModelConfig.from_hf(output / "model") == ModelConfig.from_hf(tmp_path / "weights")
    assert "training.warmup_steps 2 and training.decay_steps 3 are more than training.steps 1" in capfd.readouterr().out
