"""`treadle costs measure`: a layer's forward, dgrad, wgrad and saved bytes, by steps of a real Pipeline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.command import treadle as run
from treadle.costs import load_costs
from treadle.runtime.layer_costs import measure_layer

FORWARD_S, BACKWARD_S = 0.02, 0.05

BLOCK = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
    def forward(self, x):
        return self.down(self.up(x))

class Two(Block):
    def forward(self, x):
        return x, x

number = 3
"""


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(BACKWARD_S)
        return grad


class SlowLayer(nn.Module):
    """Takes at least FORWARD_S forward and BACKWARD_S for its dgrad, and saves the inputs of its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        slow: Any = _Slow
        out: Tensor = self.down(self.up(slow.apply(x)))
        return out


def test_a_layer_takes_at_least_what_it_sleeps_and_saves_its_inputs() -> None:
    steps: list[int] = []
    times = measure_layer(SlowLayer(), (4, 8), 2, steps.append)
    assert steps == [0, 1, 2, 3]
    assert times.f >= FORWARD_S * 1e9
    assert times.b >= BACKWARD_S * 1e9
    assert times.i is not None
    assert times.i >= BACKWARD_S * 1e9, "the dgrad contains the sleep"
    assert times.w is not None
    assert times.saved_bytes == 4 * 8 * 4 + 4 * 32 * 4
    assert times.costs("slow", 12, "measured").model == {
        "layers": 12, "f": 12 * times.f, "i": 12 * times.i, "w": 12 * times.w, "b": 12 * times.b,
        "saved_bytes": 12 * times.saved_bytes,
    }  # fmt: skip


def test_the_command_writes_costs_that_simulate_takes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCK, encoding="utf-8")
    arguments = ("--input", "2,8", "--layers", "8", "--dtype", "float64", "--steps", "1", "-o", "mine.toml")
    done = run("costs", "measure", "mine.py:Block", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    costs = load_costs(str(tmp_path / "mine.toml"))
    assert costs.name == "Block"
    assert costs.model["layers"] == 8
    assert costs.model["saved_bytes"] == 8 * 8 * (2 * 8 + 2 * 32)
    simulated = run("simulate", "zb-h1", "--pp", "4", "-m", "8", "--costs", "mine.toml", cwd=tmp_path)
    assert simulated.returncode == 0
    assert "a model of 8 layers" in simulated.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("Block", "--input", "2,8"), "a layer is named as FILE.py:NAME, my_layers.py:Block, got 'Block'"),
        (("other.py:Block", "--input", "2,8"), "other.py does not exist"),
        (("mine.py:Blok", "--input", "2,8"), "mine.py defines no Blok"),
        (("mine.py:number", "--input", "2,8"), "mine.py:number is int; give a module"),
        (("mine.py:Block", "--input", "2x8"), "--input is a shape, whole numbers from 1 divided by commas"),
        (("mine.py:Block", "--input", "2,9"), "Block on an input of (2, 9), torch.float32"),
        (("mine.py:Two", "--input", "2,8"), "Two returns tuple; a layer to measure returns a tensor"),
        (("mine.py:Block", "--input", "2,8", "--dtype", "int8"), "--dtype is a floating type of torch"),
        (("mine.py:Block", "--input", "2,8", "--device", "tpu"), "--device is cpu, or cuda where torch finds a GPU"),
        (("mine.py:Block", "--input", "2,8", "-o", "mine.json"), "a costs file ends in .toml"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCK, encoding="utf-8")
    done = run("costs", "measure", *arguments, "--layers", "8", cwd=tmp_path)
    assert done.returncode == 2
    assert problem in done.stderr
