"""Predicted against measured, of a training run: `python benchmarks/train_predict.py [--sizes tiny wide] [--steps N]`.

Four processes train a mixture of experts with the trainer, PP2 x EP2, interleaved-overlap, and trace every step.

    time     costs are fitted on one step (`treadle.fit`), the Program simulated with them, and the prediction held
             against every other step. `ratio` is measured / predicted: of the first step behind the warm-up the median
             and the range over the others; `all` the same over all pairs of steps.
    memory   `--dry-run`'s total of each rank against the most bytes of tensors that the rank had at once in a step and
             its update, counted in all threads (`tensor_bytes.py`); parameters and optimizer state included.

The last line is JSON.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import tensor_bytes

WARM_UP = 3

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128, "vocab_size": 257},
    "wide": {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
             "moe_intermediate_size": 512, "vocab_size": 4096},
}  # fmt: skip
"""Fields of the model; 2,048 tokens a step."""


def config_of(size: str, output: str, **parallel: Any) -> Any:
    """The run of a size."""
    from treadle.models import ModelConfig
    from treadle.train.config import DataConfig, LoggingConfig, ParallelConfig, TrainConfig, TrainingConfig

    text = str(Path(os.__file__).parent / "asyncio" / "*.py")
    return TrainConfig(
        model=ModelConfig(num_hidden_layers=4, num_experts=8, router_aux_loss_coef=0.01, **SIZES[size]),
        data=DataConfig(paths=(text,), cache=str(Path(output).parent / "data")),
        parallel=ParallelConfig(
            **{"pp": 2, "ep": 2, "schedule": "interleaved-overlap", "deadline_s": 300.0, **parallel}
        ),
        training=TrainingConfig(global_batch_size=16, micro_batch_size=1, seq_len=128, steps=10_000),
        logging=LoggingConfig(tensorboard=False, measure_every=0),
        output=output,
    )


# -- a rank ------------------------------------------------------------------------------------------------------------


def run_rank(size: str, output: str, steps: int, parallel: dict[str, Any]) -> None:
    """Train, and write what was measured."""
    import torch

    import treadle
    from treadle.train.trainer import Trainer

    torch.set_num_threads(1)
    tensor_bytes.check()
    before = tensor_bytes.live()
    trainer = Trainer(config_of(size, output, **parallel))
    peaks, makespans, predicted = [], [], []
    for _ in range(steps):
        tensor_bytes.begin_peak()
        trainer.train_step()
        peaks.append(tensor_bytes.peak() - before)
        trace = trainer.pipe.trace
        if trainer.world.rank == 0:
            makespans.append(trace.makespan / 1e6)
            predicted.append(treadle.simulate(trace.program, treadle.fit(trace)).makespan / 1e6)
        del trace
    told = {
        "pp_rank": trainer.pipe.position.pp_rank,
        "peaks": peaks,
        "makespans_ms": makespans,
        "predicted_ms": predicted,
        "held_bytes": tensor_bytes.live() - before,
    }
    (Path(output) / f"rank{trainer.world.rank}.json").write_text(json.dumps(told))
    trainer.close()


# -- all of them -------------------------------------------------------------------------------------------------------


def measure(size: str, steps: int, parallel: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run four ranks of a size; return what is predicted and what was measured."""
    output = directory / f"{size}-{'-'.join(map(str, parallel.values())) or 'plain'}"
    output.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**tensor_bytes.counting(directory), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "4"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--rank", size, str(output), str(steps), json.dumps(parallel)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(4)
    ]
    ended = [rank.wait() for rank in ranks]
    if any(ended):
        raise SystemExit(f"ranks ended with {ended}")
    told = [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(4)]
    return {"time": _times(told[0]), "memory": _memory(size, parallel, str(output), told)}


def _times(told: dict[str, Any]) -> dict[str, Any]:
    measured, predicted = told["makespans_ms"][WARM_UP:], told["predicted_ms"][WARM_UP:]
    ratios = [
        (fitted, held / by)
        for fitted, by in enumerate(predicted)
        for other, held in enumerate(measured)
        if other != fitted
    ]
    first, every = [ratio for fitted, ratio in ratios if fitted == 0], [ratio for _, ratio in ratios]
    return {
        "measured_ms": round(statistics.median(measured), 1),
        "ratio": {"median": _short(statistics.median(first)), "range": [_short(min(first)), _short(max(first))]},
        "all": {"median": _short(statistics.median(every)), "quartiles": [_short(q) for q in _quartiles(every)]},
        "same_step": _short(statistics.median(m / p for m, p in zip(measured, predicted, strict=True))),
        "measured_spread": [_short(q / statistics.median(measured)) for q in _quartiles(measured)],
    }


def _memory(size: str, parallel: dict[str, Any], output: str, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from treadle.train.dryrun import describe

    dry = describe(config_of(size, output, **parallel))
    rows = []
    for rank in told:
        predicted = dry.ranks[rank["pp_rank"]].total
        peaks = rank["peaks"][WARM_UP:]
        rows.append(
            {
                "pp_rank": rank["pp_rank"],
                "predicted_mb": round(predicted / 1e6, 2),
                "measured_mb": round(statistics.median(peaks) / 1e6, 2),
                "ratio": _short(statistics.median(peaks) / predicted),
                "range": [_short(min(peaks) / predicted), _short(max(peaks) / predicted)],
                "between_steps_mb": round(rank["held_bytes"] / 1e6, 2),
            }
        )
    return rows


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def _short(value: float) -> float:
    return round(value, 3)


def main() -> None:
    """Run all sizes, one after the other."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--recompute", nargs="*", default=[])
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--schedule", default="interleaved-overlap")
    parser.add_argument("--rank", nargs=4)
    options = parser.parse_args()
    if options.rank is not None:
        size, output, steps, parallel = options.rank
        run_rank(size, output, int(steps), json.loads(parallel))
        return
    parallel: dict[str, Any] = {"schedule": options.schedule}
    parallel |= {"recompute": options.recompute} if options.recompute else {}
    parallel |= {"saved": "offload"} if options.offload else {}
    with tempfile.TemporaryDirectory() as directory:
        found = {size: measure(size, options.steps, parallel, Path(directory)) for size in options.sizes}
    print(json.dumps({"predict": found, **parallel}))


if __name__ == "__main__":
    main()
