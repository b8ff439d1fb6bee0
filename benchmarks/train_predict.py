"""Predicted against measured, of a training run: `python benchmarks/train_predict.py [--sizes tiny wide] [--steps N]`.

Four processes train a mixture of experts with the trainer, PP2 x EP2, interleaved-overlap, and trace every step.

    time     Costs are made from one step and held against the median of all others, each step in turn: `ratio` is the
             median of measured / predicted, `error` that of its distance from 1, `range` from the least to the most.
             How much steps differ by themselves is in `measured_quartiles`, as a part of their median.
               costs    the costs.toml that the trainer writes: medians of durations, times one factor (`fit_step`)
               fit      `treadle.fit` alone: the medians
               drawn    no factor: each op's duration is drawn from those of its kind in that step, with the time that
                        its lane took to come to it, and the step simulated 9 times
               replay   the same step's own durations: what the Program itself explains
    memory   `--dry-run`'s total of each rank against the most bytes of tensors that the rank had at once in a step and
             its update, counted in all threads (`tensor_bytes.py`); parameters and optimizer state included.

`--ep 1` runs two ranks. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from dataclasses import replace
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


def config_of(size: str, output: str, **changes: Any) -> Any:
    """The run of a size, with `dtype` and fields of `parallel` changed."""
    from treadle.models import ModelConfig
    from treadle.train.run_config import DataConfig, LoggingConfig, ParallelConfig, TrainConfig, TrainingConfig

    parallel = {"pp": 2, "deadline_s": 300.0, **changes}
    dtype = parallel.pop("dtype", "float32")
    parallel["recompute"] = tuple(parallel.get("recompute", ()))
    text = str(Path(os.__file__).parent / "asyncio" / "*.py")
    return TrainConfig(
        model=ModelConfig(num_hidden_layers=4, num_experts=8, router_aux_loss_coef=0.01, **SIZES[size]),
        data=DataConfig(paths=(text,), cache=str(Path(output).parent / "data")),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(global_batch_size=16, micro_batch_size=1, seq_len=128, steps=10_000, dtype=dtype),
        logging=LoggingConfig(tensorboard=False, measure_every=0),
        output=output,
    )


# -- a rank ------------------------------------------------------------------------------------------------------------


def run_rank(size: str, output: str, steps: int, parallel: dict[str, Any]) -> None:
    """Train, and write what was measured."""
    import torch

    from treadle.train.trainer import Trainer

    torch.set_num_threads(1)
    tensor_bytes.check()
    before = tensor_bytes.live()
    trainer = Trainer(config_of(size, output, **parallel))
    peaks, times = [], []
    for _ in range(steps):
        tensor_bytes.begin_peak()
        trainer.train_step()
        peaks.append(tensor_bytes.peak() - before)
        trace = trainer.pipe.gather_trace()
        if trainer.world.rank == 0:
            times.append(predictions(trace))
        del trace
    told = {
        "pp_rank": trainer.pipe.position.pp_rank,
        "peaks": peaks,
        "times": times,
        "held_bytes": tensor_bytes.live() - before,
    }
    (Path(output) / f"rank{trainer.world.rank}.json").write_text(json.dumps(told))
    trainer.close()


def predictions(trace: Any) -> dict[str, float]:
    """What a step took, and what it says that others take, in ms."""
    import numpy as np

    import treadle
    from treadle.ir.execute import leaders
    from treadle.simulator import Durations
    from treadle.simulator.grouping import work_of
    from treadle.simulator.waiting import shortest
    from treadle.train.fitted_costs import fit_step

    program = trace.program
    own = shortest(_from_readiness(trace))
    work, lead, draw = work_of(program), leaders(program), np.random.default_rng(0)
    drawn = []
    for _ in range(9):
        ticks = np.zeros(program.num_ops, np.int64)
        for kind in np.unique(work):
            ticks[work == kind] = draw.choice(own[work == kind], int((work == kind).sum()))
        drawn.append(treadle.simulate(program, Durations(ticks[lead])).makespan)
    found = {
        "measured": trace.makespan,
        "costs": treadle.simulate(program, fit_step(trace)).makespan,
        "fit": treadle.simulate(program, treadle.fit(trace)).makespan,
        "drawn": statistics.median(drawn),
        "replay": treadle.simulate(program, Durations(own)).makespan,
    }
    return {name: ticks / 1e6 for name, ticks in found.items()}


def _from_readiness(trace: Any) -> Any:
    """The trace with each op from when nothing kept it waiting: its lane was free, and what it needs was there."""
    import numpy as np

    program = trace.program
    ready = np.full(program.num_ops, trace.start.min(), np.int64)
    opens = np.zeros(program.num_ops, bool)
    opens[program.lane_ptr[:-1][np.diff(program.lane_ptr) > 0]] = True
    later = np.flatnonzero(~opens)
    ready[later] = trace.end[later - 1]
    for op in range(program.num_ops):
        for needed in program.deps(op):
            ready[op] = max(ready[op], trace.end[needed])
    return replace(trace, start=np.minimum(ready, trace.start))


# -- all of them -------------------------------------------------------------------------------------------------------


def measure(size: str, steps: int, parallel: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run the ranks of a size; return what is predicted and what was measured."""
    from torch._C._distributed_c10d import TCPStore

    world = 2 * int(parallel["ep"])
    output = directory / size
    output.mkdir()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # held here: nobody can take its port
    environment = {**tensor_bytes.counting(directory), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, __file__, "--rank", size, str(output), str(steps), json.dumps(parallel)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        ended = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(ended):
        raise SystemExit(f"ranks ended with {ended}")
    told = [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(world)]
    return {"time": _times(told[0]), "memory": _memory(size, parallel, str(output), told)}


def _times(told: dict[str, Any]) -> dict[str, Any]:
    steps = told["times"][WARM_UP:]
    measured = [step["measured"] for step in steps]
    usual = statistics.median(measured)
    found: dict[str, Any] = {
        "measured_ms": round(usual, 1),
        "measured_quartiles": [_short(q / usual) for q in _quartiles(measured)],
        "replay": _short(statistics.median(step["measured"] / step["replay"] for step in steps)),
    }
    for name in ("costs", "fit", "drawn"):
        ratios = [statistics.median(measured[:at] + measured[at + 1 :]) / step[name] for at, step in enumerate(steps)]
        found[name] = {
            "ratio": _short(statistics.median(ratios)),
            "error": _short(statistics.median(abs(ratio - 1) for ratio in ratios)),
            "range": [_short(min(ratios)), _short(max(ratios))],
        }
    return found


def _memory(size: str, parallel: dict[str, Any], output: str, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from treadle.train.run_dryrun import describe

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
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--rank", nargs=4)
    options = parser.parse_args()
    if options.rank is not None:
        size, output, steps, fields = options.rank
        run_rank(size, output, int(steps), json.loads(fields))
        return
    parallel: dict[str, Any] = {"schedule": options.schedule, "ep": options.ep}
    parallel |= {"recompute": options.recompute} if options.recompute else {}
    parallel |= {"saved": "offload"} if options.offload else {}
    parallel |= {"dtype": options.dtype} if options.dtype != "float32" else {}
    with tempfile.TemporaryDirectory() as directory:
        found = {size: measure(size, options.steps, parallel, Path(directory)) for size in options.sizes}
    print(json.dumps({"predict": found, **parallel}))


if __name__ == "__main__":
    main()
