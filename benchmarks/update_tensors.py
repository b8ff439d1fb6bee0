"""What a tensor costs in an update, whatever its size: `python benchmarks/update_tensors.py [tensors] [--bytes 1024]`.

One update rank and one worker, two processes, update a dict of many small tensors with the settings that are shipped:
checks, rollback="host", comparison of sources. Of each update the processor time of both processes is taken, from
before the source is made of the state dict until the update returns. Then the same bytes as one tensor.

    us_per_tensor         microseconds at rank and worker together, of one tensor in an update after the first; median
    us_per_tensor_rank    the rank's share
    us_per_tensor_worker  the worker's share
    us_per_tensor_first   the first update, which describes layouts and makes the plan
    us_per_tensor_bytes   what the same bytes cost as one tensor, which is in all of these

At the end every tensor of the worker is compared with the source. `--profile` prints where the rank's time goes, and
the worker's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from treadle.update import Endpoint, Plain, Source, Updater
from treadle.update.adapters.plain import digest_of
from treadle.update.worker.worker import Worker

_DTYPE = torch.bfloat16


def state_of(tensors: int, size_bytes: int) -> dict[str, torch.Tensor]:
    """Tensors of so many bytes each, of random bits."""
    elements = size_bytes // _DTYPE.itemsize
    bits = torch.randint(-(1 << 15), 1 << 15, (tensors, elements), dtype=torch.int16)
    return {f"model.layers.{i}.weight": bits[i].view(_DTYPE).clone() for i in range(tensors)}


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken: Linux has a clock for each."""
    return time.clock_gettime((~pid << 3) | 2)


def be_worker(directory: Path, tensors: int, size_bytes: int, *, profile: bool) -> None:
    profiler = cProfile.Profile()
    if profile:
        _profile_handling(profiler)
    plain = Plain({name: torch.zeros_like(tensor) for name, tensor in state_of(tensors, size_bytes).items()})
    with Endpoint(plain, directory, 0, answer=lambda body: (plain.gate.version or 0, digest_of(plain.held).encode())):
        print("ready", flush=True)
        sys.stdin.read()
        print(digest_of(plain.held), flush=True)
    if profile:
        _print_profile("worker", profiler)


def _profile_handling(profiler: cProfile.Profile) -> None:
    """Profile what a worker does with each message, in the thread that does it."""
    handle = Worker.handle

    def profiled(self: Worker, message: object) -> object:
        return profiler.runcall(handle, self, message)

    Worker.handle = profiled  # type: ignore[method-assign, assignment]


def be_rank(directory: Path, tensors: int, size_bytes: int, updates: int, worker: int, *, profile: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    taken, profiler = [], cProfile.Profile()
    with Updater(directory, ledger=directory / "ledger") as updater:
        for version in range(1, updates + 2):
            state = state_of(tensors, size_bytes)
            before = cpu_s(os.getpid()), cpu_s(worker)
            if profile and version > 1:
                profiler.enable()
            updater.update(Source.of(state), version=version)
            profiler.disable()
            taken.append([after - at for after, at in zip((cpu_s(os.getpid()), cpu_s(worker)), before, strict=True)])
    dist.destroy_process_group()
    if profile:
        _print_profile("rank", profiler)
    print(json.dumps({"taken": taken, "digest": digest_of(state)}))


def _print_profile(who: str, profiler: cProfile.Profile) -> None:
    print(f"---- {who}", file=sys.stderr)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(22)


def measure(tensors: int, size_bytes: int, updates: int, *, profile: bool = False) -> list[list[float]]:
    """Seconds of processor time of rank and worker in each update."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        common = [sys.executable, __file__, str(tensors), "--bytes", str(size_bytes), "--updates", str(updates)]
        common += ["--directory", made, *(["--profile"] if profile else [])]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
        pipe = subprocess.PIPE
        with subprocess.Popen([*common, "--worker"], stdin=pipe, stdout=pipe, text=True, env=environment) as worker:
            assert worker.stdout is not None
            if worker.stdout.readline() != "ready\n":
                sys.exit("the worker did not start")
            command = [*common, "--rank", str(worker.pid)]
            rank = subprocess.run(command, stdout=pipe, text=True, env=environment, check=True)
            said, _ = worker.communicate()
        found = json.loads(rank.stdout.splitlines()[-1])
        if said.split() != [found["digest"]]:
            sys.exit(f"the worker holds {said.split()}, the source {found['digest']} ({directory})")
        taken: list[list[float]] = found["taken"]
        return taken


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("tensors", type=int, nargs="?", default=20_000)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--rank", type=int, help="The worker's process.")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    if given.worker:
        be_worker(given.directory, given.tensors, given.bytes, profile=given.profile)
        return 0
    if given.rank is not None:
        be_rank(given.directory, given.tensors, given.bytes, given.updates, given.rank, profile=given.profile)
        return 0
    many = measure(given.tensors, given.bytes, given.updates, profile=given.profile)
    one = measure(1, given.tensors * given.bytes, given.updates)
    shown: dict[str, float | int] = {"tensors": given.tensors, "tensor_bytes": given.bytes}
    each = 1e6 / given.tensors
    rank, worker = (statistics.median(update[at] for update in many[1:]) for at in (0, 1))
    shown["us_per_tensor"] = round(statistics.median(sum(update) for update in many[1:]) * each, 2)
    shown |= {"us_per_tensor_rank": round(rank * each, 2), "us_per_tensor_worker": round(worker * each, 2)}
    shown["us_per_tensor_first"] = round(sum(many[0]) * each, 2)
    shown["us_per_tensor_bytes"] = round(statistics.median(sum(update) for update in one[1:]) * each, 2)
    print(json.dumps(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
