"""Why curves part: `python benchmarks/train_flips.py [--steps 45] [--experts 2] [--lr 3e-3] [--output DIR]`.

configs/moe_tiny.toml three times: on one process; on PP2 x EP2, which adds up in another order; and on one process with
one element of one weight changed by its last bit. All write down which experts each token goes to in each layer.

If the layout computed anything else, its curve would part from that of one process earlier than the nudged one does.
If routing parted the curves, tokens would go to other experts first, and with `--experts 8`, where every token goes to
all experts, curves would not part at all.

    largest       the largest difference of the loss to one process, at any step
    first_over    the first step at which it exceeds 1e-4
    first_flip    the first step at which a token goes to other experts than in one process, in any layer
    before        the largest difference before that step

The last line is JSON, for `parts` and `nudged`.
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
from treadle.models.decoder_layers import ExpertLayer
from treadle.runtime.model.stage_blocks import children_of
from treadle.train.command import parse_command
from treadle.train.trainer import Trainer

LAYOUTS = {
    "whole": (1, "--parallel.schedule 1f1b"),
    "parts": (4, "--parallel.pp 2 --parallel.ep 2 --parallel.schedule interleaved-overlap"),
    "nudged": (1, "--parallel.schedule 1f1b"),
}
LIMIT = 1e-4


def main() -> None:
    """Run all three, and compare losses and choices with those of one process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="train-flips-"))
    output.mkdir(parents=True, exist_ok=True)
    further = f"--training.steps {arguments.steps} --training.lr {arguments.lr} "
    further += f"--model.num_experts_per_tok {arguments.experts}"
    for name in LAYOUTS:
        _run(name, further, output)
    rows = {name: _compared(output, name) for name in ("parts", "nudged")}
    for name, row in rows.items():
        print(f"{name}: { ({key: row[key] for key in ('largest', 'first_over', 'first_flip', 'before')}) }", flush=True)
    print(json.dumps({"experts": arguments.experts, "lr": arguments.lr, **rows}))


def _run(name: str, further: str, output: Path) -> None:
    num_ranks, layout = LAYOUTS[name]
    flags = f"--config {TINY} {layout} {further} --training.decay_steps 0 --training.eval_every 0 --checkpoint.every 0"
    flags += f" --data.cache {output / 'data'} --logging.no-tensorboard --logging.measure_every 0"
    log, start = output / f"{name}.log", time.monotonic()
    program = [__file__, "--rank", name]
    with started_run([*flags.split(), "--output", str(output / name)], num_ranks, log, program=program) as process:
        code = process.wait()
    if code:
        raise SystemExit(f"{name} ended with {code}:\n{log.read_text()[-3000:]}")
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def _compared(output: Path, name: str) -> dict[str, Any]:
    whole, other = losses_of(output / "whole"), losses_of(output / name)
    differences = {step: abs(other[step] - loss) for step, loss in whole.items()}
    flips = {step: _flips(output, name, step) for step in whole}
    first = min((step for step, count in flips.items() if count), default=None)
    calm = [difference for step, difference in differences.items() if first is None or step < first]
    return {
        "largest": max(differences.values()),
        "first_over": min((step for step, difference in differences.items() if difference > LIMIT), default=None),
        "first_flip": first,
        "before": max(calm, default=0.0),
        "flips": flips,
        "differences": differences,
    }


def _flips(output: Path, name: str, step: int) -> int:
    """Return the number of tokens, over all layers, that go to other experts than in one process."""
    whole, other = _choices(output / "whole", step), _choices(output / name, step)
    return sum(int((whole[layer] != other[layer]).any(1).sum()) for layer in whole)


def _choices(output: Path, step: int) -> dict[int, Tensor]:
    """Return for each layer the sorted experts of each token of the global batch."""
    found: dict[int, dict[int, Tensor]] = {}
    for path in sorted((output / "choices").glob(f"{step}.*.pt")):
        saved = torch.load(path)
        for layer, chosen in saved["chosen"].items():
            found.setdefault(layer, {})[saved["replica"]] = chosen
    return {layer: torch.cat([each[replica] for replica in sorted(each)]) for layer, each in sorted(found.items())}


def rank_main(name: str, flags: list[str]) -> None:
    """Train as the command does, and write down what routers choose."""
    trainer = Trainer(parse_command(flags))
    if name == "nudged":
        _nudge(trainer)
    directory = trainer.output / "choices"
    directory.mkdir(exist_ok=True, parents=True)
    chosen: dict[int, list[Tensor]] = {}
    for stage in trainer.stages.values():
        for block in children_of(stage):
            if isinstance(block, ExpertLayer):
                block.mlp.gate.register_forward_hook(_note(chosen.setdefault(block.number, [])))
    for step in range(1, trainer.config.training.steps + 1):
        trainer.log.step(trainer.train_step(), printed=True)
        rows = {layer: torch.cat(each).sort(1).values for layer, each in chosen.items()}
        path = directory / f"{step}.{trainer.world.rank}.pt"
        torch.save({"replica": trainer.pipe.position.dp_rank, "chosen": rows}, path)
        for each in chosen.values():
            each.clear()
    trainer.close()


def _nudge(trainer: Trainer) -> None:
    """Change one element of the first layer's query projection by its last bit."""
    view = next(view for view in trainer.views if view.name == "model.layers.0.self_attn.q_proj.weight")
    element = view.of(view.tensor.detach()).view(-1)[:1]
    element.copy_(torch.nextafter(element, torch.ones_like(element)))


def _note(rows: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, inputs: Any, made: Any) -> None:
        rows.append(made[1].chosen.clone())

    return note


if __name__ == "__main__":
    rank_main(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--rank"] else main()
