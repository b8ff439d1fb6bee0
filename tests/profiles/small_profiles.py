"""Small profiles in each form that is read, of one run: four ranks of 1F1B, eight micro-batches, two steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import treadle
from tests.profiles.nsys_files import Work, write_export
from tests.profiles.recorded import traced
from treadle.ir.ops import LaneKind, OpKind

NUM_RANKS = 4
NUM_STEPS = 2
_NS = 1000


class Event(NamedTuple):
    """A forward or backward of a micro-batch, in microseconds."""

    kind: str
    mb: int
    step: int
    start: float
    end: float


Ranks = list[list[Event]]


@cache
def run() -> Ranks:
    """The events of each rank, in order; a unit of the prediction is 10 ms."""
    trace = traced(treadle.generate("1f1b", pp=NUM_RANKS, microbatches=8))
    program, unit = trace.program, 10_000 / trace.clock.ticks
    ranks: Ranks = []
    for rank in range(NUM_RANKS):
        lane = int(np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == LaneKind.COMPUTE))[0])
        ops = range(*program.lane_ptr[lane : lane + 2])
        later = [step * unit * (trace.makespan + trace.clock.ticks) for step in range(NUM_STEPS)]
        ranks.append(
            [
                Event(OpKind(program.kind[op]).name, int(program.mb[op]), step, start + later[step], end + later[step])
                for step in range(NUM_STEPS)
                for op in ops
                for start, end in [(float(trace.start[op] * unit), float(trace.end[op] * unit))]
            ]
        )
    return ranks


def write_kineto(directory: Path, ranks: Ranks) -> None:
    """torch.profiler's files, a rank each, of a CPU."""
    for rank, events in enumerate(ranks):
        group = {"pg_name": "0", "pg_desc": "mesh_pp", "ranks": list(range(NUM_RANKS))}
        other = {"pg_name": "1", "pg_desc": "mesh_dp", "ranks": [rank]}
        content = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": NUM_RANKS, "pg_config": [group, other]},
            "host_name": "host",
            "traceEvents": [_annotation(rank, event) for event in events],
        }
        (directory / f"rank{rank}_trace.json").write_text(json.dumps(content))


def _annotation(rank: int, event: Event) -> dict[str, Any]:
    name = f"PP:{rank}{event.kind}{event.mb}"
    times = {"ts": event.start, "dur": event.end - event.start}
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 8, **times}


def write_ndtimeline(directory: Path, ranks: Ranks) -> None:
    """NDTimeline's Chrome traces, a file a rank."""
    names = {"F": "forward-compute", "B": "backward-compute"}
    for rank, events in enumerate(ranks):
        named = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "DP rank [0]"}},
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"PP rank {rank}, TP rank 0, compute"},
            },
        ]
        done = [
            {
                "ph": "X",
                "name": names[event.kind],
                "pid": 0,
                "tid": rank,
                "ts": event.start,
                "dur": event.end - event.start,
                "args": {"step": event.step, "model_chunk": 0, "mb_id": event.mb},
            }
            for event in events
        ]
        (directory / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [*named, *done]}))


def write_primus(directory: Path, ranks: Ranks) -> None:
    """Primus's files, a rank each; steps begin at 0."""
    config = {"pp_size": NUM_RANKS, "vp_size": 1, "num_mbs": 8, "dp_size": 1}
    (directory / "config.json").write_text(json.dumps(config))
    whole = run()[0]
    begin = [min(event.start for event in whole if event.step == step) for step in range(NUM_STEPS)]
    for rank, events in enumerate(ranks):
        steps = {}
        for step in sorted({event.step for event in events}):
            own = [event for event in events if event.step == step]
            content: dict[str, Any] = {"total": (max(e.end for e in whole if e.step == step) - begin[step]) / 1000}
            for kind, name in (("F", "fwd"), ("B", "bwd")):
                content[f"{name}_start"] = [(e.start - begin[step]) / 1000 for e in own if e.kind == kind]
                content[f"{name}_end"] = [(e.end - begin[step]) / 1000 for e in own if e.kind == kind]
            steps[str(step + 1)] = content
        (directory / f"pp_rank_{rank}.json").write_text(json.dumps(steps, indent=2))


def write_nsys(directory: Path, ranks: Ranks) -> None:
    """Exports of Nsight Systems with torch's names, a rank each."""
    for rank, events in enumerate(ranks):
        works = [
            Work(f"PP:{rank}{e.kind}{e.mb}", ((round(e.start * _NS), round(e.end * _NS), False, False),))
            for e in events
        ]
        path = directory / f"rank{rank}.sqlite"
        path.unlink(missing_ok=True)
        write_export(path, {rank: works})


WRITERS: dict[str, Callable[[Path, Ranks], None]] = {
    "kineto": write_kineto,
    "ndtimeline": write_ndtimeline,
    "primus": write_primus,
    "nsys": write_nsys,
}


def of_rank(directory: Path, rank: int) -> Path:
    """The file of a rank."""
    return next(path for path in sorted(directory.iterdir()) if str(rank) in path.name)


def changed(ranks: Ranks, rank: int, change: Callable[[Event], Iterable[Event]]) -> Ranks:
    """The run with each event of a rank replaced."""
    return [
        [new for event in events for new in (change(event) if at == rank else (event,))]
        for at, events in enumerate(ranks)
    ]
