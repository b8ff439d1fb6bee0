"""The order of issue in which each receive is as late as one communicator for each pair of ranks allows.

A pair's messages run one after the other, in the same order at both ends: that of `torch_turns`, as each send stays
next to the cell that makes it. What is free is how many cells a rank issues before a receive. The message then starts
after all of them (docs/reference/semantics.md, "Shared communicators"), so a step ends as long as none of them needs
the message, through whatever other ranks do. Receives are moved one after the other, from the end of the step to its
beginning; the nodes stay sorted, so that each search looks at what lies between a message and its reader only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from treadle.ir.kernel import inlined, kernel
from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Ints, Longs, Program
from treadle.passes.edges import need_edges
from treadle.passes.issue_order import IssueOrder


class _Nodes(NamedTuple):
    """Cells and messages, numbered so that each comes after what it waits for; NEVER stands for none.

    before, after       of a cell: those of its rank; of a message: those of its pair
    sender, receiver    of a message: the last cell that its sender, its receiver issues before it
    place, rank         of a cell: its place in its row; of a message: NEVER, and the rank that receives
    ptr, read           the messages that a cell reads: `read[ptr[n]]` to `read[ptr[n + 1]]`
    first               of a rank: its first cell
    """

    before: Ints
    after: Ints
    sender: Ints
    receiver: Ints
    place: Ints
    rank: Ints
    ptr: Longs
    read: Ints
    first: Ints


def late_receives(program: Program, turns: Ints) -> IssueOrder:
    """Return the order in which no receive could be later alone.

    Args:
        program: at the grain of cells.
        turns: one order over the step, as `torch_turns` gives it: the place of each op's cell or message.

    """
    nodes = _nodes(program, turns)
    _move(nodes)
    lane = program.lane_kind[program.lane_of]
    ends = [nodes.receiver[turns], nodes.sender[turns]]
    cell = np.select([lane == LaneKind.RECV, lane == LaneKind.SEND], ends, turns)
    index = np.where(cell == NEVER, NEVER, nodes.place[cell])
    return IssueOrder.sorted_by(program, index, lane != LaneKind.COMPUTE, turns)


def _nodes(program: Program, turns: Ints) -> _Nodes:
    op = np.unique(turns, return_index=True)[1]
    num, ranks = len(op), program.num_ranks
    kinds = program.lane_kind[program.lane_of]
    lane = program.lane_of[op]
    rank, peer = program.lane_rank[lane], program.lane_peer[lane]
    is_cell = program.lane_kind[lane] == LaneKind.COMPUTE
    pair = ranks + np.minimum(rank, peer) * ranks + np.maximum(rank, peer)
    before, after = _neighbours(np.where(is_cell, rank, pair))

    sender, receiver = np.full(num, NEVER, np.int32), np.full(num, NEVER, np.int32)
    sends, receives = np.flatnonzero(kinds == LaneKind.SEND), np.flatnonzero(kinds == LaneKind.RECV)
    last = _last_cells(program, turns)
    sender[turns[sends]], receiver[turns[receives]] = last[sends], last[receives]
    rank[turns[receives]] = program.lane_rank[program.lane_of[receives]]

    cells = np.flatnonzero(is_cell)
    cells = cells[np.argsort(rank[cells], kind="stable")]
    first = np.searchsorted(rank[cells], np.arange(ranks))
    place = np.full(num, NEVER, np.int32)
    place[cells] = np.arange(len(cells)) - first[rank[cells]]

    source, target = need_edges(program)
    reads = kinds[source] == LaneKind.RECV
    source, target = turns[source[reads]], turns[target[reads]]
    ptr = np.r_[0, np.cumsum(np.bincount(target, minlength=len(op)))].astype(np.int64)
    read = source[np.argsort(target, kind="stable")]
    return _Nodes(before, after, sender, receiver, place, rank, ptr, read, cells[first].astype(np.int32))


def _last_cells(program: Program, turns: Ints) -> Ints:
    """Return for each op the last cell that its rank issues before it, or NEVER."""
    order = IssueOrder.sorted_by(program, turns)
    computes = program.lane_kind[program.lane_of[order.op]] == LaneKind.COMPUTE
    item = np.maximum.accumulate(np.where(computes, np.arange(order.num_items), NEVER))
    found = np.full(program.num_ops, NEVER, np.int32)
    found[order.op] = np.where(item >= order.ptr[order.rank], turns[order.op[item]], NEVER)
    return found


def _neighbours(chain: Ints) -> tuple[Ints, Ints]:
    """The one before and the one after each in its chain, or NEVER."""
    order = np.argsort(chain, kind="stable").astype(np.int32)
    same = np.diff(chain[order]) == 0
    before, after = (np.full(len(chain), NEVER, np.int32) for _ in range(2))
    before[order[1:][same]] = order[:-1][same]
    after[order[:-1][same]] = order[1:][same]
    return before, after


@kernel
def _move(nodes: _Nodes) -> None:
    """Set `receiver` of each message to the last cell that its rank may issue before the receive."""
    num = len(nodes.place)
    order, turn, aside = np.arange(num), np.arange(num), np.empty(num, np.int64)
    seen, stack = np.zeros(num, np.int64), np.empty(5 * num + 5, np.int64)
    mark = 0
    for message in range(num - 1, -1, -1):
        if nodes.place[message] >= 0:
            continue
        rank, following = nodes.rank[message], nodes.after[message]
        limit = num
        if following >= 0:  # the next message of the pair is not issued earlier
            end = nodes.receiver[following] if nodes.rank[following] == rank else nodes.sender[following]
            limit = nodes.place[end] if end >= 0 else -1
        least = good = mark + 1
        best = nodes.receiver[message]
        cell = nodes.after[best] if best >= 0 else nodes.first[rank]
        while cell >= 0 and nodes.place[cell] <= limit:
            mark += 1
            if _waits_for(nodes, cell, message, turn, seen, least, mark, stack):
                break
            best, good = cell, mark
            cell = nodes.after[cell]
        if best >= 0 and best != nodes.receiver[message]:
            nodes.receiver[message] = best
            _sort(order, turn, seen, aside, message, best, least, good)


@inlined
def _waits_for(
    nodes: _Nodes, cell: int, message: int, turn: Longs, seen: Longs, least: int, mark: int, stack: Longs
) -> bool:
    """Search what a cell waits for, back to the turn of `message`; nodes seen since `least` do not wait for it."""
    stack[0], count = cell, 1
    while count:
        count -= 1
        node = stack[count]
        if node == message:
            return True
        if node < 0 or turn[node] < turn[message] or seen[node] >= least:
            continue
        seen[node] = mark
        stack[count] = nodes.before[node]
        count += 1
        if nodes.place[node] < 0:
            stack[count], stack[count + 1] = nodes.sender[node], nodes.receiver[node]
            count += 2
        for at in range(nodes.ptr[node], nodes.ptr[node + 1]):
            stack[count] = nodes.read[at]
            count += 1
    return False


@inlined
def _sort(order: Longs, turn: Longs, seen: Longs, aside: Longs, message: int, cell: int, least: int, good: int) -> None:
    """Put a cell and what it waits for, which was seen from `least` to `good`, before the message."""
    low, high = turn[message], turn[cell]
    count, held = low, 0
    for at in range(low, high + 1):
        node = order[at]
        if least <= seen[node] <= good:
            order[count] = node
            turn[node] = count
            count += 1
        else:
            aside[held] = node
            held += 1
    for at in range(held):
        order[count + at] = aside[at]
        turn[aside[at]] = count + at
