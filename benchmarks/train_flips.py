"""Why curves part: `python benchmarks/train_flips.py [--steps 40] [--output DIR]`.

configs/moe_tiny.toml on one process and on PP2 x EP2. Both write down which experts each token goes to in each layer.
Sums in another order differ in the last bits; a token whose last chosen and first rejected expert score nearly the same
then goes to another expert, and its loss and gradient jump.

    flips         tokens, over all layers, with other experts than in one process, by step
    first_flip    the first step with one
    first_jump    the first step at which the losses differ by more than 1e-6
    before        the largest difference of the losses before the first flip

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train_runs import TINY, losses_of, started_run
from treadle.models.layers import ExpertLayer
from treadle.runtime.model.blocks import children_of
from treadle.train.command import parse_command
from treadle.train.trainer import Trainer

LAYOUTS = {
    "whole": (1, "--parallel.schedule 1f1b"),
    "parts": (4, "--parallel.pp 2 --parallel.ep 2 --parallel.schedule interleaved-overlap"),
}
JUMP = 1e-6


def main() -> None:
    """Run both layouts, and compare what their routers chose."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="train-flips-"))
    output.mkdir(parents=True, exist_ok=True)
    for name in LAYOUTS:
        _run(name, arguments.steps, output)
    losses = [losses_of(output / name) for name in LAYOUTS]
    differences = {step: abs(losses[0][step] - losses[1][step]) for step in losses[0]}
    flips = {step: _flips(output, step) for step in differences}
    first = min((step for step, count in flips.items() if count), default=None)
    calm = [difference for step, difference in differences.items() if first is None or step < first]
    result = {
        "first_flip": first,
        "first_jump": min((step for step, difference in differences.items() if difference > JUMP), default=None),
        "before": max(calm, default=0.0),
        "flips": flips,
        "differences": differences,
    }
    print(json.dumps(result))


def _run(name: str, steps: int, output: Path) -> None:
    num_ranks, layout = LAYOUTS[name]
    flags = f"--config {TINY} {layout} --training.steps {steps} --training.eval_every 0 --data.cache {output / 'data'}"
    flags += f" --logging.measure_every 0 --logging.no-tensorboard --checkpoint.every 0 --output {output / name}"
    log, start = output / f"{name}.log", time.monotonic()
    with started_run(flags.split(), num_ranks, log, program=[__file__, "--rank"]) as process:
        code = process.wait()
    if code:
        raise SystemExit(f"{name} ended with {code}:\n{log.read_text()[-3000:]}")
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def _flips(output: Path, step: int) -> int:
    whole, parts = (_choices(output / name, step) for name in LAYOUTS)
    return sum(int((whole[layer] != parts[layer]).any(1).sum()) for layer in whole)


def _choices(output: Path, step: int) -> dict[int, Tensor]:
    """Return for each layer the sorted experts of each token of the global batch."""
    found: dict[int, dict[int, Tensor]] = {}
    for path in sorted((output / "choices").glob(f"{step}.*.pt")):
        saved = torch.load(path)
        for layer, chosen in saved["chosen"].items():
            found.setdefault(layer, {})[saved["replica"]] = chosen
    return {layer: torch.cat([each[replica] for replica in sorted(each)]) for layer, each in sorted(found.items())}


def rank_main(flags: list[str]) -> None:
    """Train as the command does, and write down what routers choose."""
    trainer = Trainer(parse_command(flags))
    directory = trainer.output / "choices"
    directory.mkdir(exist_ok=True, parents=True)
    chosen: dict[int, list[Tensor]] = {}
    for stage in trainer.stages.values():
        for block in children_of(stage):
            if isinstance(block, ExpertLayer):
                block.mlp.gate.register_forward_hook(_note(chosen.setdefault(block.number, [])))
    for step in range(1, trainer.config.training.steps + 1):
        facts = trainer.train_step()
        trainer.log.step(facts, printed=True)
        rows = {layer: torch.cat(each).sort(1).values for layer, each in chosen.items()}
        path = directory / f"{step}.{trainer.world.rank}.pt"
        torch.save({"replica": trainer.pipe.position.dp_rank, "chosen": rows}, path)
        for each in chosen.values():
            each.clear()
    trainer.close()


def _note(rows: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, inputs: Any, made: Any) -> None:
        rows.append(made[1].chosen.clone())

    return note


if __name__ == "__main__":
    rank_main(sys.argv[2:]) if sys.argv[1:2] == ["--rank"] else main()
