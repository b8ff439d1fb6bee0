"""What the engine of weight updates costs, and what it hides: `python benchmarks/update.py [rounds] [--ranks 2]`.

Update ranks and workers, each a process, move 512 MiB of bf16: pipeline stages into tensor parallelism, half along
columns, whose slices are strided. In each round, in an order that rotates, the same ranks and workers do

    bare     the overlapped loop with nothing around it: the source copies a bucket into shared memory, gloo broadcasts
             it, a byte tells the worker, which copies its slices out, while the next bucket goes into the other buffer
    engine   an update without checks: closed, loaded, prepared, decided on disk, opened
    checked  the same with digests from source to worker
    again    the bare loop once more

    ratio          engine over bare, median of the rounds'
    ratio_checked  checked over bare
    hidden         over links of 1 Gbit/s between network namespaces: the share of reload time during which a broadcast
                   was under way, from when the last rank had joined it until the last one had it all (a source is
                   done earlier: its last bytes are still in the kernel); null where namespaces are not allowed

Then two ranks that both hold all of it, so that half of what each receives it has itself, update with checks and

    off      no comparison of the ranks' weights
    sample   one block of 4 KiB in sixteen, the default
    all      every byte
    again    none once more

    compare_sample, compare_all, compare_again   over off, median of the rounds', and quartiles
    compare_sample_cpu, ...                      the same of the processor time of rank 0, workers not counted: what
                                                 neighbours on the machine disturb least (`--replicated`: only these)

The run is void, and exits with 1, if again over bare, or over off, leaves 0.95 to 1.05. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shaped_link import ShapedLink, why_not
from treadle.update import Endpoint, Plain, Source, UpdateOptions, Updater
from treadle.update.memory.copying import boxed, opaque
from treadle.update.memory.host import HostBuffer
from treadle.update.rank.shares import Shares
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Box, Holding, Tensor
from treadle.weights.update_plan import plan_update

MiB = 1 << 20
KINDS = ("bare", "engine", "checked", "again")
COMPARED = ("off", "sample", "all", "again")
BUCKET, TOTAL = 32 * MiB, 512 * MiB
SHAPED_RATE = "1gbit"


def layouts(ranks: int, total: int, *, replicated: bool = False) -> tuple[Holding, Holding]:
    """Matrices of 8 MiB, every other one cut along its columns; in pipeline stages, or all of them on each rank."""
    tensors = [Tensor(f"layers.{i}", (2048, 2048), "bfloat16") for i in range(total // (8 * MiB))]
    stage = {tensor.name: i * ranks // len(tensors) for i, tensor in enumerate(tensors)}
    spread = Parallel(replicas=ranks) if replicated else Parallel(pp=ranks, stage=stage.__getitem__)
    have = spread.holding(tensors)
    want = Parallel(tp=ranks, dim=lambda name: int(name.split(".")[1]) % 2).holding(tensors)
    return have, want


def memory(bucket: int) -> Memory:
    """For two IPC and two H2D buffers."""
    return Memory(free_bytes=4 * bucket, share=1.0, target_bytes=bucket, least_bytes=MiB)


# ---- a worker --------------------------------------------------------------------------------------------------------


def be_worker(directory: Path, worker: int, ranks: int, total: int) -> None:
    _, want = layouts(ranks, total)
    held = {piece.tensor: torch.zeros(piece.box.shape, dtype=torch.bfloat16) for piece in want.pieces[worker]}
    boxes = {piece.tensor: piece.box for piece in want.pieces[worker]}
    plain = Plain(held, tensors=want.tensors, boxes=boxes)
    with Endpoint(plain, directory, worker), socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / f"bare-{worker}.sock"))
        server.listen(1)
        while True:
            connection, _ = server.accept()
            serve_bare(connection, held, boxes)


def serve_bare(connection: socket.socket, held: dict[str, torch.Tensor], boxes: dict[str, Box]) -> None:
    """Bytes are numbers of buckets, answered when their slices are copied."""
    with connection:
        size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
        if not size:
            return
        data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 8)
        while len(data) < size:
            data += connection.recv(1 << 20)
        shares, sizes = pickle.loads(data)  # our own process at the other end
        buffers = [HostBuffer.map(fd, at) for fd, at in zip(fds, sizes, strict=True)]
        copies: dict[int, list[tuple[Any, Any]]] = {}
        for share in shares:
            raw = buffers[share.bucket % len(buffers)].tensor
            for take in share.takes:
                item = share.items[take.item]
                staged = boxed(raw, item.offset_bytes, item.piece.box.shape, "bfloat16")
                target = opaque(held[item.piece.tensor])[take.box.slices(boxes[item.piece.tensor])]
                copies.setdefault(share.bucket, []).append((target, opaque(staged)[take.box.slices(item.piece.box)]))
        connection.send(b"y")
        while told := connection.recv(1):
            for target, staged in copies.get(told[0], []):
                np.copyto(target, staged)
            connection.send(told)


# ---- an update rank --------------------------------------------------------------------------------------------------


class Bare:
    """The loop with nothing around it."""

    def __init__(self, directory: Path, rank: int, shares: Shares, source: Source) -> None:
        plan = shares.plan
        self.rank, self.plan = rank, plan
        self.buffers = [HostBuffer.make(shares.buffer_bytes) for _ in range(plan.num_ipc)]
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(directory / f"bare-{rank}.sock"))
        data = pickle.dumps((shares.of_worker(rank, exports=False).shares, [b.size_bytes for b in self.buffers]))
        self.connection.send(len(data).to_bytes(8, "little"))
        socket.send_fds(self.connection, [data[:1]], [b.fd for b in self.buffers if b.fd is not None])
        self.connection.sendall(data[1:])
        assert self.connection.recv(1) == b"y"
        self.packs: dict[int, list[tuple[Any, Any]]] = {}
        for number, bucket in enumerate(plan.buckets):
            raw = self.buffers[number % plan.num_ipc].tensor
            for item in bucket.items if bucket.source == rank else ():
                target = boxed(raw, item.offset_bytes, item.piece.box.shape, "bfloat16")
                self.packs.setdefault(number, []).append((opaque(target), opaque(source.local(item.piece))))

    def run(self) -> None:
        pending = 0
        for number, bucket in enumerate(self.plan.buckets):
            if pending == self.plan.num_ipc:
                self.connection.recv(1)
                pending -= 1
            for target, local in self.packs.get(number, ()):
                np.copyto(target, local)
            buffer = self.buffers[number % self.plan.num_ipc]
            dist.broadcast(buffer.tensor[: bucket.size_bytes], bucket.source)
            self.connection.send(bytes([number]))
            pending += 1
        while pending:
            self.connection.recv(1)
            pending -= 1


def store_of(directory: Path, rank: int, ranks: int) -> dist.TCPStore:
    """The store, at a port that rank 0 opens and notes: it may be in a network namespace of its own."""
    address, noted, part = os.environ["MASTER_ADDR"], directory / "port", directory / "port.part"
    if rank == 0:
        store = dist.TCPStore(address, 0, ranks, is_master=True, wait_for_workers=False)
        part.write_text(str(store.port))
        part.rename(noted)
        return store
    while not noted.exists():  # whoever started this rank ends it where rank 0 fails
        time.sleep(0.05)
    return dist.TCPStore(address, int(noted.read_text()), ranks, is_master=False)


def be_rank(directory: Path, rank: int, given: argparse.Namespace) -> None:
    ranks, rounds, bucket = given.ranks, given.rounds, given.bucket
    store = store_of(directory, rank, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    have, want = layouts(ranks, given.total, replicated=given.replicated)
    generator = torch.Generator().manual_seed(0 if given.replicated else rank)
    held = {p: torch.randn(p.box.shape, generator=generator).to(torch.bfloat16) for p in have.pieces[rank]}
    source = Source(have.tensors, held)
    options = UpdateOptions(memory(bucket), rollback="none", deadline_s=120)
    with Updater(directory, ledger=directory / "ledger", options=options) as updater:
        if given.replicated:
            result: Any = compare(updater, source, rounds)
        elif rounds:
            seconds = compete(directory, updater, source, Shares(plan_update(have, want, memory(bucket))), rounds)
            result = seconds
        else:
            result = hidden(updater, source)
        if rank == 0:
            (directory / "result.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


def compete(directory: Path, updater: Updater, source: Source, shares: Shares, rounds: int) -> list[dict[str, float]]:
    bare, version, seconds = Bare(directory, updater.rank, shares, source), 0, []
    checked, unchecked = updater.options, replace(updater.options, checked=False)
    for turn in range(-1, rounds):  # the first warms up
        taken: dict[str, float] = {}
        for kind in (*KINDS[turn % 4 :], *KINDS[: turn % 4]):
            version += 1
            dist.barrier()
            began = time.perf_counter()
            if kind in ("bare", "again"):
                bare.run()
            else:
                updater.options = checked if kind == "checked" else unchecked
                updater.update(source, version)
            dist.barrier()
            taken[kind] = time.perf_counter() - began
        if turn >= 0:
            seconds.append(taken)
    bare.connection.close()
    return seconds


def compare(updater: Updater, source: Source, rounds: int) -> list[dict[str, float]]:
    """Updates with each kind of comparison in turn."""
    options, version, seconds = updater.options, 0, []
    for turn in range(-1, rounds):
        taken: dict[str, float] = {}
        for kind in (*COMPARED[turn % 4 :], *COMPARED[: turn % 4]):
            version += 1
            updater.options = replace(options, compare_sources="off" if kind == "again" else kind)
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            updater.update(source, version)
            taken[f"{kind}_cpu"] = time.process_time() - used
            dist.barrier()
            taken[kind] = time.perf_counter() - began
        if turn >= 0:
            seconds.append(taken)
    return seconds


def hidden(updater: Updater, source: Source) -> float:
    """Of the second update: how much of all reloads ran while the link was busy. The hosts share a clock here."""
    updater.update(source, 1)
    times = updater.update(source, 2).times
    assert times is not None
    broadcasts = np.array([times.broadcast[bucket] for bucket in sorted(times.broadcast)])
    under_way = torch.from_numpy(broadcasts.astype(np.int64))
    dist.all_reduce(under_way, op=dist.ReduceOp.MAX)
    broadcasts = under_way.numpy()
    shares = torch.zeros(2, dtype=torch.float64)
    for start, end in times.reload.values():
        common = np.minimum(end, broadcasts[:, 1]) - np.maximum(start, broadcasts[:, 0])
        shares += torch.tensor([float(common.clip(0).sum()), float(end - start)])
    dist.all_reduce(shares)
    return float(shares[0] / shares[1])


# ---- all of them -----------------------------------------------------------------------------------------------------


def play(ranks: int, rounds: int, total: int, bucket: int, link: ShapedLink | None = None, *more: str) -> Any:
    """Starts workers and ranks, and returns what rank 0 found."""
    with tempfile.TemporaryDirectory(prefix="treadle-b") as name:
        directory = Path(name)
        directory.chmod(0o700)
        sizes = [f"--ranks={ranks}", f"--total={total}", f"--bucket={bucket}", f"--directory={directory}", *more]
        processes = []
        try:
            for worker in range(ranks):
                processes.append(start(["--worker", str(worker), *sizes], {}))
            while not all((directory / f"bare-{worker}.sock").exists() for worker in range(ranks)):
                time.sleep(0.05)
            for rank in range(ranks):
                address = "127.0.0.1" if link is None else link.address(0)
                device = "lo" if link is None else link.interface(rank)
                place = {"MASTER_ADDR": address, "GLOO_SOCKET_IFNAME": device}
                inside = [] if link is None else link.command(rank, [])
                processes.append(start(["--rank", str(rank), str(rounds), *sizes], place, inside))
            for process in processes[ranks:]:
                if process.wait(1200):
                    raise RuntimeError(f"an update rank ended with {process.returncode}")
            return json.loads((directory / "result.json").read_text())
        finally:
            for process in processes:
                process.kill()
                process.wait()


def start(arguments: list[str], place: dict[str, str], inside: list[str] | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **place}
    return subprocess.Popen([*(inside or []), sys.executable, __file__, *arguments], env=environment)


def measure_hidden() -> float | None:
    reason = why_not()
    if reason is not None:
        print(f"hidden: not measured, there is no shaped link here: {reason}")
        return None
    with ShapedLink(SHAPED_RATE) as link:
        return float(play(2, 0, TOTAL, BUCKET, link))


def over(kinds: tuple[str, ...], rounds: list[dict[str, float]]) -> dict[str, tuple[float, float, float]]:
    """Each kind's times over the first's, round by round: lower quartile, median, upper quartile."""
    for at, taken in enumerate(rounds):
        print(f"round {at:2}  " + "  ".join(f"{kind} {taken[kind] * 1e3:7.1f} ms" for kind in kinds))
    found = {}
    for kind in kinds[1:]:
        ratios = [taken[kind] / taken[kinds[0]] for taken in rounds]
        low, high = np.quantile(ratios, (0.25, 0.75))
        found[kind] = round(float(low), 3), round(statistics.median(ratios), 3), round(float(high), 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--total", type=int, default=TOTAL)
    parser.add_argument("--bucket", type=int, default=BUCKET)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--replicated", action="store_true", help="Only compare sources.")
    given = parser.parse_args()
    if given.worker is not None:
        be_worker(given.directory, given.worker, given.ranks, given.total)
    if given.rank is not None:
        be_rank(given.directory, given.rank, given)
        return 0
    sizes = given.ranks, given.rounds, given.total, given.bucket
    shown = compare_sources(play(*sizes, None, "--replicated"))
    void = not 0.95 <= shown["compare_again"] <= 1.05
    if not given.replicated:
        ratios = over(KINDS, play(*sizes))
        void = void or not 0.95 <= ratios["again"][1] <= 1.05
        print(f"bare against bare {ratios['again'][1]:.3f}")
        found = measure_hidden()
        shown |= {"ratio": ratios["engine"][1], "ratio_checked": ratios["checked"][1]}
        shown["hidden"] = None if found is None else round(found, 3)
    print("void" if void else "valid")
    print(json.dumps(shown))
    return 1 if void else 0


def compare_sources(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Ratios to no comparison."""
    shown: dict[str, Any] = {}
    for kinds in (COMPARED, tuple(f"{kind}_cpu" for kind in COMPARED)):
        for kind, (low, middle, high) in over(kinds, rounds).items():
            shown |= {f"compare_{kind}": middle, f"compare_{kind}_quartiles": [low, high]}
    return shown


if __name__ == "__main__":
    sys.exit(main())
