"""The order in which each rank's host issues its ops, of all lanes: what streams and shared communicators run in.

A file gives it, as torch's with messages do (`given`); a runtime's list of launches is it (`of_lists`); or it follows
from the schedule: `early`, one order over all messages, or `at_use`, each receive just before its reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from treadle.ir.execute import execute, leaders
from treadle.ir.ops import LaneKind, column
from treadle.ir.program import NEVER, Bools, Ints, Longs, Program
from treadle.ir.schedule import Schedule
from treadle.ir.turn import CELL, Turn, Verb
from treadle.passes.cells import ReceiveOrder
from treadle.passes.edges import launch_edges

_IS_RECV: Bools = column(lambda kind: kind.is_recv, np.bool_)
_IS_SEND: Bools = column(lambda kind: kind.is_send, np.bool_)


@dataclass(frozen=True, eq=False)
class IssueOrder:
    """For each rank what its host issues: items `ptr[r]` to `ptr[r + 1]`, each an op of the Program.

    `joined[i]`: the message is in one batch with the item before it. `waits[i]`: the item is no op but a wait of the
    compute stream, for the end of `op[i]`.
    """

    ptr: Longs
    op: Ints
    joined: Bools
    waits: Bools

    @classmethod
    def of_lists(cls, lists: Sequence[Ints]) -> IssueOrder:
        """Return the order of these ops, a list for each rank, as `host_order` gives it."""
        op = np.concatenate([np.asarray(ops, np.int32) for ops in lists])
        ptr = np.r_[0, np.cumsum([len(ops) for ops in lists])].astype(np.int64)
        return cls(ptr, op, np.zeros(len(op), bool), np.zeros(len(op), bool))

    @classmethod
    def early(cls, program: Program) -> IssueOrder | None:
        """Return one order over all messages: both ends issue one where it starts if messages take no time.

        It ends whatever channels share: each rank's is its part of one order over the step. Launch orders are kept.
        None if the program does not finish.
        """
        cells = ~(_IS_RECV | _IS_SEND)[program.kind]
        source, target = launch_edges(program)
        after = np.full(program.num_ops, NEVER, np.int32)
        after[target] = source
        times = execute(program, cells.astype(np.int64), after=after)
        return cls.sorted_by(program, times.start, cells, leaders(program)) if times.finished else None

    @classmethod
    def at_use(cls, program: Program) -> IssueOrder:
        """Return the order in which each receive is issued just before the cell that reads it, a send after its own."""
        turn = np.select([_IS_RECV[program.kind], _IS_SEND[program.kind]], [0, 2], 1)
        cell = np.where(program.cell == NEVER, np.iinfo(np.int32).max, program.cell)
        return cls.sorted_by(program, cell, turn, np.arange(program.num_ops))

    @classmethod
    def sorted_by(cls, program: Program, *keys: Ints | Longs | Bools) -> IssueOrder:
        """Return the order in which each rank issues its ops by the first key, then by the next."""
        rank = program.lane_rank[program.lane_of]
        order = np.lexsort((*keys[::-1], rank))
        ends = np.cumsum(np.bincount(rank, minlength=program.num_ranks))
        return cls.of_lists(np.split(order.astype(np.int32), ends[:-1]))

    @classmethod
    def given(cls, schedule: Schedule, program: Program) -> IssueOrder:
        """Return the order that a schedule gives; `program` is the schedule at the grain of cells.

        Raises:
            ValueError: the turns of a rank are not its cells and messages.

        """
        lanes = _lanes(program)
        items: list[list[tuple[int, bool, bool]]] = []
        for rank, turns in enumerate(schedule.issue):
            items.append(_Turns(rank, program, lanes).items(turns))
        columns = np.array([item for row in items for item in row], np.int32).reshape(-1, 3).T
        ptr = np.r_[0, np.cumsum([len(row) for row in items])].astype(np.int64)
        return cls(ptr, columns[0].copy(), columns[1].astype(bool), columns[2].astype(bool))

    def turns(self, program: Program) -> tuple[tuple[Turn, ...], ...]:
        """Return the order as a schedule gives it (`Schedule.issue`); `program` is at the grain of cells."""
        kind, peer = program.lane_kind[program.lane_of], program.lane_peer[program.lane_of]
        place = np.arange(program.num_ops) - program.lane_ptr[program.lane_of]
        rows: list[tuple[Turn, ...]] = []
        for start, stop in pairwise(self.ptr.tolist()):
            row = []
            for item in range(start, stop):
                op = int(self.op[item])
                if kind[op] == LaneKind.COMPUTE:
                    row += [CELL] if not program.joined[op] else []
                elif self.waits[item]:
                    row.append(Turn("wait>", int(peer[op]), place=int(place[op])))
                else:
                    verb: Verb = ">" if kind[op] == LaneKind.SEND else "<"
                    row.append(Turn(verb, int(peer[op]), bool(self.joined[item])))
            rows.append(tuple(row))
        return tuple(rows)

    @property
    def num_items(self) -> int:
        """Items over all ranks."""
        return len(self.op)

    @property
    def rank(self) -> Ints:
        """The rank of each item."""
        return np.repeat(np.arange(len(self.ptr) - 1, dtype=np.int32), np.diff(self.ptr))


def issue_order(schedule: Schedule, program: Program, *, receives: ReceiveOrder = "sender") -> IssueOrder | None:
    """Return the order that a schedule gives, or that follows from it; None if it does not finish anyhow."""
    if schedule.issue:
        return IssueOrder.given(schedule, program)
    return IssueOrder.early(program) if receives == "sender" else IssueOrder.at_use(program)


_Lanes: TypeAlias = dict[tuple[int, Verb, int], range]


def _lanes(program: Program) -> _Lanes:
    """The ops of each lane, by rank, verb and peer."""
    verbs: dict[int, Verb] = {LaneKind.COMPUTE: ".", LaneKind.SEND: ">", LaneKind.RECV: "<"}
    found = {}
    for index in range(program.num_lanes):
        lane = program.lane(index)
        ops = range(int(program.lane_ptr[index]), int(program.lane_ptr[index + 1]))
        found[lane.rank, verbs[lane.kind], lane.peer] = ops
    return found


class _Turns:
    """Gives the turns of a rank their ops: the next of its lane each."""

    def __init__(self, rank: int, program: Program, lanes: _Lanes) -> None:
        self.rank, self.program = rank, program
        self.lanes = {key[1:]: ops for key, ops in lanes.items() if key[0] == rank}
        self.next = dict.fromkeys(self.lanes, 0)

    def items(self, turns: Sequence[Turn]) -> list[tuple[int, bool, bool]]:
        found: list[tuple[int, bool, bool]] = []
        for verb, peer, joined, place in turns:
            if verb == "wait>":
                found.append((self._sent(peer, place), False, True))
                continue
            op = self._take(verb, peer)
            found.append((op, joined, False))
            if verb == ".":
                ops = self.lanes[".", -1]
                while self.next[".", -1] < len(ops) and self.program.joined[ops[self.next[".", -1]]]:
                    found.append((self._take(".", -1), False, False))
        for (verb, peer), ops in self.lanes.items():
            if self.next[verb, peer] < len(ops):
                raise self._error(verb, peer, self.next[verb, peer], len(ops))
        return found

    def _take(self, verb: Verb, peer: int) -> int:
        place = self.next.get((verb, peer), 0)
        ops = self.lanes.get((verb, peer), range(0))
        if place >= len(ops):
            raise self._error(verb, peer, place + 1, len(ops))
        self.next[verb, peer] = place + 1
        return ops[place]

    def _sent(self, peer: int, place: int) -> int:
        if place >= self.next.get((">", peer), 0):
            raise ValueError(
                f"rank {self.rank} waits for send {place} to rank {peer} before it issues it; move wait>{peer}:{place} "
                "after it, or leave it out"
            )
        return self.lanes[">", peer][place]

    def _error(self, verb: str, peer: int, got: int, wanted: int) -> ValueError:
        what = {".": "ops of its cells", ">": f"sends to rank {peer}", "<": f"receives from rank {peer}"}[verb]
        few = "only " if got < wanted else "at least "
        return ValueError(
            f"the order of issue of rank {self.rank} has {few}{got} {what}, and its row has {wanted}; give each once, "
            "or leave the order of issue out"
        )
