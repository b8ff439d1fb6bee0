"""What the runtime's layer costs the host: `python benchmarks/host_cost.py [schedule ...]`.

Four ranks, tiny tensors, 128 micro-batches. For each schedule three contenders take turns in the same four processes:

    treadle    a `treadle.Pipeline`
    torch   torch.distributed.pipelining's own runtime of the same rows, where it has them
    hand    the same actions as a flat loop over `dist.isend` and `dist.irecv` with the same autograd: no checks, no
            records, no errors told. Nothing that runs the actions in Python can be much cheaper.

A number is the CPU time of the main threads in microseconds an action (F, B, I or W; a pair is two), all ranks
together, the median over rounds. The last line is JSON: the schedule with the largest treadle / hand.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import treadle
from local_ranks import run_ranks
from treadle.ir.ops import LaneKind, OpKind
from treadle.passes.cells import lower_cells
from treadle.runtime.model import weight_grad as split
from treadle.runtime.model.gradient_bucket import OuterProduct

RANKS, MICROBATCHES = 4, 128
WIDTH, BATCH = 32, 4
ROUNDS, WARM_UP = 15, 2
AHEAD = 4
"""By hand, this many receives of a channel are posted beyond the last one read."""

TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved-overlap": None,
    "zb-h1": pipelining.ScheduleInterleavedZeroBubble,  # the same rows, with one stage a rank
    "zb-v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe": None,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
"""The schedules, and torch's class of the same rows."""

loss_fn = nn.functional.mse_loss


@dataclass(frozen=True)
class Work:
    """What every contender is given: the schedule, this rank, and the data of all micro-batches."""

    schedule: treadle.Schedule
    rank: int
    inputs: list[Tensor]
    targets: list[Tensor]

    def stages(self) -> dict[int, nn.Module]:
        """The rank's stages, new, with weights that depend on nothing but the stage."""
        return {stage: new_stage(stage) for stage in self.schedule.placement.stages[self.rank]}


class Contender(NamedTuple):
    """A way to run the step."""

    stages: dict[int, nn.Module]
    step: Callable[[], None]


