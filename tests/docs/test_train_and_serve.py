"""examples/train_and_serve.py with transformers: each version that the engine serves is the model of its step."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.support.paths import ROOT
from tests.support.torchrun import torchrun
from tests.train.tiny import SOURCES

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

from treadle.update.adapters.plain import digest_of  # noqa: E402
from treadle.update.adapters.transformers import named_weights  # noqa: E402

SCRIPT = ROOT / "examples" / "train_and_serve.py"
OPTIONS = ["--steps=4", "--every=2", "--training.eval_every=0", "--training.warmup_steps=1", "--checkpoint.every=2"]
OPTIONS += ["--checkpoint.keep=3", "--checkpoint.export", "--logging.measure_every=0", "--data.paths", *SOURCES]

MOVED = re.compile(
    r"version (\d) has the weights of step (\d): 7\.4 MB in \d+\.\d\d s, training stood still for \d+\.\d{3} s"
)
SERVED = re.compile(
    r"the engine serves version (\d) \(weights (\w{8})\)(?:, after \d+ answers of the one before)?: '(import .*)'"
)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path: sockets are in it."""
    made = Path(tempfile.mkdtemp(prefix="treadle-"))
    yield made
    shutil.rmtree(made)


def processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [command] if word in command else []
    return found


def test_each_version_that_is_served_is_the_model_of_its_step(scratch: Path, tmp_path: Path) -> None:
    shown = torchrun(4, SCRIPT, *OPTIONS, f"--output={tmp_path}", cwd=tmp_path, env={"TMPDIR": str(scratch)})
    assert MOVED.findall(shown) == [("1", "0"), ("2", "2"), ("3", "4")], shown
    served = {int(version): (weights, text) for version, weights, text in SERVED.findall(shown)}
    assert {1, 3} <= served.keys(), shown  # a busy engine may never be asked for one in between
    trained = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "model")
    assert served[3] == (weights_of(trained), repr(continued(trained))[1:-1])
    assert served[1][1] != served[3][1]
    for version in served.keys() - {1}:
        assert served[version][0] == weights_of_checkpoint(tmp_path, 2 * (version - 1), trained), version
    assert len({weights for weights, _ in served.values()}) == len(served)
    assert not list(scratch.glob("treadle-*"))
    assert not processes_with(str(scratch))


def weights_of(model: Any) -> str:
    return digest_of(named_weights(model))[:8]


def weights_of_checkpoint(output: Path, step: int, model: Any) -> str:
    """The digest of the weights that the trainer's own checkpoint has of a step."""
    state = {name: torch.empty_like(weight) for name, weight in named_weights(model).items()}
    load(state, checkpoint_id=output / "checkpoints" / f"step-{step:08}", no_dist=True)
    return digest_of(state)[:8]


def continued(model: Any) -> str:
    prompt = torch.tensor([list(b"import ")])
    tokens = model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=256)[0].tolist()
    return bytes(token for token in tokens if token < 256).decode(errors="replace")
