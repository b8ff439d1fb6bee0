"""How long figures take: `python benchmarks/draw.py`.

PNGs of 4,096 boxes, all numbered, and of 50,000, too thin for numbers; each from a trace that is there already, the
best of three, after a small one that loads fonts. The last line is JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import treadle
from treadle.costs import UNIT_COSTS
from treadle.ir.program import LaneKind
from treadle.ir.trace import Trace
from treadle.view.figure import draw

SIZES = {4096: (32, 32), 50_000: (16, 782)}
"""Boxes wanted: devices and micro-batches of interleaved-overlap with two chunks, 4 boxes for each of both."""


def trace_of(num_boxes: int, pp: int, microbatches: int) -> Trace:
    """A trace with that many boxes."""
    microbatches = -(-microbatches // pp) * pp
    schedule = treadle.generate("interleaved-overlap", pp=pp, vpp=2, microbatches=microbatches)
    program = treadle.lower(schedule, UNIT_COSTS, treadle.LoweringOptions())
    compute = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    assert compute.sum() >= num_boxes, int(compute.sum())
    return treadle.simulate(program, UNIT_COSTS)


def seconds(trace: Trace, path: Path) -> float:
    """How long it takes to draw it."""
    begin = time.perf_counter()
    draw(trace, path)
    return time.perf_counter() - begin


def main() -> None:
    """Prints seconds."""
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figure.png"
        draw(trace_of(1, 2, 4), path)
        for num_boxes, (pp, microbatches) in SIZES.items():
            trace = trace_of(num_boxes, pp, microbatches)
            best = min(seconds(trace, path) for _ in range(3))
            print(f"PNG of {num_boxes} ops: {best:.2f} s, {path.stat().st_size / 1e6:.1f} MB")
            results[f"png_{num_boxes}_s"] = round(best, 3)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
