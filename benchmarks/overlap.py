"""Does it hide what it says it hides: `python benchmarks/overlap.py [rounds] [--traces DIR]`.

Paced: eight processes, PP4 x EP2, two chunks a rank, 16 micro-batches, one MoE layer a chunk, with the sub-layer
times of DeepSeek-V3's published profile (preset deepseek-v3-h800, 0.3 ms a pipeline message), all scaled alike so
that a step takes 8 to 10 s. Ops take their time without using the CPU; messages and all-to-alls are real, and carry
no times. In each round Treadle runs interleaved-overlap and torch.distributed.pipelining its Interleaved1F1B over
layers of the same times, in the same processes. A round in which processes waited for a CPU for more than 10 % of
the time is repeated.

    paced_error   how much longer a step took than predicted
    steady_idle   the largest over ranks of compute's idle share over its overlapped cells but the first and the last
    torch_ratio   torch's step over Treadle's

Then real computation over a slow link, as `overlap_link.py` says, in nearly twice as many rounds, as steps that compute
differ more:

    hidden        how much of the all-to-alls' time overlap takes out of the step

The last line is JSON, medians over rounds. With `--traces` a round of each kind is kept, predicted and measured: of the
paced ones the last, over the link that of the median.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import treadle
from local_ranks import join, run_ranks, scaled
from treadle.moe import MoELayer
from treadle.simulator.steady_phase import steady_idle

PP, EP, VPP, MICROBATCHES = 4, 2, 2, 16
WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 8, 4, 4
STEP_S = 9.6
MOST_PRESSURE, MOST_REPEATS = 0.10, 3

loss_fn = nn.functional.mse_loss


@dataclass(frozen=True)
class Round:
    """What one turn of both came to."""

    treadle_s: float
    torch_s: float
    idle: float
    pressure: float


def scaled_costs() -> tuple[treadle.Costs, float]:
    """The preset, scaled so that the step is predicted to take `STEP_S`; and the factor."""
    costs = treadle.load_costs("deepseek-v3-h800")
    costs = replace(costs, message={**costs.message, "reduce_grad": 0})
    schedule = treadle.generate("interleaved-overlap", pp=PP, vpp=VPP, microbatches=MICROBATCHES)
    return scaled(costs, schedule, 1, STEP_S)


def pressure_s() -> float:
    """Seconds, since the machine was started, in which some process waited for a CPU."""
    first = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    return int(first.rpartition("=")[2]) / 1e6


# ---- treadle ---------------------------------------------------------------------------------------------------------


def treadle_pipeline(rank: int, costs: treadle.Costs) -> treadle.Pipeline:
    """Two layers a rank, as small as can be: their times are the costs'."""
    mesh = init_device_mesh("cpu", (PP, 1, EP), mesh_dim_names=("pp", "dp", "ep"))
    schedule = treadle.generate("interleaved-overlap", pp=PP, vpp=VPP, microbatches=MICROBATCHES)
    stages = {}
    for chunk in range(VPP):
        torch.manual_seed(chunk)
        layer = MoELayer(WIDTH, HIDDEN, EXPERTS, ep=EP, ep_rank=rank % EP)
        stages[chunk] = nn.Sequential(layer)
    return treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=loss_fn, lanes="paced", costs=costs, deadline_s=60)


# ---- torch -----------------------------------------------------------------------------------------------------------


class Paced(torch.autograd.Function):
    """Takes its time forward and backward; what is exchanged is exchanged first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float, group: Any) -> Tensor:
        ctx.backward_s, ctx.group = backward_s, group
        return pause(x, forward_s, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return pause(grad, ctx.backward_s, ctx.group), None, None, None


def pause(x: Tensor, seconds: float, group: Any) -> Tensor:
    if group is not None:
        there = torch.empty_like(x)
        dist.all_to_all_single(there, x.contiguous(), group=group)
        x = there
    time.sleep(seconds)
    return x.clone()


class PacedLayer(nn.Module):
    """The same layer for torch's runtime: one sub-layer after the other, weight halves with their backward."""

    def __init__(self, costs: treadle.Costs, group: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        s = {name: ticks / costs.clock.ticks * 1e-6 for name, ticks in costs.layer.items()}
        self.parts = [
            (s["attn_f"], s["attn_b"] + s["attn_w"], None),
            (s["dispatch_f"], s["dispatch_b"], group),
            (s["mlp_f"], s["mlp_b"] + s["mlp_w"], None),
            (s["combine_f"], s["combine_b"], group),
        ]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for forward_s, backward_s, group in self.parts:
            x = Paced.apply(x, forward_s, backward_s, group)
        return x


def torch_schedule(rank: int, costs: treadle.Costs) -> Any:
    """Torch's runtime on this rank's stages; messages are free."""
    mesh = init_device_mesh("cpu", (PP, EP), mesh_dim_names=("pp", "ep"))
    group, ep_group, pp_rank = mesh.get_group("pp"), mesh.get_group("ep"), rank // EP
    one = torch.empty(TOKENS, WIDTH, requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            PacedLayer(costs, ep_group),
            number,
            PP * VPP,
            torch.device("cpu"),
            input_args=one if number else one.detach(),
            output_args=one,
            group=group,
        )
        for number in (chunk * PP + pp_rank for chunk in range(VPP))
    ]
    return pipelining.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_fn)


