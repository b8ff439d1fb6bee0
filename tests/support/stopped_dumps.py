"""Flight Recorder dumps of a run whose rank stops before a cell, of an executor of this file.

`use`      a host waits for each cell, and posts its receives just before it; each channel is a queue of its own
`planned`  a host waits for each cell, and issues messages in the order of the plan; a queue for each pair of ranks
`ahead`    the same, and hosts run ahead of their devices, as with NCCL
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.ir import Schedule
from treadle.ir.ops import RECEIVES, SENDS, LaneKind
from treadle.ir.program import Program
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder, issue_order
from treadle.recorder import find_hang

HOSTS = ("use", "planned", "ahead")
SIZES: dict[str, tuple[tuple[int, int | None, int], ...]] = {
    "gpipe": ((4, None, 8), (2, None, 4)),
    "1f1b": ((4, None, 8), (2, None, 4)),
    "interleaved": ((4, 2, 8), (2, 2, 4), (4, 3, 4), (3, 2, 6)),
    "interleaved-overlap": ((4, 2, 8), (2, 2, 4), (4, 3, 4), (3, 2, 6)),
    "zb-h1": ((4, None, 8), (2, None, 4)),
    "zb-v": ((4, None, 8), (2, None, 4), (3, None, 8)),
    "v-half": ((4, None, 8), (2, None, 4), (3, None, 8)),
    "v-min": ((4, None, 8), (2, None, 4), (3, None, 8)),
    "dualpipe": ((4, None, 8), (2, None, 4)),
    "dualpipev": ((4, None, 8), (2, None, 4), (3, None, 8)),
}
"""Ranks, chunks and micro-batches at which schedules are stopped, the first as large as a figure."""


class Stop(NamedTuple):
    """The rank that stops, the place of the cell that it never begins, and how messages go.

    Sends end when their receive has started, or, `eager`, as soon as they start.
    """

    rank: int
    place: int
    hosts: str = "use"
    eager: bool = False


def stops(schedule: Schedule) -> Iterator[Stop]:
    """Yield every rank with each of its cells, for each kind of hosts, with sends that wait and ones that do not."""
    program = lower_cells(schedule)
    for rank in range(schedule.pp):
        for place in range(len(cells_of(program, rank))):
            for hosts in HOSTS:
                yield Stop(rank, place, hosts, eager=False)
                yield Stop(rank, place, hosts, eager=True)


def cells_of(program: Program, rank: int) -> list[tuple[int, ...]]:
    """The cells of a rank in order: one op, or those of an overlapped pair."""
    lane = int(np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == LaneKind.COMPUTE))[0])
    rows: list[tuple[int, ...]] = []
    for op in range(int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])):
        if program.joined[op]:
            rows[-1] += (op,)
        else:
            rows.append((op,))
    return rows


class _Message(NamedTuple):
    is_send: bool
    src: int
    dst: int
    number: int
    """Of its channel, as the rank counts: what it meets has the same."""

    @property
    def met(self) -> _Message:
        return self._replace(is_send=not self.is_send)


class _Run:
    """One step, moved on until nothing moves."""

    def __init__(self, schedule: Schedule, stop: Stop) -> None:
        self.program, self.stop = lower_cells(schedule), stop
        order = None if stop.hosts == "use" else issue_order(schedule, self.program)
        self.rows = [self._items(order, rank) for rank in range(schedule.pp)]
        self.halt = self._halt()
        self.at = [0] * schedule.pp
        self.message: dict[int, _Message] = {}
        self.counts: Counter[tuple[bool, int, int]] = Counter()
        self.launched: list[list[int]] = [[] for _ in self.rows]
        self.after: dict[int, int] = {}
        """The last cell that was issued before an op."""
        self.queues: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.started: set[_Message] = set()
        self.ended: set[int] = set()

    def _items(self, order: IssueOrder | None, rank: int) -> list[tuple[int, ...]]:
        """What a host issues: messages, and cells of one op or two."""
        program, cells = self.program, cells_of(self.program, rank)
        if order is None:
            sends: dict[int, list[int]] = defaultdict(list)
            for op in np.flatnonzero(np.isin(program.kind, SENDS)).tolist():
                sends[int(program.deps(op)[0])].append(op)
            found = []
            for cell in cells:
                received = [dep for op in cell for dep in self._needs(op)]
                found += [(dep,) for dep in received] + [cell] + [(send,) for op in cell for send in sends[op]]
            return found
        whole = {cell[0]: cell for cell in cells}
        ops = order.op[int(order.ptr[rank]) : int(order.ptr[rank + 1])].tolist()
        return [whole.get(op, (op,)) for op in ops if not program.joined[op]]

    def _halt(self) -> int:
        """The item in front of which the host stops: receives that are posted for a cell come after it."""
        row, cell = self.rows[self.stop.rank], cells_of(self.program, self.stop.rank)[self.stop.place]
        posted = sum(len(self._needs(op)) for op in cell) if self.stop.hosts == "use" else 0
        return row.index(cell) - posted

    def _needs(self, op: int) -> list[int]:
        return [int(dep) for dep in self.program.deps(op) if dep >= 0 and self.program.kind[dep] in RECEIVES]

    def finish(self) -> _Run:
        """Move on until nothing moves."""
        while sum([self._issue(rank) for rank in range(len(self.rows))]) + self._devices():
            pass
        return self

    def _is_cell(self, op: int) -> bool:
        return bool(self.program.lane_kind[self.program.lane_of[op]] == LaneKind.COMPUTE)

    def _issue(self, rank: int) -> int:
        """Issue what a host comes to; return how many items."""
        begun, row = self.at[rank], self.rows[rank]
        while self.at[rank] < len(row):
            item = row[self.at[rank]]
            last = self.after.get(-1 - rank, -1)
            if (rank, self.at[rank]) == (self.stop.rank, self.halt):
                break
            if self.stop.hosts != "ahead" and last >= 0 and last not in self.ended:
                break
            for op in item:
                self.after[op] = last
                if not self._is_cell(op):
                    self._launch(rank, op)
            if self._is_cell(item[0]):
                self.queues[(rank,)] += item[:1]
                self.after[-1 - rank] = item[0]
            self.at[rank] += 1
        return self.at[rank] - begun

    def _launch(self, rank: int, op: int) -> None:
        is_send = bool(self.program.kind[op] in SENDS)
        peer = int(self.program.lane_peer[self.program.lane_of[op]])
        src, dst = (rank, peer) if is_send else (peer, rank)
        self.message[op] = _Message(is_send, src, dst, self.counts[is_send, src, dst])
        self.counts[is_send, src, dst] += 1
        self.launched[rank].append(op)
        pair = (rank, min(src, dst), max(src, dst))
        self.queues[(rank, src, dst, is_send) if self.stop.hosts == "use" else pair].append(op)

    def _devices(self) -> int:
        """End what can end; return how many ops."""
        before = len(self.ended) + len(self.started)
        for queue in self.queues.values():
            while queue and self._ends(queue[0]):
                self.ended.add(queue.pop(0))
        return len(self.ended) + len(self.started) - before

    def _ends(self, op: int) -> bool:
        if op not in self.message:
            joined = [op, *([op + 1] if op + 1 < self.program.num_ops and self.program.joined[op + 1] else [])]
            return all(need in self.ended for each in joined for need in self._needs(each))
        if self.after[op] >= 0 and self.after[op] not in self.ended:
            return False
        own = self.message[op]
        self.started.add(own)
        return (self.stop.eager and own.is_send) or own.met in self.started

    def state(self, op: int) -> str:
        """The state of a message in a dump."""
        return "completed" if op in self.ended else "scheduled"


def write_stopped(schedule: Schedule, stop: Stop, directory: Path) -> bool:
    """Run a step until nothing moves, and write its dumps; return whether a launched message has not ended."""
    run = _Run(schedule, stop).finish()
    for rank, ops in enumerate(run.launched):
        entries = []
        for place, op in enumerate(ops):
            is_send, src, dst, _ = run.message[op]
            entries.append(
                {
                    "record_id": place,
                    "profiling_name": f"nccl:send {src}->{dst}" if is_send else f"nccl:recv {dst}<-{src}",
                    "state": run.state(op),
                    "process_group": ["0", "default_pg"],
                    "p2p_seq_id": place + 1,
                    "op_id": place + 1,
                    "input_sizes": [[8, 8]],
                    "input_dtypes": ["Float"],
                }
            )
        config = {"0": {"ranks": str(list(range(schedule.pp)))}}
        content = {"version": "2.10", "pg_config": config, "entries": entries}
        (directory / f"trace_{rank}").write_text(json.dumps(content))
    return any(op not in run.ended for ops in run.launched for op in ops)


def verdict(schedule: Schedule, stop: Stop, directory: Path) -> tuple[str, str]:
    """Stop a rank in front of a cell, read the dumps as `treadle hang` does, and judge the rank that is named."""
    waits = write_stopped(schedule, stop, directory)
    (found,) = find_hang(directory, schedule).pipelines
    if found.at_fault == (stop.rank,):
        return "right", found.sentence
    if not found.at_fault and not waits:
        return "open", found.sentence
    apart = stop.rank in found.at_fault and "not to be told apart" in found.sentence
    return ("not to be told apart" if apart else "wrong"), found.sentence
