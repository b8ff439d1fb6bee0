"""Traces for the tests of files, and what it means that two are the same."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from treadle.costs import Costs, load_costs
from treadle.files.header import layout_object
from treadle.ir import Placement, Schedule
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import COLUMNS, Layout, Program
from treadle.ir.trace import Trace
from treadle.passes.cells import lower_cells
from treadle.schedules import SCHEDULES, generate
from treadle.simulator import simulate

SIZES = [(1, 1, 2), (2, 1, 4), (2, 2, 4), (4, 1, 8), (4, 2, 8)]
COSTS = ["unit", "deepseek-v3-h800"]


@cache
def costs(name: str) -> Costs:
    return load_costs(name)


def schedules() -> Iterator[Schedule]:
    """Every schedule at every size above that it can do."""
    for name in SCHEDULES:
        for pp, vpp, num_mb in SIZES:
            try:
                yield generate(name, pp=pp, vpp=vpp, microbatches=num_mb)
            except ValueError:
                continue


EXAMPLES = list(schedules())


def size_id(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.pp}-{schedule.vpp}-{schedule.num_microbatches}"


def trace_of(name: str = "dualpipe", pp: int = 4, num_mb: int = 8, cost: str = "unit", slowness: float = 0.0) -> Trace:
    program = lower_cells(generate(name, pp=pp, microbatches=num_mb))
    return simulate(program, costs(cost), slowness=slowness)


def by_layers() -> Trace:
    """Two ranks, every kind of lane, and times that no other part of the project made: all that a file must carry."""
    kinds = [
        (OpKind.ATTN_F, OpKind.MLP_F),
        (OpKind.DISPATCH_F, OpKind.COMBINE_F),
        (OpKind.SEND_F,),
        (OpKind.OFFLOAD,),
        (OpKind.ONLOAD,),
        (OpKind.REDUCE_GRAD,),
        (OpKind.HOST,),
        (OpKind.ATTN_F, OpKind.MLP_F),
        (OpKind.RECV_F,),
        (OpKind.DISPATCH_F, OpKind.COMBINE_F),
    ]
    lanes = [LaneKind.COMPUTE, LaneKind.EP, LaneKind.SEND, LaneKind.OUT, LaneKind.IN, LaneKind.DP, LaneKind.HOST]
    lanes += [LaneKind.COMPUTE, LaneKind.RECV, LaneKind.EP]
    flat = [kind for row in kinds for kind in row]
    num = len(flat)
    parts = (OpKind.ATTN_F, OpKind.DISPATCH_F, OpKind.MLP_F, OpKind.COMBINE_F)
    saved = {OpKind.ATTN_F: 250_000_000, OpKind.MLP_F: 7}
    layout = Layout(Placement.loop(1), 3, ("tt",), parts, (OpKind.MLP_B,), (OpKind.MLP_W,), 2, 1, saved, 0.1)
    program = Program(
        layout=layout,
        kind=np.array(flat, np.uint8),
        mb=np.arange(num, dtype=np.int32) % 3,
        chunk=np.arange(num, dtype=np.int16) % 2,
        layer=np.arange(num, dtype=np.int16) % 2,
        cell=np.arange(num, dtype=np.int32) - 1,
        launch=np.arange(num, dtype=np.int32)[::-1] - 1,
        size_bytes=np.arange(num, dtype=np.int64) << 40,
        joined=np.arange(num) == 1,
        lane_ptr=np.r_[0, np.cumsum([len(row) for row in kinds])].astype(np.int64),
        lane_rank=np.array([0] * 7 + [1] * 3, np.int32),
        lane_kind=np.array(lanes, np.uint8),
        lane_peer=np.array([-1, -1, 1, -1, -1, -1, -1, -1, 0, -1], np.int32),
        lane_group=np.array([-1, 1, 0, -1, -1, -1, -1, -1, 0, 1], np.int32),
        dep_ptr=np.array([0, 2, 2, *range(3, num + 1)], np.int64),
        dep=np.array([-1, 5, *range(num - 2)], np.int32),
    )
    start = 1_700_000_000_000_000_007 // 2 + np.arange(num, dtype=np.int64) ** 3
    return Trace(program, start, start + np.arange(num), about='measured on "h3" — ünïcode\n\\', measured=True)


def assert_same_program(read: Program, written: Program) -> None:
    assert read.layout == written.layout
    for name in COLUMNS:
        mine, other = getattr(read, name), getattr(written, name)
        assert mine.dtype == other.dtype, name
        np.testing.assert_array_equal(mine, other, name)
        assert mine.flags.writeable, name
        assert mine.flags.c_contiguous, name


def assert_same_trace(read: Trace, written: Trace) -> None:
    assert_same_program(read.program, written.program)
    for name in ("start", "end"):
        assert getattr(read, name).dtype == np.int64
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name), name)
    assert (read.clock, read.about, read.measured) == (written.clock, written.about, written.measured)


LONGEST_NS = 2**42 * 1000


@cache
def good_npz() -> bytes:
    stream = io.BytesIO()
    trace = trace_of("zb-v", 2, 4, "deepseek-v3-h800")
    arrays: dict[str, Any] = {name: getattr(trace.program, name) for name in COLUMNS}
    header = {
        "form": "treadle-trace",
        "version": 1,
        "layout": layout_object(trace.program.layout),
        "clock": {"unit": "us", "ticks": 1000},
        "about": "",
        "measured": False,
    }
    arrays |= {"start": trace.start, "end": trace.end, "treadle": np.array(json.dumps(header).encode())}
    np.savez(stream, **arrays)
    return stream.getvalue()


def header(**changes: Any) -> Callable[[Any], Any]:
    """Changes keys of the JSON; `__` reaches inside."""

    def change(array: Any) -> Any:
        content = json.loads(array.item())
        for key, value in changes.items():
            inner, *path = content, *key.split("__")
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
            if value is None:
                del inner[path[-1]]
        return np.array(json.dumps(content).encode())

    return change


# Chrome traces: what viewers need


def content_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert isinstance(content, dict)
    return content


def events_of(path: Path) -> list[dict[str, Any]]:
    return list(content_of(path)["traceEvents"])