def torch_step(runner: Any, rank: int, x: Tensor) -> None:
    pp_rank = rank // EP
    args = (x,) if pp_rank == 0 else ()
    runner.step(*args, target=x if pp_rank == PP - 1 else None, losses=[] if pp_rank == PP - 1 else None)


# ---- a run -----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, port: int, num_rounds: int, traces: Path | None, told: Path) -> None:
    """What each process does; rank 0 tells."""
    join(rank, port, PP * EP)
    costs, factor = scaled_costs()
    pipe, runner = treadle_pipeline(rank, costs), torch_schedule(rank, costs)
    predicted_s = treadle.simulate(pipe.program, costs).makespan / 1e9
    if rank == 0:
        print(f"times x{factor:.2f}: {predicted_s:.3f} s predicted", flush=True)
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH)
    pipe.step(x, x)  # finds out shapes
    rounds: list[Round] = []
    repeats = 0
    while len(rounds) < num_rounds:
        done = one_round(rank, pipe, runner, x)
        quiet = done.pressure <= MOST_PRESSURE or repeats == MOST_REPEATS
        repeats = 0 if quiet else repeats + 1
        if quiet:
            rounds.append(done)
        if rank == 0:
            note = "" if done.pressure <= MOST_PRESSURE else ", too busy" + ("" if quiet else ": repeated")
            error = done.treadle_s / predicted_s - 1
            print(
                f"treadle {done.treadle_s:.3f} s ({error:+.2%}), idle {done.idle:.2%}, torch {done.torch_s:.3f} s, "
                f"CPU pressure {done.pressure:.1%}{note}",
                flush=True,
            )
    if rank == 0:
        told.write_text(json.dumps(summary(rounds, predicted_s)))
    trace = pipe.gather_trace()
    if rank == 0 and traces is not None:
        treadle.save_trace(trace, traces / "paced_measured.json.gz")
        treadle.save_trace(treadle.simulate(trace.program, costs), traces / "paced_predicted.json.gz")
    pipe.close()
    dist.destroy_process_group()


def one_round(rank: int, pipe: treadle.Pipeline, runner: Any, x: Tensor) -> Round:
    """Both, one after the other. The pressure is what rank 0 saw, so that all ranks decide alike."""
    dist.barrier()
    before, started = pressure_s(), time.monotonic()
    pipe.step(x, x)
    trace = pipe.gather_trace()
    dist.barrier()
    begun = time.monotonic()
    torch_step(runner, rank, x)
    dist.barrier()
    ended = time.monotonic()
    pressure = torch.tensor([(pressure_s() - before) / (ended - started)])
    dist.broadcast(pressure, 0)
    return Round(trace.makespan / 1e9, ended - begun, max(steady_idle(trace)), float(pressure))


def summary(rounds: list[Round], predicted_s: float) -> dict[str, Any]:
    """Medians."""
    treadle_s = statistics.median(r.treadle_s for r in rounds)
    return {
        "paced_error": round(treadle_s / predicted_s - 1, 4),
        "steady_idle": round(statistics.median(r.idle for r in rounds), 4),
        "torch_ratio": round(statistics.median(r.torch_s / r.treadle_s for r in rounds), 3),
        "pressure": round(statistics.median(r.pressure for r in rounds), 3),
    }


def paced(num_rounds: int, traces: Path | None, told: Path) -> None:
    """The first half; what it came to is in the file `told`."""
    preload = ["torch.distributed.pipelining", "treadle.runtime", "treadle.moe"]
    run_ranks(rank_main, PP * EP, num_rounds, traces, told, preload=preload)


def over_a_link(num_rounds: int, traces: Path | None) -> dict[str, Any]:
    """`overlap_link.py`: what its last line says."""
    command = [sys.executable, str(Path(__file__).with_name("overlap_link.py")), str(num_rounds)]
    command += ["--traces", str(traces)] if traces is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        line = ""
        for line in running.stdout:
            print(line, end="", flush=True)
    if running.returncode:
        sys.exit(f"overlap_link.py exited with {running.returncode}")
    told: dict[str, Any] = json.loads(line)
    return told


def main() -> None:
    """Both, one after the other."""
    parser = ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--traces", type=Path)
    given = parser.parse_args()
    if given.traces is not None:
        given.traces.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "paced.json"
        paced(given.rounds, given.traces, told)
        both = json.loads(told.read_text())
    print(json.dumps({**both, **over_a_link(2 * given.rounds - 1, given.traces)}))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
