"""Reading a large profile: `python benchmarks/import_profile.py [--gb 0.5] [--packed]`.

Makes a directory of torch.profiler files of that size (2 GB unless told), as eight ranks with a GPU each leave them: a
step of interleaved, the kernels of each cell, their launches, and five times as many events that nobody asks for. A
fresh process imports it. The last line is JSON: `peak_mb` is that process's most memory, `base_mb` what it has before
it reads; `mb_s` is megabytes on disk over the seconds on its clock, `mb_cpu_s` over its CPU's. `whole_mb_cpu_s` is the
same for `json.load`, on one of the files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import treadle
from treadle.ir.ops import OpKind
from treadle.profiles.importing import import_profile
from treadle.profiles.work_names import pp_name

PP, MICROBATCHES = 8, 16
CELL_US, MESSAGE_US = 10_000, 100


def event(category: str, name: str, tid: int, ts: float, dur: float, args: str) -> str:
    """An event as Kineto writes it."""
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {0 if category == "kernel" else 4711}, '
        f'"tid": {tid},\n    "ts": {ts:.3f}, "dur": {dur:.3f},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def events(rank: int, num_kernels: int) -> Iterator[str]:
    """A step of one rank: in each op so many kernels, a launch and five other events for each."""
    schedule = treadle.generate("interleaved", pp=PP, microbatches=MICROBATCHES, vpp=2)
    costs = treadle.load_costs("unit")
    program = treadle.lower(schedule, costs)
    trace = treadle.simulate(program, costs)
    scale = CELL_US / max(1, int((trace.end - trace.start).max()))
    correlation = 0
    for index in range(program.num_ops):
        op = program.op(index)
        if op.lane.rank != rank:
            continue
        start, end = float(trace.start[index]) * scale, float(trace.end[index]) * scale
        end = max(end, start + MESSAGE_US)
        name, talks = pp_name(op, schedule.placement), op.kind.is_send or op.kind.is_recv
        yield event("user_annotation", name, 1, start, end - start, f'"External id": {index}')
        for k in range(1 if talks else num_kernels):
            correlation += 1
            at, each = start + (end - start) * k / num_kernels, (end - start) / num_kernels * 0.9
            if talks:
                at, each = start, end - start
            kernel = "ncclDevKernel_SendRecv" if talks else "void cutlass::device_kernel<Gemm>(Gemm::Params)"
            ids = f'"External id": {correlation}, "correlation": {correlation}'
            yield event("cuda_runtime", "cudaLaunchKernel", 1, at, 2, f'{ids}, "cbid": 211')
            more = f'"queued": 0, "device": {rank}, "context": 1, "stream": {20 if talks else 7}, {ids}'
            grid = '"grid": [4096, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 100'
            yield event("kernel", kernel, 20 if talks else 7, at, each, f"{more}, {grid}")
            for part in range(5):
                dims = '"Input Dims": [[4096, 7168], [7168, 2048]], "Input type": ["c10::BFloat16", "c10::BFloat16"]'
                yield event("cpu_op", f"aten::op{part}", 1, at, 1, f'"External id": {correlation}, {dims}')


def write(path: Path, rank: int, num_kernels: int) -> None:
    """One rank's file."""
    info = {"backend": "nccl", "rank": rank, "world_size": PP}
    group = {"pg_name": "1", "pg_desc": "mesh_pp", "pg_size": PP, "ranks": list(range(PP))}
    about = {"schemaVersion": 1, "deviceProperties": [], "distributedInfo": {**info, "pg_config": [group]}}
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        file.write(json.dumps({**about, "host_name": "node0", "baseTimeNanoseconds": 10**18})[:-1])
        file.write(', "traceEvents": [\n')
        for at, text in enumerate(events(rank, num_kernels)):
            file.write((",\n" if at else "") + text)
        file.write('],"traceName": "rank.json"}')


def read(directory: Path) -> None:
    """In a fresh process: import, and print what it took."""
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size, told = sum(path.stat().st_size for path in directory.iterdir()), 0

    def advance(num_bytes: int) -> None:
        nonlocal told
        told += num_bytes

    started, cpu = time.perf_counter(), time.process_time()
    imported = import_profile([directory], advance)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert told == size, (told, size)
    assert imported.schedule.name == "interleaved", imported.remarks
    num_cells = int((imported.program.kind <= OpKind.W).sum())
    assert num_cells == 2 * 2 * PP * MICROBATCHES
    print(
        json.dumps(
            {
                "gb": round(size / 1e9, 3),
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
                "base_mb": round(base / 1e3),
                "seconds": round(seconds, 2),
                "mb_s": round(size / 1e6 / seconds, 1),
                "mb_cpu_s": round(size / 1e6 / cpu, 1),
            }
        )
    )


def main() -> None:
    """Make the directory and read it elsewhere."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--read", type=Path)
    asked = parser.parse_args()
    if asked.read is not None:
        read(asked.read)
        return
    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "probe.json"
        write(probe, 0, 10)
        num_kernels = max(1, round(10 * asked.gb * 1e9 / PP / probe.stat().st_size))
        probe.unlink()
        for rank in range(PP):
            write(Path(directory) / f"rank{rank}_trace.json{'.gz' if asked.packed else ''}", rank, num_kernels)
        one = Path(directory) / "rank0_trace.json"
        whole = {}
        if not asked.packed:
            code = f"import json, time; json.load(open({str(one)!r})); print(time.process_time())"
            took = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            whole = {"whole_mb_cpu_s": round(one.stat().st_size / 1e6 / float(took.stdout), 1)}
        done = subprocess.run(
            [sys.executable, __file__, "--read", directory], capture_output=True, text=True, check=True
        )
        print(json.dumps({**json.loads(done.stdout.splitlines()[-1]), **whole}))


if __name__ == "__main__":
    main()