def new_stage(stage: int) -> nn.Module:
    """A linear and a tanh."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


# ---- treadle ---------------------------------------------------------------------------------------------------------


def treadle_step(work: Work) -> Contender:
    """The adapter to `treadle.Pipeline`, the one place here that knows how it is called."""
    stages = work.stages()
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    pipe = treadle.Pipeline(dict(enumerate(stages.values())), work.schedule, mesh=mesh, loss_fn=loss_fn)
    return Contender(stages, lambda: pipe.step(work.inputs, work.targets))


# ---- torch -----------------------------------------------------------------------------------------------------------


def torch_step(work: Work) -> Contender | None:
    """The runtime of torch; it splits a whole batch itself, which is one op."""
    make = TORCH[work.schedule.name]
    if make is None:
        return None
    stages, num_stages = work.stages(), work.schedule.placement.num_stages
    one, cpu = torch.empty(BATCH, WIDTH, requires_grad=True), torch.device("cpu")
    parts = [
        pipelining.PipelineStage(
            module, stage, num_stages, cpu, input_args=one if stage > 0 else one.detach(), output_args=one
        )
        for stage, module in stages.items()
    ]
    single = make in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B)
    runner = make(parts[0] if single else parts, MICROBATCHES, loss_fn=loss_fn)
    args = (torch.cat(work.inputs),) if 0 in stages else ()
    target = torch.cat(work.targets) if num_stages - 1 in stages else None

    def step() -> None:
        losses: list[Tensor] | None = [] if target is not None else None
        runner.step(*args, target=target, losses=losses, return_outputs=False)

    return Contender(stages, step)


# ---- by hand ---------------------------------------------------------------------------------------------------------


class Doing(NamedTuple):
    """An action by hand, with all that can be known beforehand.

    `key` is its (chunk, micro-batch). What it reads and makes is named by the reader, as messages are: `makes` is the
    name at the stage that reads on, `to` the rank of that stage, `here` if that is this rank.
    """

    kind: treadle.ir.Kind
    key: tuple[int, int]
    post: list[tuple[Any, int]]
    reads: Any
    waits: bool
    makes: Any
    to: int
    here: bool


def plan(schedule: treadle.Schedule, rank: int) -> list[Doing]:
    """A rank's actions, each with the receives that are posted before it, in the sender's order."""
    program, placement = lower_cells(schedule), schedule.placement
    channels: dict[int, list[Any]] = {}
    for lane in range(program.num_lanes):
        if program.lane_rank[lane] == rank and program.lane_kind[lane] == LaneKind.RECV:
            ops = range(int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1]))
            kinds = [treadle.ir.Kind.F if program.kind[op] == OpKind.RECV_F else treadle.ir.Kind.B for op in ops]
            names = [(kind, int(program.chunk[op]), int(program.mb[op])) for op, kind in zip(ops, kinds, strict=True)]
            channels[int(program.lane_peer[lane])] = names
    place = {name: (peer, k) for peer, names in channels.items() for k, name in enumerate(names)}
    posted = dict.fromkeys(channels, 0)
    doings = []
    for action in schedule.actions(rank):
        forward = action.kind is treadle.ir.Kind.F
        carries, step = (treadle.ir.Kind.F, 1) if forward else (treadle.ir.Kind.B, -1)
        reads, makes, to = (carries, action.chunk, action.mb), None, -1
        post = []
        if action.kind is not treadle.ir.Kind.W:
            reader = placement.neighbour(rank, action.chunk, step)
            if reader is not None:
                to, makes = reader[0], (carries, reader[1], action.mb)
            if reads in place:
                peer, k = place[reads]
                wanted = channels[peer][posted[peer] : k + 1 + AHEAD]
                posted[peer] += len(wanted)
                post = [(name, peer) for name in wanted]
        key = (action.chunk, action.mb)
        doings.append(Doing(action.kind, key, post, reads, reads in place, makes, to, to == rank))
    return doings


def pair_group(rank: int) -> dist.ProcessGroup:
    """The two ranks that hold the same stages, where there are two pipes."""
    pairs = [dist.new_group([first, RANKS - 1 - first]) for first in range(RANKS // 2)]
    return pairs[min(rank, RANKS - 1 - rank)]


def add_copies(stages: dict[int, nn.Module], group: dist.ProcessGroup) -> None:
    """Sums the gradients of the two copies of each stage."""
    for stage in sorted(stages):
        grads = [param.grad for param in stages[stage].parameters()]
        flat = nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat, group=group)
        nn.utils.vector_to_parameters(flat, grads)


def hand_step(work: Work) -> Contender:
    """The floor."""
    schedule, rank, placement = work.schedule, work.rank, work.schedule.placement
    stages, doings = work.stages(), plan(work.schedule, work.rank)
    modules = [stages[stage] for stage in placement.stages[rank]]
    halves = [split.WeightGradQueue() for _ in modules]
    rows = schedule.columns
    for chunk in set(rows.chunk[rows.kind == treadle.ir.Kind.W].tolist()):
        split.apply(split.examine(modules[chunk]).linears, halves[chunk])
    copies = pair_group(rank) if placement.num_pipes > 1 else None
    is_first = [stage == 0 for stage in placement.stages[rank]]
    is_last = [stage == placement.num_stages - 1 for stage in placement.stages[rank]]
    per_pipe = schedule.microbatches_per_pipe
    offset = [pipe * per_pipe for pipe in placement.pipes]  # a pipe's micro-batches are a part of the batch
    inputs, targets, scale = work.inputs, work.targets, torch.tensor(1 / MICROBATCHES)
    shape = (BATCH, WIDTH)
    isend, irecv, empty, backward = dist.isend, dist.irecv, torch.empty, torch.autograd.backward

    def add(param: nn.Parameter, given: Tensor | OuterProduct) -> None:
        grad = given if isinstance(given, Tensor) else given.made()
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def step() -> None:
        there, coming, kept, put_off = {}, {}, {}, {}
        sent, losses = [], []
        for kind, key, post, reads, waits, makes, to, here in doings:
            chunk, mb = key
            for name, peer in post:
                there[name] = buffer = empty(shape)
                coming[name] = irecv(buffer, peer)
            if kind == 3:  # W
                for half in put_off.pop(key):
                    half.run(add)
                continue
            if waits:
                coming.pop(reads).wait()
            if kind == 0:  # F
                x = inputs[offset[chunk] + mb] if is_first[chunk] else there.pop(reads).requires_grad_()
                y = modules[chunk](x)
                if is_last[chunk]:
                    y = loss_fn(y, targets[offset[chunk] + mb])
                    losses.append(y.detach())
                kept[key] = x, y
                made = y.detach()
            else:
                x, y = kept.pop(key)
                grad = scale if is_last[chunk] else there.pop(reads)
                if kind == 2:  # I
                    halves[chunk].open()
                    backward(y, grad)
                    put_off[key] = halves[chunk].close()
                else:
                    backward(y, grad)
                made = x.grad
            if here:
                there[makes] = made
            elif makes is not None:
                sent.append(isend(made, to))
        for leaving in sent:
            leaving.wait()
        if copies is not None:
            add_copies(stages, copies)

    return Contender(stages, step)


# ---- the race --------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Microseconds an action of each round, and the wall-clock milliseconds of its step."""

    cpu_us: list[float]
    wall_ms: list[float]

    @property
    def us(self) -> float:
        """The median."""
        return statistics.median(self.cpu_us)

    def __str__(self) -> str:
        spread = f"{self.us:6.1f} ({min(self.cpu_us):.1f} to {max(self.cpu_us):.1f})"
        return f"{spread:<24} {statistics.median(self.wall_ms):6.1f}"


