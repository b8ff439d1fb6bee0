"""A weight update by its buffers: for each device the H2D and IPC buffers, and which ops fill and read them when.

    0/H2D: h2d0@0-4 h2d1@8-12
    0/A: src0.0@4-5 reload0.0@5-6 dst0.2@6-7 ...
    0/B: dst0.1@5-6 reload0.1@6-7 ...

A broadcast is `src` on the device whose bucket it is, `dst` on the others; so are the send and the receive of a bucket
that goes along a route; `pass` sends it on. Numbers are round and source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.ir.ops import BUCKET_COMES, OpKind
from treadle.ir.program import NEVER, Longs, Program
from treadle.ir.trace import Trace

if TYPE_CHECKING:
    from treadle.view.printed_rows import UpdateRowJson, UpdateRowsJson


@dataclass(frozen=True, eq=False)
class BufferRow:
    """A buffer of a device, and the ops that fill or read it, in the order of their starts."""

    rank: int
    name: str
    is_ipc: bool
    ops: Longs


def buffer_rows(trace: Trace, ranks: range) -> Iterator[BufferRow]:
    """The H2D buffers of each device, then its IPC buffers. A copy straight into an IPC buffer stands in its row."""
    program = trace.program
    num_h2d, num_ipc = num_buffers(program)
    rank_ptr = np.searchsorted(program.lane_rank, np.arange(program.num_ranks + 1))
    for rank in ranks:
        lanes = program.lane_ptr[rank_ptr[rank] : rank_ptr[rank + 1] + 1]
        ops = np.arange(lanes[0], lanes[-1]) if len(lanes) else np.zeros(0, np.int64)
        copies = (program.kind[ops] == OpKind.H2D) & (program.chunk[ops] != NEVER)
        came = np.isin(program.kind[ops], BUCKET_COMES)
        buffer_of = dict(zip(program.cell[ops[came]].tolist(), program.chunk[ops[came]].tolist(), strict=True))
        into = np.array([buffer_of.get(cell, NEVER) for cell in program.cell[ops].tolist()], np.int64)
        copies |= into == NEVER
        for buffer in range(num_h2d):
            name = "H2D" if num_h2d == 1 else f"H2D {letter(buffer)}"
            yield BufferRow(rank, name, False, _by_start(trace, ops[copies & (program.chunk[ops] == buffer)]))
        for buffer in range(num_ipc):
            mine = ops[~copies & (into == buffer)]
            yield BufferRow(rank, letter(buffer), True, _by_start(trace, mine))


def num_buffers(program: Program) -> tuple[int, int]:
    """H2D and IPC buffers of a device."""
    h2d, ipc = program.kind == OpKind.H2D, np.isin(program.kind, BUCKET_COMES)
    return int(program.chunk[h2d].max(initial=NEVER)) + 1, int(program.chunk[ipc].max(initial=NEVER)) + 1


def letter(buffer: int) -> str:
    """A, B, ..."""
    return chr(ord("A") + buffer)


def _by_start(trace: Trace, ops: Longs) -> Longs:
    ordered: Longs = ops[np.lexsort((trace.end[ops], trace.start[ops]))]
    return ordered


def described_update(program: Program) -> str:
    """Devices, rounds and buffers in words."""
    num_h2d, num_ipc = num_buffers(program)
    size = f"{_count(program.num_ranks, 'device')}, {_count(int(program.mb.max(initial=-1)) + 1, 'round')}"
    return f"{size}; buffers of a device: {num_h2d} H2D, {num_ipc} IPC"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def update_text(trace: Trace, ranks: range) -> str:
    """A row a buffer: op@start-end, in units of the trace's clock."""
    show = trace.clock.show
    unit = "" if trace.clock.unit == "unit" else f" {trace.clock.unit}"
    lines = [
        f"# treadle-update: {described_update(trace.program)}",
        f"# {trace.about}; makespan {show(trace.makespan):g}{unit}",
    ]
    for row in buffer_rows(trace, ranks):
        times = ((show(trace.start[op]), show(trace.end[op])) for op in row.ops)
        tokens = (f"{token(trace.program, int(op))}@{a:g}-{b:g}" for op, (a, b) in zip(row.ops, times, strict=True))
        lines.append(f"{row.rank}/{row.name}: {' '.join(tokens)}".rstrip())
    return "\n".join(lines) + "\n"


def update_object(trace: Trace, ranks: range) -> UpdateRowsJson:
    """Return a dict for JSON: `ops` are [name, start, end]."""
    show, program = trace.clock.show, trace.program
    rows: list[UpdateRowJson] = [
        {
            "device": row.rank,
            "buffer": row.name,
            "ops": [(token(program, int(op)), show(trace.start[op]), show(trace.end[op])) for op in row.ops],
        }
        for row in buffer_rows(trace, ranks)
    ]
    makespan = show(trace.makespan)
    return {"unit": trace.clock.unit, "makespan": makespan, "about": trace.about, "rows": rows}


def token(program: Program, op: int) -> str:
    """`h2d1`, `src1.0`, `dst1.2`, `reload1.2`."""
    seen = program.op(op)
    if seen.kind is OpKind.H2D:
        return f"h2d{seen.mb}"
    name = "src" if seen.layer == seen.lane.rank else "pass" if seen.kind is OpKind.SEND_BUCKET else "dst"
    name = "reload" if seen.kind is OpKind.RELOAD else name
    return f"{name}{seen.mb}.{seen.layer}"
