"""Updates over slow links, targeted and by broadcasts: `python benchmarks/update_fleet.py [rounds]`.

Four hosts, each a network namespace with a link of 25 Mbit/s out of it (a token bucket), with an update rank and a
worker each. 64 MiB of bf16 go through the whole engine, with digests, rollback="host", the comparison of sources, the
vote and the log. In each round, in turn, targeted and by broadcasts:

    pp2 ep2 into tp4        experts on one rank each, all else on both ranks of a stage; takers by columns
    fsdp into 2 x tp2       shards along rows; two replicas, which take halves by columns

    targeted_ratio    seconds of the load phase over what the slowest link needs: the payload of the host that has most
                      to send, or to receive, over the link's rate; medians over rounds, the worse of the two layouts
    broadcast_ratio   the same of broadcasts, against the limit of the targeted plan
    chain_ratio       targeted_ratio of the replicas alone, which are a chain: the first sends on what it receives; the
                      limit counts what hosts send on, too

Then pp2 ep2 into tp4, targeted, with one element in a hundred changed: a whole update, one of the changed elements, and
another one of these that fails, because a worker refuses to vote when all is loaded: workers go back. Medians over
rounds, over the whole update's:

    delta_bytes       bytes that all hosts sent over their links, everything counted
    delta_time        seconds of the update, from the call to its end
    rollback_bytes    bytes of the workers' rollback copies
    rollback_time     seconds of the update that fails, until all workers serve the version before it

Each version is compared in the workers, element by element, after the last round. The last line is JSON; all values are
null without network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shaped_link import ShapedLink, why_not
from treadle.update import Endpoint, Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel, sharded
from treadle.weights.tensor_boxes import Box, Holding, Tensor
from treadle.weights.update_plan import UpdatePlan

HOSTS, RATE, BYTES_A_S = 4, "25mbit", 25e6 / 8
WAYS = ("targeted", "broadcast")
MEMORY = Memory(1 << 28, share=1.0, target_bytes=8 << 20, least_bytes=1 << 19)


def tensors() -> list[Tensor]:
    """72 tensors, 64 MiB: 8 layers with 4 experts."""
    made = []
    for layer in range(8):
        made += [Tensor(f"layers.{layer}.{name}", (1024, 640), "bfloat16") for name in ("q", "k", "v", "o", "gate")]
        made += [Tensor(f"layers.{layer}.experts.{expert}", (1024, 224), "bfloat16") for expert in range(4)]
    return made


def layouts(name: str) -> tuple[Holding, Holding]:
    model = tensors()
    if name == "fsdp":
        return sharded(model, HOSTS), Parallel(tp=2, replicas=2, dim=lambda name: 1).holding(model)
    stage = lambda name: int(name.split(".")[1]) // 4  # noqa: E731
    expert = lambda name: int(name.split(".")[3]) % 2 if "experts" in name else None  # noqa: E731
    have = Parallel(pp=2, ep=2, stage=stage, expert=expert).holding(model)
    return have, Parallel(tp=4, dim=lambda name: 1).holding(model)


LAYOUTS = ("pp_ep", "fsdp")


def elements(name: str, box: Box, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """The same in any process."""
    place = np.arange(box.start[0], box.stop[0], dtype=np.int64)[:, None] * shape[1]
    place = place + np.arange(box.start[1], box.stop[1], dtype=np.int64)
    seed = sum(name.encode()) * 31 + version * 7919
    values = ((place + seed) * 2654435761 >> 13).astype(np.int16)
    return torch.from_numpy(values).view(torch.bfloat16)


def changing(
    name: str, box: Box, shape: tuple[int, ...], version: int, made: torch.Tensor | None = None
) -> torch.Tensor:
    """The same, of versions in each of which one element in a hundred changes; `made` has the version before."""
    place = np.arange(box.start[0], box.stop[0], dtype=np.int64)[:, None] * shape[1]
    place = place + np.arange(box.start[1], box.stop[1], dtype=np.int64)
    held = made if made is not None else elements(name, box, shape, 0)
    values = held.view(torch.int16).numpy()
    for number in range(version if made is not None else 1, version + 1):
        at = place % 100 == number * 31 % 100
        values[at] ^= ((place[at] + number) * 2654435761 >> 13).astype(np.int16) | np.int16(1)
    return held


class Refusing(Plain):
    """Refuses to vote once, if a file is there."""

    flag = Path()

    def finish(self) -> str | None:
        if not self.flag.exists():
            return None
        self.flag.unlink()
        return "refused"


def be_worker(directory: Path, worker: int, layout: str) -> None:
    """Serve until standard input ends; a line with a version asks for a comparison."""
    _, want = layouts(layout)
    boxes = {piece.tensor: piece.box for piece in want.pieces[worker]}
    held = {name: torch.zeros(box.shape, dtype=torch.bfloat16) for name, box in boxes.items()}
    engine, right = Refusing(held, tensors=want.tensors, boxes=boxes), changing if layout == "deltas" else elements
    engine.flag = directory / f"refuse {worker}"
    with Endpoint(engine, directory, worker):
        print("up", flush=True)
        for line in sys.stdin:
            shape = {name: want.tensors[name].shape for name in boxes}
            wrong = [
                name
                for name, box in boxes.items()
                if not torch.equal(
                    held[name].view(torch.int16), right(name, box, shape[name], int(line)).view(torch.int16)
                )
            ]
            print(f"wrong {wrong}" if wrong else "right", flush=True)


def be_rank(directory: Path, rank: int, layout: str, rounds: int) -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), HOSTS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=HOSTS, timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    if layout == "deltas":
        send_deltas(directory, rank, rounds)
    else:
        send_both_ways(directory, rank, layout, rounds)
    dist.destroy_process_group()


def send_deltas(directory: Path, rank: int, rounds: int) -> None:
    """Whole updates, deltas and deltas that fail, in turn."""
    have, _ = layouts("deltas")
    shapes = {name: tensor.shape for name, tensor in have.tensors.items()}
    held = {p: elements(p.tensor, p.box, shapes[p.tensor], 0) for p in have.pieces[rank]}
    options = UpdateOptions(MEMORY, deadline_s=120, rollback="host", transfer="targeted")
    sent = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    refusing, version = directory / "refuse 3", 0
    found: dict[str, list[tuple[float, ...]]] = {what: [] for what in ("whole", "base", "delta", "back")}
    with Updater(directory, ledger=directory / "ledger", options=options) as updater:
        for turn in range(-1, rounds):  # the first warms up
            for what in found:
                version += 1
                for piece, tensor in held.items():
                    changing(piece.tensor, piece.box, shapes[piece.tensor], version, tensor)
                updater.options = replace(options, changed="tensors" if what == "whole" else "elements")
                if what == "back" and rank == 0:
                    refusing.touch()
                dist.barrier()
                before, began, kept = int(sent.read_text()), time.perf_counter(), 0
                try:
                    kept = updater.update(Source(have.tensors, held), version).rollback_bytes
                except UpdateError:
                    if what != "back":
                        raise
                took = torch.tensor(time.perf_counter() - began)
                bytes_sent = torch.tensor([int(sent.read_text()) - before, kept])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                dist.all_reduce(bytes_sent)
                if turn >= 0:
                    found[what].append((float(took), *bytes_sent.tolist()))
                if rank == 0:
                    print(f"deltas {what:6} {float(took):6.2f} s, {bytes_sent[0] / 1e6:.3f} MB sent", flush=True)
                dist.barrier()
        version += 1  # the last one failed
        for piece, tensor in held.items():
            changing(piece.tensor, piece.box, shapes[piece.tensor], version, tensor)
        updater.update(Source(have.tensors, held), version)
        if rank == 0:
            (directory / "result.json").write_text(json.dumps({"version": version, **found}))
        dist.barrier()


def send_both_ways(directory: Path, rank: int, layout: str, rounds: int) -> None:
    """Targeted updates and broadcasts in turn."""
    have, _ = layouts(layout)
    pieces = have.pieces[rank]
    options = UpdateOptions(MEMORY, deadline_s=120, rollback="host")
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    limit_s, version = 0.0, 0
    with Updater(directory, ledger=directory / "ledger", options=options) as updater:
        for turn in range(-1, rounds):  # the first warms up
            for way in WAYS[:: 1 if turn % 2 else -1]:
                version += 1
                held = {p: elements(p.tensor, p.box, have.tensors[p.tensor].shape, version) for p in pieces}
                updater.options = replace(options, transfer=way)  # type: ignore[arg-type]
                dist.barrier()
                done = updater.update(Source(have.tensors, held), version)
                took = torch.tensor(done.seconds["load"])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                assert done.shares is not None
                if way == "targeted":
                    limit_s = limit_of(done.shares.plan)
                if turn >= 0:
                    found[way].append(float(took))
                if rank == 0:
                    print(f"{layout} {way:9} load {float(took):6.2f} s, all {done.seconds['total']:6.2f} s", flush=True)
        if rank == 0:
            (directory / "result.json").write_text(json.dumps({"limit_s": limit_s, "version": version, **found}))
        dist.barrier()


def limit_of(plan: UpdatePlan) -> float:
    """Seconds that the slowest link needs for what a plan sends over it."""
    out, into = [0] * HOSTS, [0] * HOSTS
    for bucket in plan.buckets:
        for sender, receiver in pairwise((bucket.source, *bucket.dests)):
            out[sender] += bucket.size_bytes * (sender != receiver)
            into[receiver] += bucket.size_bytes * (sender != receiver)
    return max(*out, *into) / BYTES_A_S


def deltas(result: dict[str, Any]) -> dict[str, Any]:
    """What updates of changed elements take of whole ones."""
    seconds, sent, kept = (
        {w: statistics.median(row[at] for row in result[w]) for w in result if w != "version"} for at in range(3)
    )
    return {
        "delta_bytes": round(sent["delta"] / sent["whole"], 4),
        "delta_time": round(seconds["delta"] / seconds["whole"], 4),
        "rollback_bytes": round(kept["delta"] / kept["whole"], 4),
        "rollback_time": round(seconds["back"] / seconds["whole"], 4),
        "deltas_seconds": {what: [round(row[0], 3) for row in result[what]] for what in seconds},
    }


def start(arguments: list[str], inside: list[str], environment: dict[str, str], **pipes: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([*inside, sys.executable, __file__, *arguments], env=env, text=True, **pipes)


def play(layout: str, rounds: int, link: ShapedLink) -> dict[str, Any]:
    """One layout on four hosts; what rank 0 found."""
    with tempfile.TemporaryDirectory(prefix="treadle-f") as name:
        directory = Path(name)
        directory.chmod(0o700)
        place = [f"--directory={directory}", f"--layout={layout}", str(rounds)]
        processes: list[subprocess.Popen[str]] = []
        try:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers = [start([f"--worker={w}", *place], [], {}, **pipes) for w in range(HOSTS)]
            processes += workers
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "up\n"
            master = {"MASTER_ADDR": link.address(0), "MASTER_PORT": "29417"}
            ranks = []
            for rank in range(HOSTS):
                inside = link.command(rank, [])
                environment = {**master, "GLOO_SOCKET_IFNAME": link.interface(rank)}
                ranks.append(start([f"--rank={rank}", *place], inside, environment))
                processes.append(ranks[-1])
            for process in ranks:
                if process.wait(1200):
                    raise RuntimeError(f"an update rank ended with {process.returncode}")
            result: dict[str, Any] = json.loads((directory / "result.json").read_text())
            for worker in workers:
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write(f"{result['version']}\n")
                worker.stdin.flush()
                told = worker.stdout.readline()
                if told != "right\n":
                    raise RuntimeError(f"a worker holds other elements than were sent: {told}")
            return result
        finally:
            for process in processes:
                process.kill()
                process.wait()
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--layout")
    parser.add_argument("--deltas", action="store_true", help="measure updates of changed elements alone")
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    if given.worker is not None:
        be_worker(given.directory, given.worker, given.layout)
        return
    if given.rank is not None:
        be_rank(given.directory, given.rank, given.layout, given.rounds)
        return
    ratios_shown = ("targeted_ratio", "chain_ratio", "broadcast_ratio")
    shown: dict[str, Any] = dict.fromkeys(
        (*ratios_shown, "delta_bytes", "delta_time", "rollback_bytes", "rollback_time")
    )
    reason = why_not()
    if reason is not None:
        print(f"no shaped links here: {reason}")
        print(json.dumps(shown))
        return
    medians: dict[str, list[float]] = {way: [] for way in WAYS}
    with ShapedLink(RATE, HOSTS) as link:
        shown |= deltas(play("deltas", given.rounds, link))
        for layout in LAYOUTS if not given.deltas else ():
            result = play(layout, given.rounds, link)
            for way in WAYS:
                ratios = [took / result["limit_s"] for took in result[way]]
                medians[way].append(statistics.median(ratios))
                print(
                    f"{layout} {way:9} limit {result['limit_s']:.2f} s, over it {medians[way][-1]:.3f} "
                    f"({min(ratios):.3f} to {max(ratios):.3f})"
                )
                shown[f"{layout}_{way}"] = [round(ratio, 3) for ratio in sorted(ratios)]
    shown |= {f"{way}_ratio": round(max(medians[way]), 3) for way in WAYS if medians[way]}
    if not given.deltas:
        shown["chain_ratio"] = round(medians["targeted"][LAYOUTS.index("fsdp")], 3)
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