def check(name: str, contender: Contender, work: Work) -> None:
    """The contender's gradients are those of the whole model in one process, the mean over all micro-batches."""
    placement = work.schedule.placement
    mine = {stage: [p.grad for p in module.parameters()] for stage, module in contender.stages.items()}
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, mine)
    model = nn.Sequential(*[new_stage(stage) for stage in range(placement.num_stages)])
    for x, target in zip(work.inputs, work.targets, strict=True):
        (loss_fn(model(x), target) / MICROBATCHES).backward()
    for stage, module in enumerate(model):
        for grads in (held[stage] for held in ranks if stage in held):
            pairs = zip(grads, module.parameters(), strict=True)
            same = all(torch.allclose(grad, param.grad, rtol=1e-4, atol=1e-7) for grad, param in pairs)
            assert same, f"{name}: wrong gradient of stage {stage}"


def race(schedule: treadle.Schedule, rank: int) -> dict[str, Times]:
    """All contenders of a schedule, in turn."""
    torch.manual_seed(1000)
    inputs, targets = ([torch.randn(BATCH, WIDTH) for _ in range(MICROBATCHES)] for _ in range(2))
    work = Work(schedule, rank, inputs, targets)
    made = {"treadle": treadle_step(work), "torch": torch_step(work), "hand": hand_step(work)}
    contenders = {name: contender for name, contender in made.items() if contender is not None}
    for name, contender in contenders.items():
        for _ in range(WARM_UP):
            once(contender)
        check(name, contender, work)
    gc.collect()
    gc.freeze()  # what stands already is not looked through again in somebody's turn
    names = list(contenders)
    rounds: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for k in range(ROUNDS):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            rounds[name].append(once(contenders[name]))
    gc.unfreeze()
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, rounds)
    num_actions = len(schedule.columns)
    times = {}
    for name in names:
        by_round = [[ranks[name][k] for ranks in everywhere] for k in range(ROUNDS)]
        cpu_us = [sum(cpu for cpu, _ in ranks) / 1e3 / num_actions for ranks in by_round]
        times[name] = Times(cpu_us, [max(wall for _, wall in ranks) / 1e6 for ranks in by_round])
    return times


def once(contender: Contender) -> tuple[int, int]:
    """Nanoseconds of a step: the main thread's CPU time, and on the wall."""
    for module in contender.stages.values():
        module.zero_grad(set_to_none=True)
    dist.barrier()
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    contender.step()
    return time.thread_time_ns() - cpu, time.perf_counter_ns() - wall


def over(times: dict[str, Times], name: str) -> float:
    """A contender's time over that by hand, the median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(times[name].cpu_us, times["hand"].cpu_us, strict=True))


class Neighbours:
    """How busy other processes kept the machine: a number made beside them is too high."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy_s = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy_s, time.process_time()

    def share(self) -> float:
        """Of all cores, since the beginning; every rank has to ask."""
        wall_s, busy_s, mine_s = (now - begin for now, begin in zip(self._now(), self._begin, strict=True))
        ours_s = torch.tensor(mine_s, dtype=torch.float64)
        dist.all_reduce(ours_s)
        return max(0.0, (busy_s - float(ours_s)) / (wall_s * (os.cpu_count() or 1)))


def rank_main(rank: int, port: int, names: list[str]) -> None:
    """What each process does; rank 0 tells."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    results = {}
    if rank == 0:
        title = f"{'schedule':20} {'runner':6} {'CPU us an action':24} {'step ms'} {'over hand':>9}"
        print(f"{title} {'other load':>13}", flush=True)
    for name in names:
        neighbours = Neighbours()
        results[name] = race(treadle.generate(name, pp=RANKS, microbatches=MICROBATCHES), rank)
        others = neighbours.share()
        if rank == 0:
            for runner, times in results[name].items():
                ratio = over(results[name], runner)
                print(f"{name:20} {runner:6} {times} {ratio:10.2f} {others:13.0%}", flush=True)
    if rank == 0:
        print(json.dumps(summary(results)), flush=True)
    dist.destroy_process_group()


def summary(results: dict[str, dict[str, Times]]) -> dict[str, float | None]:
    """The schedule with the largest treadle / hand."""
    worst = max(results, key=lambda name: over(results[name], "treadle"))
    times = results[worst]
    print(f"the most over hand: {worst}")
    us = {f"{name}_us": round(times[name].us, 1) if name in times else None for name in ("treadle", "torch", "hand")}
    return {**us, "ratio": round(over(times, "treadle"), 3)}


def main() -> None:
    """Starts the ranks; a forkserver imports torch once for all of them."""
    names = sys.argv[1:] or list(TORCH)
    unknown = [name for name in names if name not in TORCH]
    if unknown:
        sys.exit(f"no such schedule: {', '.join(unknown)}; there are {', '.join(TORCH)}")
    size = f"{RANKS} ranks on {os.cpu_count()} cores, {MICROBATCHES} micro-batches"
    print(f"torch {torch.__version__}, {size}", flush=True)
    run_ranks(rank_main, RANKS, names, preload=["torch.distributed.pipelining", "treadle"])


if __name__ == "__main__":
    main()
