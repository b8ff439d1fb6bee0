"""One process: what a run prints and writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

import treadle
from tests.support.patience import HUNG_S
from tests.train.tiny import flags_of, tiny
from train_runs import held_out_of, losses_of, rows_of
from treadle.models.model_config import ModelConfig
from treadle.train.checkpoint import complete_steps
from treadle.train.main import main

pytestmark = pytest.mark.slow


def _command(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "treadle.train", *flags], capture_output=True, text=True, env=environment, timeout=HUNG_S
    )


def test_an_exported_model_has_the_tokenizer_of_its_text(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "import": 1, "</s>": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    given = tmp_path / "given"
    given.mkdir()
    words.add_special_tokens(["</s>"])
    words.save(str(given / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (given / "tokenizer_config.json").write_text(json.dumps(about))
    config = tiny(tmp_path / "run", data={"tokenizer": str(given)}, training={"steps": 1, "warmup_steps": 0})
    assert main([*flags_of(config), "--checkpoint.export"]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert exported("import it")["input_ids"] == [1, 0]
    assert (exported.eos_token, exported.chat_template) == ("</s>", "{{ messages }}")


def test_a_run_of_one_process_prints_a_line_a_step_and_writes_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    config = tiny(
        output,
        parallel={"schedule": "interleaved-overlap"},
        training={"steps": 6, "eval_every": 3, "lr": 1e-2},
        checkpoint={"every": 5, "keep": 1, "export": True},
        logging={"tensorboard": True, "measure_every": 2, "trace_every": 3},
    )
    run = _command(*flags_of(config))
    assert run.returncode == 0, run.stderr
    about, *lines = run.stdout.splitlines()
    assert about.startswith("Ett|ttL  pp 1 x dp 1 x ep 1  interleaved-overlap  8 micro-batches, 256 tokens a step")
    steps = [line for line in lines if "held-out" not in line]
    assert len(steps) == 6
    assert len({len(line) for line in steps}) == 1
    measured = re.compile(r"bubble +[\d.]+%  hidden +[\d.]+%")
    assert [number for number, line in enumerate(steps, 1) if measured.search(line)] == [2, 4, 6]
    losses = losses_of(output)
    assert losses[6] < losses[1] - 1
    assert list(held_out_of(output)) == [3, 6]
    assert rows_of(output)[0].keys() >= {"loss", "aux_loss", "tokens_per_s", "peak_bytes", "grad_norm", "lr"}
    assert sorted(path.name for path in (output / "traces").iterdir()) == ["step3.json.gz", "step6.json.gz"]
    trace = treadle.load(output / "traces" / "step6.json.gz")
    assert isinstance(trace, treadle.Trace)
    assert trace.measured
    assert list((output / "tensorboard").glob("events.*"))
    assert complete_steps(output / "checkpoints") == [6]
    assert ModelConfig.from_hf(output / "model") == config.model

    assert main(flags_of(config)) == 0  # there is nothing left to do
    assert capfd.readouterr().out.splitlines()[0].endswith("resumed at step 6")
    assert losses_of(output) == losses

    assert main([*flags_of(config), "--model.rope_theta", "5000"]) == 2
    assert "the checkpoint is of a model with rope_" in capfd.readouterr().err
