"""Loss curves of layouts against one process: `python benchmarks/train_curves.py [--steps 200] [--lr 3e-3]`.

configs/moe_tiny.toml, the same run on one process and on three layouts of four ranks. A layout's curve is compared with
that of one process at every step. The curve of one process is compared with a bigram model of the same training bytes,
on the same held-out text.

    largest      the largest difference of the loss at any step
    first_over   the first step at which the difference exceeds 1e-4; null if none does
    bigram       nats a byte of the better of two bigram models, add-one and interpolated, its weight chosen on the very
                 text it is judged by
    held_out     nats a byte of the model on that text, after 150 steps

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train_runs import TINY, held_out_of, losses_of, started_run
from treadle.train.config_reading import read_config
from treadle.train.data import PackedTokens, open_tokens
from treadle.train.data.tokenizing import ByteTokenizer

LIMIT = 1e-4
BATCHES = 8
LAYOUTS = {
    "one process": (1, "--parallel.schedule 1f1b"),
    "pp2 x ep2 interleaved-overlap, offload, recompute": (
        4,
        "--parallel.pp 2 --parallel.ep 2 --parallel.schedule interleaved-overlap --parallel.saved offload "
        "--parallel.recompute attn mlp",
    ),
    "pp2 x ep2 dualpipev": (4, "--parallel.pp 2 --parallel.ep 2 --parallel.schedule dualpipev"),
    "pp2 x dp2 1f1b": (4, "--parallel.pp 2 --parallel.dp 2 --parallel.schedule 1f1b"),
}


def main() -> None:
    """Run all layouts, and print what differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="train-curves-"))
    output.mkdir(parents=True, exist_ok=True)
    took = {name: _run(name, arguments.steps, arguments.lr, output) for name in LAYOUTS}
    whole, *others = LAYOUTS
    reference = losses_of(_directory(output, whole))
    rows = {name: _compared(losses_of(_directory(output, name)), reference) for name in others}
    for name, row in rows.items():
        print(f"{name}: largest difference {row['largest']:.2e}, first over {LIMIT}: {row['first_over']}", flush=True)
    bigram = _bigram(output / "data")
    held_out = held_out_of(_directory(output, whole))
    print(f"held-out {held_out}, bigram {bigram:.4f}", flush=True)
    result = {
        "steps": arguments.steps,
        "lr": arguments.lr,
        "layouts": rows,
        "held_out": {str(step): loss for step, loss in held_out.items()},
        "bigram": bigram,
        "below_bigram": min(loss for step, loss in held_out.items() if step <= 150) < bigram if held_out else None,
        "seconds": took,
    }
    print(json.dumps(result))


def _directory(output: Path, name: str) -> Path:
    return output / name.replace(" ", "-").replace(",", "")


def _run(name: str, steps: int, lr: float, output: Path) -> float:
    num_ranks, flags = LAYOUTS[name]
    log, start = _directory(output, name).with_suffix(".log"), time.monotonic()
    fixed = f"--config {TINY} --training.steps {steps} --training.eval_batches {BATCHES} --data.cache {output / 'data'}"
    fixed += (
        f" --training.lr {lr} --logging.measure_every 0 --logging.no-tensorboard --output {_directory(output, name)}"
    )
    with started_run([*fixed.split(), *flags.split()], num_ranks, log) as process:
        code, shown = None, 0
        while code is None:
            time.sleep(2)
            code = process.poll()
            losses = losses_of(_directory(output, name))
            if losses and max(losses) >= shown + 25:
                shown = max(losses)
                print(f"{name}: step {shown}, loss {losses[shown]:.4f}, {time.monotonic() - start:.0f} s", flush=True)
    if code:
        raise SystemExit(f"{name} ended with {code}:\n{log.read_text()[-3000:]}")
    return round(time.monotonic() - start, 1)


def _compared(losses: dict[int, float], reference: dict[int, float]) -> dict[str, Any]:
    differences = {step: abs(losses[step] - loss) for step, loss in reference.items()}
    over = [step for step, difference in differences.items() if not difference <= LIMIT]
    marks = {str(step): differences[step] for step in differences if step % 25 == 0}
    return {"largest": max(differences.values()), "first_over": min(over, default=None), "at": marks}


def _bigram(cache: Path) -> float:
    config = read_config(TINY)
    store = open_tokens(config.data.paths, ByteTokenizer(), cache, held_out=config.data.held_out)
    training, held = store.training(config.training.seq_len), store.held_out(config.training.seq_len)
    counts = np.zeros((257, 257))
    np.add.at(counts, _pairs(training, len(training)), 1.0)
    judged = _pairs(held, min(len(held), BATCHES * config.training.global_batch_size))
    add_one = (counts + 1) / (counts + 1).sum(1, keepdims=True)
    plain = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    single = (counts.sum(0) + 1) / (counts.sum() + 257)
    mixed = [weight * plain + (1 - weight) * single for weight in np.linspace(0.5, 0.999, 100)]
    return min(float(-np.log(model[judged]).mean()) for model in (add_one, *mixed))


def _pairs(packed: PackedTokens, num: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (token, next token) of the first samples, where the next one is a target."""
    tokens = np.asarray(packed.tokens[: num * packed.seq_len + 1])
    counted = np.ones(len(tokens), bool)
    counted[packed.starts[packed.starts < len(tokens)]] = False
    return tokens[:-1][counted[1:]], tokens[1:][counted[1:]]


if __name__ == "__main__":
    main()
