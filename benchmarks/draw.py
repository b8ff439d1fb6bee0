"""How much CPU figures take: `python benchmarks/draw.py`.

Each figure is drawn by `treadle draw` in a process of its own, after one that warms the caches of compiled code, fonts
and files: `command_s` is the CPU of all of it, user and system. `drawing_s` is the CPU of the drawing alone, in one
process, from a trace that is there already, with matplotlib imported and its fonts read. The least of three; a machine
with other work on it takes more. The last line is JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import treadle
from treadle.costs import Costs, load_costs
from treadle.ir.ops import LaneKind
from treadle.ir.trace import Trace
from treadle.view.figure import FigureContent, draw

ROUNDS = 3

FIGURES = {
    "zb_v": "zb-v --pp 8 -m 32 -o x.png",
    "three_schedules": "1f1b zb-h1 dualpipe --pp 4 -m 8 --memory -o x.png",
    "dualpipe_column": "dualpipe --pp 8 -m 20 --palette dualpipe --width column -o x.png",
    "layers_memory": "interleaved-overlap --pp 4 -m 16 --layers 1 --moe --memory -o x.png",
    "layers_lanes": "interleaved-overlap --pp 4 -m 16 --layers 2 --moe --offload --costs deepseek-v3-h800 -o x.png",
    "boxes_20000_memory": "interleaved-overlap --pp 16 -m 320 --memory -o x.png",
}

SIZES = {4096: (32, 32, False), 20_000: (16, 320, True), 50_000: (16, 784, False)}
"""Boxes: devices and micro-batches of interleaved-overlap with two chunks, 4 boxes for each of both; with memory?"""


def command_cpu(arguments: str, folder: str) -> float:
    """CPU seconds of a command of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "treadle", "draw", *arguments.split()], cwd=folder, check=True, stderr=-3)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def trace_of(num_boxes: int, pp: int, microbatches: int, costs: Costs) -> Trace:
    """A trace with that many boxes."""
    schedule = treadle.generate("interleaved-overlap", pp=pp, vpp=2, microbatches=microbatches)
    program = treadle.lower(schedule, costs, treadle.LoweringOptions())
    compute = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    assert compute.sum() >= num_boxes, int(compute.sum())
    return treadle.simulate(program, costs)


def drawing_cpu(trace: Trace, path: Path, memory: bool) -> float:
    """CPU seconds of drawing a trace."""
    begin = time.process_time()
    draw(trace, path, FigureContent(memory=memory))
    return time.process_time() - begin


def main() -> None:
    """Prints CPU seconds."""
    results: dict[str, float] = {}
    costs = load_costs("unit")
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in FIGURES.items():
            command_cpu(arguments, folder)
            best = min(command_cpu(arguments, folder) for _ in range(ROUNDS))
            results[f"{name}_command_s"] = round(best, 2)
            print(f"{best:6.2f} s  treadle draw {arguments}", flush=True)
        path = Path(folder) / "figure.png"
        draw(trace_of(1, 2, 4, costs), path)
        for num_boxes, (pp, microbatches, memory) in SIZES.items():
            trace = trace_of(num_boxes, pp, microbatches, costs)
            best = min(drawing_cpu(trace, path, memory) for _ in range(ROUNDS))
            results[f"png_{num_boxes}_drawing_s"] = round(best, 2)
            with_memory = " with memory" if memory else ""
            print(f"{best:6.2f} s  PNG of {num_boxes:,} boxes{with_memory}, drawing alone", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
