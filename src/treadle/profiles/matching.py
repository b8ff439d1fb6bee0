"""Marks -> times of ops: each op of a Program gets the start and end of the mark with its label, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treadle.ir.crossings import crossings
from treadle.ir.ops import ACTIONS, MESSAGES, SENDS, OpKind
from treadle.ir.placement import Placement
from treadle.ir.program import Bools, Longs, Program
from treadle.passes.measured import TAIL
from treadle.profiles.clocks import Aligned, align, order_of
from treadle.profiles.fill_labels import occurrences
from treadle.profiles.mesh_places import RankGrid
from treadle.profiles.recording import UNKNOWN, RankRecording, Remark

_WAITED_NS = 50_000
"""A cell that starts earlier than its input was made by less than this was timed a little off; more, and it waited."""


_HOST_SHARE = 0.25
"""Of a computation's time, what a host takes at most from the end of one to finding the message of the next."""


class OpTimes(NamedTuple):
    """`start[step, op]`, `end[step, op]` of the steps that are whole; what is said about marks and ops without one."""

    steps: tuple[int, ...]
    start: Longs
    end: Longs
    remarks: tuple[Remark, ...]


def match(program: Program, grid: RankGrid, steps: Sequence[int], *, waits_inside: bool = False) -> OpTimes:
    """Give each op the times of its mark; a message without a mark is taken to leave when it was made, in no time.

    Raises:
        ValueError: in no step all ops but messages were recorded.

    """
    start, end = (np.full((len(steps), program.num_ops), UNKNOWN, np.int64) for _ in range(2))
    measured = np.zeros((len(steps), program.num_ops), bool)
    index, numbers = _OpIndex(program), np.asarray(steps)
    remarks = []
    for p, row in enumerate(grid):
        for d, rank in enumerate(row):
            op = index.find(rank, p * len(row) + d)
            at = np.searchsorted(numbers, rank.step)
            inside = numbers[np.minimum(at, len(numbers) - 1)] == rank.step
            lost = np.unique(rank.kind[inside & (op < 0)]).tolist()
            if lost:
                kinds = ", ".join(OpKind(kind).name for kind in lost)
                num = int((inside & (op < 0)).sum())
                remarks.append(Remark(f"a mark of {kinds} is of no op of the schedule, and not used", rank.source, num))
            used = inside & (op >= 0)
            at, op = at[used], op[used]
            start[at, op], end[at, op], measured[at, op] = rank.start[used], rank.end[used], True
    moved = np.isin(program.kind, MESSAGES)
    whole = measured[:, ~moved].all(axis=1)
    for step in np.flatnonzero(~whole):
        first = program.op(int(np.flatnonzero(~measured[step] & ~moved)[0]))
        reason = f"step {numbers[step]} is left out: {first} of rank {first.lane.rank} was not recorded in it"
        remarks.append(Remark(reason))
    if not whole.any():
        raise ValueError(f"no step was recorded whole: {remarks[-1]}")
    start, end, measured = start[whole], end[whole], measured[whole]
    clocks = [rank.clock for row in grid for rank in row]
    backwards = measured & (end < start)
    if backwards.any():
        reason = "a mark ends before it starts, and is taken to take no time"
        remarks.append(Remark(reason, times=int(backwards.sum())))
        end = np.where(backwards, start, end)
    known: Bools = np.logical_and.reduce(measured)
    order = order_of(program, start, end, known, waits_inside=waits_inside)
    aligned = align(order, clocks, len(start))
    remarks += aligned.remarks
    offset = aligned.offset + _begun_together(program, start, measured, aligned)
    start, end = (times + offset[:, program.lane_rank[program.lane_of]] for times in (start, end))
    begins = start[:, ~moved].min(axis=1, keepdims=True)  # a receive may be posted while the data loader works
    start, end = (np.where(measured, np.maximum(times, begins), times) for times in (start, end))
    without = ~measured & moved
    if without.any():
        all_of_them = without[:, moved].all()
        what = "messages were not recorded; they" if all_of_them else "some messages were not recorded; these"
        remarks.append(Remark(f"{what} are taken to leave when they are made, and to take no time"))
        _invent(program, start, end, without)
    if waits_inside:
        _arrive_before_found(program, start, end, measured)
    num_waited = _begin_with_input(program, start, end)
    if num_waited:
        reason = "ranges began before their input had been sent: they are taken to begin then"
        remarks.append(Remark(reason, times=num_waited))
    return OpTimes(tuple(numbers[whole].tolist()), start, end, tuple(remarks))


def _begun_together(program: Program, start: Longs, measured: Bools, aligned: Aligned) -> Longs:
    """`[step, rank]`: what makes the clocks that no message links show the same time when a step begins."""
    rank = program.lane_rank[program.lane_of]
    shown = np.where(measured, start + aligned.offset[:, rank], np.iinfo(np.int64).max)
    more = np.zeros_like(aligned.offset)
    apart = np.concatenate(aligned.apart or (np.empty(0, np.int32),))
    for ranks in aligned.apart:
        own, first = np.isin(rank, ranks), ~np.isin(rank, apart)
        more[:, ranks] = (shown[:, first].min(axis=1) - shown[:, own].min(axis=1))[:, None]
    return more


