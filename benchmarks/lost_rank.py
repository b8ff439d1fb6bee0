"""How soon every rank names a killed one: `python benchmarks/lost_rank.py [--kills 20] [--seed 0]`.

Eight processes train on PP4 x DP2. In each round a random rank is killed (SIGKILL) at a random moment of its steps. The
seconds from the kill to the RankLostError of each of the seven others are kept, with what they name. The last line is
JSON: `first_s` and `last_s`, the medians over rounds of the first and the last rank to name it, `most_s` the largest of
all, and `wrong`, how many ranks named another one, another kind of loss, or another op than most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import statistics
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import treadle
from local_ranks import join

PP, DP, MICROBATCHES, WIDTH = 4, 2, 8, 256
STEPS_S = 0.5
"""A rank is killed within this time after the first step of all."""

PATIENT_S = 120.0


class Named(NamedTuple):
    """What a survivor raised, and when (monotonic)."""

    at_s: float
    rank: int
    kind: str
    op: str | None


def rank_main(rank: int, port: int, told: Connection) -> None:
    """Steps until a rank is lost."""
    join(rank, port, PP * DP)
    schedule = treadle.generate("1f1b", pp=PP, microbatches=MICROBATCHES)
    mesh = dist.init_device_mesh("cpu", (PP, DP), mesh_dim_names=("pp", "dp"))
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = treadle.Pipeline({0: stage}, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, deadline_s=PATIENT_S)
    batch: list[Tensor] = [torch.ones(64, WIDTH) for _ in range(MICROBATCHES)]
    try:
        while True:
            pipe.step(batch, batch)
            told.send(None)
    except treadle.RankLostError as lost:
        told.send(Named(time.monotonic(), lost.rank, lost.kind, lost.op))
    finally:
        os._exit(0)


def round_of(context: mp.context.ForkServerContext, chance: random.Random) -> tuple[int, float, list[Named]]:
    """One kill: the rank, its moment, and what the others named."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(PP * DP)]
    ranks = [context.Process(target=rank_main, args=(rank, store.port, pipes[rank][1])) for rank in range(PP * DP)]
    for process, (_, theirs) in zip(ranks, pipes, strict=True):
        process.start()
        theirs.close()
    readers = [mine for mine, _ in pipes]
    for mine in readers:
        assert mine.poll(PATIENT_S)
        mine.recv()
    lost = chance.randrange(PP * DP)
    time.sleep(chance.uniform(0.0, STEPS_S))
    killed_s, pid = time.monotonic(), ranks[lost].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    named: list[Named] = []
    open_readers = set(readers)
    while open_readers:
        for reader in wait(list(open_readers), PATIENT_S):
            try:
                message = reader.recv()  # type: ignore[union-attr]
                named += [message] if message is not None else []
            except EOFError:
                open_readers.discard(reader)  # type: ignore[arg-type]
    for process in ranks:
        process.join()
    return lost, killed_s, named


def main() -> None:
    """Kill, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    context, chance = mp.get_context("forkserver"), random.Random(arguments.seed)
    context.set_forkserver_preload(["lost_rank", "treadle.runtime.pipeline"])
    first, last, wrong = list[float](), list[float](), 0
    for _ in range(arguments.kills):
        lost, killed_s, named = round_of(context, chance)
        (most, count), *_ = Counter((each.rank, each.kind, each.op) for each in named).most_common()
        right = most[:2] == (lost, "killed")
        wrong += PP * DP - 1 - (count if right else 0)
        took = sorted(each.at_s - killed_s for each in named)
        print(f"rank {lost} at {most[2]}: {took[0]:.2f} to {took[-1]:.2f} s, load {os.getloadavg()[0]:.0f}", flush=True)
        first.append(took[0])
        last.append(took[-1])
    medians = {"first_s": round(statistics.median(first), 3), "last_s": round(statistics.median(last), 3)}
    print(json.dumps({"kills": arguments.kills, **medians, "most_s": round(max(last), 3), "wrong": wrong}))


if __name__ == "__main__":
    main()
