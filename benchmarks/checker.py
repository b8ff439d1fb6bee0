"""What the stream checker costs: `python benchmarks/checker.py`.

Four ranks (pp 2, ep 2), interleaved-overlap, mixture-of-experts layers. A step on serial lanes and the same step under
the checker take turns in the same processes; a number is the CPU time of a step, all threads of all ranks together.
The log of two steps is then judged. The last line is JSON: the median and the spread of the ratio.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import treadle
from local_ranks import run_ranks
from treadle.moe import MoELayer
from treadle.runtime import Pipeline, check_streams

PP, EP, LAYERS, MICROBATCHES, TOKENS, WIDTH = 2, 2, 2, 6, 64, 64
ROUNDS = 7


def rank_main(rank: int, port: int, told: Any) -> None:
    """Puts the seconds of all steps of a rank, and what judging them took."""
    join(rank, port)
    schedule = treadle.generate("interleaved-overlap", pp=PP, microbatches=MICROBATCHES)
    mesh = init_device_mesh("cpu", (PP, 1, EP), mesh_dim_names=("pp", "dp", "ep"))
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH)

    def stages() -> dict[int, nn.Module]:
        torch.manual_seed(rank // EP)
        return {
            chunk: nn.Sequential(*(MoELayer(WIDTH, WIDTH, 4, ep=EP, ep_rank=rank % EP) for _ in range(LAYERS)))
            for chunk in range(schedule.vpp)
        }

    def pipeline(modules: dict[int, nn.Module]) -> Pipeline:
        return Pipeline(modules, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, lanes="serial")

    plain, seconds = pipeline(stages()), {"plain": [0.0] * 0, "checked": [0.0] * 0}

    def timed(name: str, pipe: Pipeline) -> None:
        began = time.process_time()
        pipe.step(x, x)
        seconds[name].append(time.process_time() - began)

    plain.step(x, x)
    for _ in range(ROUNDS):  # a log of its own for each round: a step's cost does not depend on the steps before
        timed("plain", plain)
        modules = stages()
        with check_streams() as checker:
            checked = pipeline(modules)
            checked.step(x, x)
            timed("checked", checked)
            began = time.process_time()
            report = checker.report()
            judged = time.process_time() - began
            checked.close()
    plain.close()
    assert report.clean, str(report)
    told.put({**seconds, "entries": report.num_entries, "judged_s": judged})
    dist.destroy_process_group()


def join(rank: int, port: int) -> None:
    """Joins the gloo group of all ranks."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PP * EP)
    torch.set_num_threads(1)


def main() -> None:
    """Runs the ranks, and prints a line for each kind of step."""
    told = mp.get_context("forkserver").SimpleQueue()
    run_ranks(rank_main, PP * EP, told, preload=["treadle.moe"])
    ranks = [told.get() for _ in range(PP * EP)]
    totals = {kind: [sum(rank[kind][i] for rank in ranks) for i in range(ROUNDS)] for kind in ("plain", "checked")}
    ratios = [checked / plain for plain, checked in zip(totals["plain"], totals["checked"], strict=True)]
    for kind, of_rounds in totals.items():
        print(f"{kind:8} {statistics.median(of_rounds) * 1e3:8.1f} ms of CPU a step")
    entries, judged_s = sum(rank["entries"] for rank in ranks), sum(rank["judged_s"] for rank in ranks)
    print(f"{entries} entries of two steps of {len(ranks)} ranks, judged in {judged_s:.2f} s of CPU")
    summary = {
        "ratio": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        "entries": entries,
        "judged_s": round(judged_s, 2),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
