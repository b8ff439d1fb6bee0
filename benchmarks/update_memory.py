"""What processes keep of each update: `python benchmarks/update_memory.py [updates]`, 300 by default.

Two update ranks, the first with the coordinator, and a worker beside each, four processes, update 4 MiB of bf16 with
the settings that are shipped:

    broadcast   all buckets to all devices
    targeted    each to the device that takes it
    elements    targeted, and only the elements that changed, one in a hundred
    failing     by broadcasts; workers refuse every other attempt at its end, and the next one makes another group

For each of them, over the later two thirds of the updates:

    coordinator_bytes_an_update, rank_bytes_an_update, worker_bytes_an_update
                   growth of resident memory (private and shared), by a fitted line
    coordinator_descriptors, ...   open descriptors at the end, less those before
    coordinator_threads, ...       threads

and `worst_bytes_an_update`, `worst_descriptors`, `worst_threads`: the largest of all. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from treadle.update import Endpoint, Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding, Tensor

MiB = 1 << 20
RANKS = 2
TENSORS = [Tensor(f"layers.{i}", (256, 256), "bfloat16") for i in range(32)]
OPTIONS = UpdateOptions(Memory(2 * MiB, target_bytes=MiB // 4, least_bytes=MiB // 8), rollback="host", deadline_s=60)
KINDS = {
    "broadcast": replace(OPTIONS, transfer="broadcast"),
    "targeted": replace(OPTIONS, transfer="targeted"),
    "elements": replace(OPTIONS, transfer="targeted", changed="elements"),
    "failing": replace(OPTIONS, transfer="broadcast"),
}
ROLES = ("coordinator", "rank", "worker")


def layouts() -> tuple[Holding, Holding]:
    """Two pipeline stages into two tensor-parallel workers."""
    have = Parallel(pp=RANKS, stage=lambda name: int(name.split(".")[1]) * RANKS // len(TENSORS)).holding(TENSORS)
    return have, Parallel(tp=RANKS, dim=lambda name: 1).holding(TENSORS)


# ---- a worker --------------------------------------------------------------------------------------------------------


class Refusing(Plain):
    """Refuses to load while a file is there."""

    flag = Path()

    def finish(self) -> str | None:
        return "refused" if self.flag.exists() else None


def be_worker(directory: Path, worker: int) -> None:
    _, want = layouts()
    boxes = {piece.tensor: piece.box for piece in want.pieces[worker]}
    held = {name: torch.zeros(box.shape, dtype=torch.bfloat16) for name, box in boxes.items()}
    engine = Refusing(held, tensors=want.tensors, boxes=boxes)
    engine.flag = directory / "refuse"
    with Endpoint(engine, directory, worker):
        print("up", flush=True)
        sys.stdin.read()


# ---- an update rank --------------------------------------------------------------------------------------------------


def be_rank(directory: Path, rank: int, kind: str, updates: int, workers: list[int]) -> None:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    have, _ = layouts()
    generator = torch.Generator().manual_seed(rank)
    held = {p: torch.randn(p.box.shape, generator=generator).to(torch.bfloat16) for p in have.pieces[rank]}
    pids = torch.zeros(RANKS, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    processes = {"coordinator": pids[:1].tolist(), "rank": pids[1:].tolist(), "worker": workers}
    flag, version, noted = directory / "refuse", 0, directory / "noted"  # a list of them would grow itself
    with Updater(directory, ledger=directory / "ledger", options=KINDS[kind]) as updater, noted.open("a") as notes:
        for number in range(updates):
            for tensor in held.values():
                tensor.view(-1)[number % 100 :: 100].neg_()
            if kind == "failing" and number % 2:
                fail(updater, Source(have.tensors, held), version + 1, flag)
            else:
                version += 1
                updater.update(Source(have.tensors, held), version)
            dist.barrier()
            if rank == 0:
                row = [[held_by(pid) for pid in processes[role]] for role in ROLES]
                notes.write(f"{json.dumps(row)}\n")
            dist.barrier()
    dist.destroy_process_group()


def fail(updater: Updater, source: Source, version: int, flag: Path) -> None:
    """An attempt that workers refuse when all is loaded."""
    flag.touch()
    dist.barrier()
    try:
        updater.update(source, version)
    except UpdateError:
        pass
    else:
        raise RuntimeError("an attempt committed that workers refused")
    dist.barrier()
    flag.unlink(missing_ok=True)


def held_by(pid: int) -> list[int]:
    """Resident bytes, descriptors and threads of a process."""
    place = Path(f"/proc/{pid}")
    resident = int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return [resident, sum(1 for _ in (place / "fd").iterdir()), sum(1 for _ in (place / "task").iterdir())]


# ---- all of them -----------------------------------------------------------------------------------------------------


def start(arguments: list[str], **pipes: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, *arguments], text=True, **pipes)


def play(kind: str, updates: int) -> list[Any]:
    """One kind of update on new processes; what rank 0 noted after each."""
    with tempfile.TemporaryDirectory(prefix="treadle-m") as name:
        directory = Path(name)
        directory.chmod(0o700)
        place, processes = [f"--directory={directory}", str(updates)], list[subprocess.Popen[str]]()
        os.environ["MASTER_PORT"] = str(free_port())
        try:
            for worker in range(RANKS):
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                processes.append(start([f"--worker={worker}", *place], **pipes))
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "up\n"
            pids = [f"--pids={','.join(str(process.pid) for process in processes)}"]
            ranks = [start([f"--rank={rank}", f"--kind={kind}", *pids, *place]) for rank in range(RANKS)]
            processes += ranks
            for process in ranks:
                if process.wait(1200):
                    raise RuntimeError(f"an update rank ended with {process.returncode}")
            return [json.loads(line) for line in (directory / "noted").read_text().splitlines()]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def free_port() -> int:
    return int(dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False).port)


def growth(noted: list[Any]) -> dict[str, float]:
    """What each role keeps: of several processes the worst."""
    late = noted[len(noted) // 3 :]
    shown: dict[str, float] = {}
    for at, role in enumerate(ROLES):
        held = np.array([row[at] for row in late], float)  # update, process, what
        slopes = [np.polyfit(range(len(late)), held[:, process, 0], 1)[0] for process in range(held.shape[1])]
        shown[f"{role}_bytes_an_update"] = round(float(max(slopes)), 1)
        more = (held[-1] - held[0]).max(0)
        shown[f"{role}_descriptors"], shown[f"{role}_threads"] = int(more[1]), int(more[2])
    return shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("updates", type=int, nargs="?", default=300)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--worker", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--kind")
    parser.add_argument("--pids", type=lambda text: [int(pid) for pid in text.split(",")])
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    if given.worker is not None:
        be_worker(given.directory, given.worker)
    elif given.rank is not None:
        be_rank(given.directory, given.rank, given.kind, given.updates, given.pids)
    else:
        shown: dict[str, Any] = {}
        for kind in given.kinds:
            shown[kind] = growth(play(kind, given.updates))
            print(kind, shown[kind], flush=True)
        for what in ("bytes_an_update", "descriptors", "threads"):
            shown[f"worst_{what}"] = max(
                found[f"{role}_{what}"] for found in map(shown.get, given.kinds) for role in ROLES
            )
        print(json.dumps(shown))


if __name__ == "__main__":
    main()
