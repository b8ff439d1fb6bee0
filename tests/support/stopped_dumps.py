"""Flight Recorder dumps of a run whose rank stops before a cell: receives are posted just before their cell."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np

from treadle.ir import Schedule
from treadle.ir.ops import RECEIVES, SENDS, LaneKind
from treadle.ir.program import Program
from treadle.passes.cells import lower_cells


def cells_of(program: Program, rank: int) -> list[list[int]]:
    """The cells of a rank in order: one op, or those of an overlapped pair."""
    lane = int(np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == LaneKind.COMPUTE))[0])
    rows: list[list[int]] = []
    for op in range(int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])):
        if program.joined[op]:
            rows[-1].append(op)
        else:
            rows.append([op])
    return rows


def write_stopped(schedule: Schedule, stopped: tuple[int, int], directory: Path, *, eager: bool = False) -> str:
    """Run a step until nothing moves, with rank `stopped[0]` never in its cell `stopped[1]`; return that cell.

    Sends end when their receive is posted, or, `eager`, at once.
    """
    program = lower_cells(schedule)
    ranks = range(schedule.pp)
    rows = [cells_of(program, rank) for rank in ranks]
    sends: dict[int, list[int]] = {}
    for op in np.flatnonzero(np.isin(program.kind, SENDS)).tolist():
        sends.setdefault(int(program.deps(op)[0]), []).append(op)
    launched: dict[int, list[tuple[int, bool, int, int]]] = {rank: [] for rank in ranks}
    number: dict[int, int] = {}
    counts: Counter[tuple[bool, int, int]] = Counter()
    made: set[tuple[bool, int, int, int]] = set()

    def launch(rank: int, op: int) -> None:
        is_send = bool(program.kind[op] in SENDS)
        peer = int(program.lane_peer[program.lane_of[op]])
        src, dst = (rank, peer) if is_send else (peer, rank)
        number[op] = counts[is_send, src, dst]
        counts[is_send, src, dst] += 1
        made.add((is_send, src, dst, number[op]))
        launched[rank].append((op, is_send, src, dst))

    def has_ended(op: int, is_send: bool, src: int, dst: int) -> bool:
        return (eager and is_send) or (not is_send, src, dst, number[op]) in made

    at, posted, moved = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, -1), True
    while moved:
        moved = False
        for rank in ranks:
            while at[rank] < len(rows[rank]) and (rank, at[rank]) != stopped:
                cell = rows[rank][at[rank]]
                needs = [int(dep) for op in cell for dep in program.deps(op) if dep >= 0]
                received = [op for op in needs if program.kind[op] in RECEIVES]
                if posted[rank] < at[rank]:
                    posted[rank] = at[rank]
                    for op in received:
                        launch(rank, op)
                peers = {op: int(program.lane_peer[program.lane_of[op]]) for op in received}
                if not all((True, peers[op], rank, number[op]) in made for op in received):
                    break
                for op in cell:
                    for send in sends.get(op, ()):
                        launch(rank, send)
                at[rank] += 1
                moved = True
    for rank, messages in launched.items():
        entries = [
            {
                "record_id": place,
                "profiling_name": f"nccl:send {src}->{dst}" if is_send else f"nccl:recv {dst}<-{src}",
                "state": "completed"
                if (eager and is_send) or (not is_send, src, dst, number[op]) in made
                else "scheduled",
                "process_group": ["0", "default_pg"],
                "p2p_seq_id": place + 1,
                "op_id": place + 1,
                "input_sizes": [[8, 8]],
                "input_dtypes": ["Float"],
            }
            for place, (op, is_send, src, dst) in enumerate(messages)
        ]
        config = {"0": {"ranks": str(list(ranks))}}
        (directory / f"trace_{rank}").write_text(
            json.dumps({"version": "2.10", "pg_config": config, "entries": entries})
        )
    return str(program.op(rows[stopped[0]][stopped[1]][0]))
