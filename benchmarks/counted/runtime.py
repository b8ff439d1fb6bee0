"""Counts of a trainer's steps: control collectives, streams, traces, waits for counts, copies of a save.

Four processes run two steps of a small model as PP2 x DP2; the counts are of rank 1, which is not the first.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import statistics
import tempfile
import time
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import treadle
from treadle.dist.device import StreamDevice
from treadle.dist.groups import Group
from treadle.dist.streams import Accelerator
from treadle.models.model_config import ModelConfig
from treadle.moe import MoELayer
from treadle.runtime import check_streams
from treadle.train import run_config as config
from treadle.train.checkpoint.planners import PartCopies
from treadle.train.trainer import Trainer

WORLD, COUNTED, DEADLINE_S = 4, 1, 300.0
READY_S, WAITS = 0.00003, 200


def counts() -> dict[str, float]:
    """Return the counts."""
    with tempfile.TemporaryDirectory() as directory:
        torch.set_num_threads(1)  # before the fork, which takes no threads along
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=run_rank, args=(Path(directory), rank)) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        codes = [rank.exitcode for rank in ranks]
        if any(codes):
            raise RuntimeError(f"the ranks ended with exit codes {codes}; see what they wrote")
        told: dict[str, float] = json.loads((Path(directory) / "counts.json").read_text())
    return {**told, "wait for counts that come after 30 us: us until the launch": _wait_us()}


def _wait_us() -> float:
    """Return the microseconds of the middle one of many waits for an event."""

    class Event:
        def __init__(self) -> None:
            self.ready_s = time.perf_counter() + READY_S

        def query(self) -> bool:
            return time.perf_counter() >= self.ready_s

    class Streams(Accelerator):
        def event(self, device: torch.device, *, timed: bool = False) -> Any:
            return Event()

    device, taken = StreamDevice(torch.device("cpu"), timedelta(seconds=10), Streams()), []
    for _ in range(WAITS):
        begun, event = time.perf_counter(), Event()
        device.await_event(event)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6


def run_rank(directory: Path, rank: int) -> None:
    """Train two steps, and write what the counted rank saw."""
    _join(directory, rank)
    trainer, sizes = _made(_config(directory))
    trainer.train_step()
    told = {
        "trainer's start, PP2 x DP2: process groups made": len(sizes),
        "trainer's start, PP2 x DP2: their ranks, added up": sum(sizes),
        "trainer's step, PP2 x DP2: collectives of control": _count_control(trainer),
        "trace of a step on a rank that is not the first: peak KB": _peak_of_trace(trainer) / 1e3,
        "save of a rank of PP2 x DP2: KB copied to the host": _staged_bytes(trainer) / 1e3,
    }
    trainer.close()
    told["streams after a step, one of its own gradients and an evaluation"] = _count_streams(rank)
    if rank == COUNTED:
        (directory / "counts.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _join(directory: Path, rank: int) -> None:

    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=DEADLINE_S))


def _config(directory: Path) -> Any:

    text = directory / "text.txt"
    text.write_text("A step is counted. " * 4000)
    model = ModelConfig(
        vocab_size=257,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.01,
    )
    return config.TrainConfig(
        model=model,
        data=config.DataConfig(paths=(str(text),)),
        training=config.TrainingConfig(steps=4, global_batch_size=16, seq_len=32, eval_every=0, device="cpu"),
        parallel=config.ParallelConfig(pp=2, deadline_s=DEADLINE_S),
        checkpoint=config.CheckpointConfig(every=0),
        logging=config.LoggingConfig(tensorboard=False, measure_every=0),
        output=str(directory / "run"),
    )


def _made(settings: Any) -> tuple[Any, list[int]]:
    """Return a trainer, and the sizes of the process groups of gloo that were made with it."""
    sizes: list[int] = []

    class Counted(dist.ProcessGroupGloo):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            sizes.append(self.size())

    whole = dist.ProcessGroupGloo
    dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = Counted
    try:
        return Trainer(settings), sizes
    finally:
        dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = whole


def _count_control(trainer: Any) -> int:
    """Return the collectives between CPUs in a step, with what ranks agree on after it; not those of gradients."""
    pipe, num = trainer.pipe, [0]
    control = {id(group) for group in (pipe.groups.pp_group, pipe.groups.dp_group) if group is not None}
    launches = {name: getattr(Group, name) for name in ("launch_reduce", "launch_all_gather")}
    small, whole = 4096, dist.all_reduce

    def counted(name: str) -> Any:
        def launch(group: Any, tensor: Any, *more: Any, **options: Any) -> Any:
            num[0] += id(group) in control and tensor.nbytes < small
            return launches[name](group, tensor, *more, **options)

        return launch

    def reduced(*args: Any, **options: Any) -> Any:
        num[0] += 1
        return whole(*args, **options)

    for name in launches:
        setattr(Group, name, counted(name))
    dist.all_reduce = reduced
    promise = {"again": True} if "again" in inspect.signature(trainer.train_step).parameters else {}  # as `run` does
    try:
        if promise:
            trainer.train_step(**promise)
        num[0] = 0
        trainer.train_step(**promise)
        if hasattr(trainer, "_agree"):
            trainer._agree(False)
    finally:
        for name, launch in launches.items():
            setattr(Group, name, launch)
        dist.all_reduce = whole
    return num[0]


def _peak_of_trace(trainer: Any) -> int:
    tracemalloc.start()
    trainer.pipe.gather_trace()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _staged_bytes(trainer: Any) -> int:

    num, stage = [0], PartCopies.stage

    def counted(stager: Any, state: Any) -> Any:
        num[0] += sum(part.tensor.nbytes for part in state["parts"].values())
        return stage(stager, state)

    PartCopies.stage = counted
    try:
        trainer.save()
        trainer.checkpoints.wait()
    finally:
        PartCopies.stage = stage
    return num[0]


def _count_streams(rank: int) -> int:

    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("pp", "dp"))
    schedule = treadle.generate("interleaved-overlap", pp=1, microbatches=2)
    torch.manual_seed(0)
    stages = {chunk: nn.Sequential(MoELayer(8, 8, num_experts=2)) for chunk in range(schedule.vpp)}
    batch = torch.randn(2 * 6, 8)
    with check_streams() as checker:
        pipe = treadle.Pipeline(stages, schedule, mesh=mesh, loss_fn=nn.functional.mse_loss, deadline_s=DEADLINE_S)
        pipe.step(batch, batch)
        pipe.clear_gradients()
        with pipe.no_sync():
            pipe.step(batch, batch)
        pipe.evaluate(batch, batch)
        pipe.close()
    return len(checker.streams)
