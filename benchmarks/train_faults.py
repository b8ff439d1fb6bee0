"""Ten killed ranks: `python benchmarks/train_faults.py [--kills 10] [--steps 60] [--seed 0] [--output DIR]`.

A small mixture of experts trains twice on PP2 x EP2 under torchrun, with a checkpoint every 3 steps. The first run is
left alone. In the second, a random rank gets SIGKILL at a random moment of a random step, so many times; torchrun
restarts all ranks, which go on from the last complete checkpoint.

    bitwise      whether each step's loss is that of the undisturbed run to the last bit
    resumed      the steps at which restarts went on
    seconds      of both runs

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from train_runs import TINY, losses_of, rank_processes, rows_of, started_run

MODEL = (
    "--model.hidden_size 32 --model.num_attention_heads 2 --model.num_key_value_heads 1 --model.head_dim 16 "
    "--model.moe_intermediate_size 16 --model.num_experts 4 --training.global_batch_size 8 "
    "--training.micro_batch_size 1 --training.seq_len 64 --training.eval_every 0 --parallel.pp 2 --parallel.ep 2 "
    "--checkpoint.every 3 --logging.measure_every 0 --logging.no-tensorboard"
)


def main() -> None:
    """Run both, and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="train-faults-"))
    output.mkdir(parents=True, exist_ok=True)
    chance = random.Random(arguments.seed)
    kills = sorted(chance.sample(range(4, arguments.steps), arguments.kills))
    whole_s = _run(output, "undisturbed", arguments.steps, [], chance)
    print(f"undisturbed: {whole_s} s, loss {losses_of(output / 'undisturbed')[arguments.steps]!r}", flush=True)
    killed_s = _run(output, "killed", arguments.steps, kills, chance)
    wanted, got = losses_of(output / "undisturbed"), losses_of(output / "killed")
    log = (output / "killed.log").read_text()
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+) \(restart", log)]
    result = {
        "kills": len(kills),
        "killed_after": kills,
        "resumed": resumed,
        "restarts": len(re.findall(r"\(restart \d+\)", log)),
        "bitwise": got == wanted and len(got) == arguments.steps,
        "final_loss": got[arguments.steps],
        "undisturbed_loss": wanted[arguments.steps],
        "seconds": {"undisturbed": whole_s, "killed": killed_s},
    }
    print(json.dumps(result))


def _run(output: Path, name: str, steps: int, kills: list[int], chance: random.Random) -> float:
    log, start = output / f"{name}.log", time.monotonic()
    flags = f"--config {TINY} {MODEL} --training.steps {steps} --data.cache {output / 'data'} --output {output / name}"
    with started_run(flags.split(), 4, log, restarts=2 * len(kills)) as process:
        for step in kills:
            _kill_one(process, output / name, step, chance)
        code = process.wait()
    if code:
        raise SystemExit(f"{name} ended with {code}:\n{log.read_text()[-3000:]}")
    return round(time.monotonic() - start, 1)


def _kill_one(process: subprocess.Popen[bytes], output: Path, step: int, chance: random.Random) -> None:
    """Kill a random rank at a random moment after a step, once the run has come so far again."""
    before = len(rows_of(output))
    while process.poll() is None:
        rows = rows_of(output)
        if len(rows) > before and rows[-1]["step"] >= step:
            time.sleep(chance.uniform(0, 0.5))
            ranks = rank_processes(process)
            if len(ranks) == 4:
                rank = chance.randrange(4)
                os.kill(ranks[rank], signal.SIGKILL)
                print(f"killed rank {rank} after step {step}", flush=True)
                return
        time.sleep(0.02)
    raise SystemExit(f"the run ended with {process.returncode} before step {step}")


if __name__ == "__main__":
    main()