class _OpIndex:
    """Ops by rank and label."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rank = program.lane_rank[program.lane_of].astype(np.int64)
        labels = (program.kind, program.mb, program.chunk)
        key = self._keys(self.rank, *(column.astype(np.int64) for column in labels))
        self.order = np.argsort(key, kind="stable")
        self.sorted = key[self.order]

    def _keys(self, rank: Longs | int, kind: Longs, mb: Longs, chunk: Longs) -> Longs:
        layout = self.program.layout
        key: Longs = ((rank * 64 + kind) * (layout.num_microbatches + 1) + mb + 1) * layout.placement.vpp + chunk
        return key

    def find(self, rank: RankRecording, number: int) -> Longs:
        """The op of each of a rank's marks, or -1."""
        chunk = rank.chunk.astype(np.int64)
        sends = np.isin(rank.kind, SENDS) & (rank.stage != UNKNOWN)
        chunk[sends] = self._readers_chunk(rank, sends)
        op = np.full(len(rank), -1, np.int64)
        by_label = np.flatnonzero((rank.mb != UNKNOWN) & (chunk >= 0))
        kind, mb = rank.kind[by_label].astype(np.int64), rank.mb[by_label].astype(np.int64)
        key = self._keys(number, kind, mb, chunk[by_label])
        place = np.minimum(np.searchsorted(self.sorted, key), len(self.sorted) - 1)
        op[by_label] = np.where(self.sorted[place] == key, self.order[place], -1)
        for without in (*MESSAGES, *TAIL):
            marks = np.flatnonzero((rank.kind == without) & (rank.mb == UNKNOWN))
            ops = np.flatnonzero((self.rank == number) & (self.program.kind == without))
            ops = ops[np.argsort(self.program.cell[ops], kind="stable")]
            k = occurrences(rank.step[marks].astype(np.int64))
            inside = k < len(ops)
            op[marks[inside]] = ops[k[inside]]
        return op

    def _readers_chunk(self, rank: RankRecording, sends: Bools) -> Longs:
        """A send is named by the stage that makes the message, its op by the chunk that reads it."""
        placement: Placement = self.program.layout.placement
        chunk_of = np.full(placement.num_stages + 2, -1, np.int64)  # entry s + 1 is of stage s
        for stage in range(placement.num_stages):
            chunk_of[stage + 1] = placement.holder(stage)[1]
        forward = rank.kind[sends] == OpKind.SEND_F
        reader: Longs = chunk_of[np.clip(rank.stage[sends] + np.where(forward, 2, 0), 0, placement.num_stages + 1)]
        return reader


def _invent(program: Program, start: Longs, end: Longs, without: Bools) -> None:
    """Messages that were not recorded: a send is done when its maker ends, its receive then too."""
    found = crossings(program)
    for ops, at in ((found.send, found.maker), (found.recv, found.send)):
        lost = without[:, ops]
        for times in (start, end):
            times[:, ops] = np.where(lost, end[:, at], times[:, ops])


def _arrive_before_found(program: Program, start: Longs, end: Longs, measured: Bools) -> None:
    """A receive that a rank found only when it was free is taken to have come as soon as others do.

    Where the rank waited, the receive ended when the message came; what those took, the others take at most.
    """
    found = crossings(program)
    opens = np.where(program.joined, 0, np.arange(program.num_ops))  # of an overlapped pair its first op
    reader = np.maximum.accumulate(opens)[found.reader]
    first = np.isin(reader, program.lane_ptr)
    free = np.where(first, np.iinfo(np.int64).min, end[:, np.maximum(reader - 1, 0)])
    sent = np.maximum(start[:, found.send], start[:, found.recv])
    took, known = end[:, found.recv] - sent, measured[:, found.send] & measured[:, found.recv]
    computed = float(np.median((end - start)[:, np.isin(program.kind, ACTIONS)]))
    late_found = np.maximum(free, start[:, found.recv]) + _HOST_SHARE * computed < end[:, found.recv]
    waited = ((end[:, found.maker] > free) | late_found) & known
    usual = int(np.median(took[waited])) if waited.any() else 0
    late = known & ~waited & (took > usual)
    end[:, found.recv] = np.where(late, np.maximum(sent + usual, start[:, found.recv]), end[:, found.recv])


def _begin_with_input(program: Program, start: Longs, end: Longs) -> int:
    """A range that includes the wait for its message begins when that had been made. Returns how many did."""
    found = crossings(program)
    made = end[:, found.maker]
    late = (made > start[:, found.reader] + _WAITED_NS) & (made < end[:, found.reader])
    start[:, found.reader] = np.where(late, made, start[:, found.reader])
    return int(late.sum())
