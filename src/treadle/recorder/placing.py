"""Places the messages of a dump in the schedule: the k-th send of a channel is the k-th SEND of that channel.

A buffer that begins with the run is counted from there. One that has lost its beginning is placed by torch's own count
of the messages before it, modulo those of a step, and by the order of those that it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Program
from treadle.ir.schedule import Schedule
from treadle.passes.cells import ReceiveOrder, lower_cells
from treadle.passes.issue_order import IssueOrder, issue_order
from treadle.recorder.dump_file import ChannelEnd, RecorderEntry, State


@dataclass(frozen=True, eq=False)
class MatchedPlan:
    """The step of a schedule: its Program, the order in which each rank issues it, and the ops of each channel."""

    schedule: Schedule
    program: Program
    order: IssueOrder

    @classmethod
    def of(cls, schedule: Schedule, receives: ReceiveOrder = "sender") -> MatchedPlan:
        """Return the step of a schedule.

        Raises:
            ValueError: the schedule does not finish by itself.

        """
        program = lower_cells(schedule, receives=receives)
        order = issue_order(schedule, program, receives=receives)
        if order is None:
            raise ValueError(
                f"schedule {schedule.name!r} does not finish, whatever a run does; 'treadle verify' shows the circle"
            )
        return cls(schedule, program, order)

    @cached_property
    def channels(self) -> dict[ChannelEnd, range]:
        """The ops of each end of each channel, in order."""
        found = {}
        for index in range(self.program.num_lanes):
            lane = self.program.lane(index)
            if lane.kind in (LaneKind.SEND, LaneKind.RECV):
                is_send = lane.kind is LaneKind.SEND
                src, dst = (lane.rank, lane.peer) if is_send else (lane.peer, lane.rank)
                ops = range(int(self.program.lane_ptr[index]), int(self.program.lane_ptr[index + 1]))
                found[ChannelEnd(is_send, src, dst)] = ops
        return found

    def has_labels_of(self, other: MatchedPlan) -> bool:
        """Say whether each receive has the label that it has in another plan of this schedule."""
        one, two = self.program, other.program
        return all(np.array_equal(a, b) for a, b in ((one.kind, two.kind), (one.mb, two.mb), (one.chunk, two.chunk)))

    @cached_property
    def ends(self) -> dict[int, ChannelEnd]:
        """The end of its channel that each message is at."""
        return {op: end for end, ops in self.channels.items() for op in ops}

    @cached_property
    def rows(self) -> list[list[int]]:
        """For each rank the ops that its host issues, in order, without waits."""
        order = self.order
        return [
            [int(order.op[item]) for item in range(first, last) if not order.waits[item]]
            for first, last in pairwise(order.ptr.tolist())
        ]

    def messages(self, rank: int) -> list[int]:
        """Return the messages of a rank in the order of issue."""
        return [op for op in self.rows[rank] if op in self.ends]


class PlacedMessage(NamedTuple):
    """A launched message: which op of which step, and the number of its batch, or NEVER."""

    step: int
    op: int
    state: State
    batch: int


@dataclass(frozen=True)
class PlacedRank:
    """The messages that a rank launched, in order; for each end of a channel the place after the last, from 0 on.

    `strange` are those on channels that the schedule does not have.
    """

    rank: int
    messages: tuple[PlacedMessage, ...]
    launched: Mapping[ChannelEnd, int]
    completed: Mapping[ChannelEnd, int]
    strange: tuple[ChannelEnd, ...] = ()
    from_start: bool = True


def place(step: MatchedPlan, rank: int, entries: Sequence[RecorderEntry]) -> PlacedRank | None:
    """Place the messages of a rank; None if the buffer begins somewhere in a step and nothing shows where.

    Args:
        step: the schedule's.
        rank: of the pipeline.
        entries: those of the pipeline's group.

    """
    sent = [entry for entry in entries if entry.message is not None and not entry.is_object]
    known = [entry for entry in sent if entry.message in step.channels]
    for message in (entry.message for entry in known if entry.message is not None):
        if _holder(message) != rank:
            raise ValueError(
                f"the dump of rank {rank} of the pipeline has messages of rank {_holder(message)}: its file was "
                "renamed, or is numbered by node; name each file by its rank in the run, as torch does"
            )
    strange = tuple(entry.message for entry in sent if entry.message is not None and entry.message not in step.channels)
    before = _num_before(entries)
    next_place = dict.fromkeys((end for end in step.channels if _holder(end) == rank), 0)
    if before and known:
        if (begun := _begun(step, rank, known, before)) is None:
            return None
        next_place = begun
    completed = dict(next_place)
    messages, numbers = [], dict[tuple[int, int], int]()
    for entry in known:
        end = entry.message
        assert end is not None
        ops = step.channels[end]
        batch = numbers.setdefault((entry.p2p_seq_id, 0), len(numbers)) if entry.in_batch else NEVER
        number, turn = divmod(next_place[end], len(ops))
        messages.append(PlacedMessage(number, ops[turn], entry.state, batch))
        next_place[end] += 1
        if entry.state == "completed" and completed[end] == next_place[end] - 1:
            completed[end] += 1
    return PlacedRank(rank, tuple(messages), next_place, completed, strange, from_start=not before)


def _holder(end: ChannelEnd) -> int:
    return end.src if end.is_send else end.dst


def _num_before(entries: Sequence[RecorderEntry]) -> int:
    """Messages that the group had launched before its first entry, by torch's counts."""
    first = next((entry for entry in entries if entry.message is not None), None)
    if first is None:
        return 0
    batched = any(entry.in_batch for entry in entries)
    return max(0, (first.op_id if batched else first.p2p_seq_id) - 1)


def _begun(step: MatchedPlan, rank: int, sent: Sequence[RecorderEntry], before: int) -> dict[ChannelEnd, int] | None:
    """The places of a buffer's first messages, where `before` others stood before them."""
    seen = [entry.message for entry in sent if entry.message is not None]
    planned = [step.ends[op] for op in step.messages(rank)]
    num = len(planned)
    cycle, fitting = planned, [start for start in range(num) if _fits(planned, seen, start)]
    own = _own_order(seen, before, num)
    if before % num in fitting:
        start = before % num
    elif own is not None and Counter(own) == Counter(planned):
        cycle, start = own, before % num
    elif len(fitting) == 1:  # torch counts messages that set up the pipeline too
        start = fitting[0]
    else:
        return None
    whole, passed = (before - start) // num, Counter(cycle[:start])
    return {end: whole * len(step.channels[end]) + passed[end] for end in set(planned)}


def _fits(planned: Sequence[ChannelEnd], seen: Sequence[ChannelEnd], start: int) -> bool:
    return all(planned[(start + place) % len(planned)] == end for place, end in enumerate(seen))


def _own_order(seen: Sequence[ChannelEnd], before: int, num: int) -> list[ChannelEnd] | None:
    """The order of a step as the buffer itself shows it, where it has a whole one and repeats."""
    first = -before % num
    if len(seen) < num or any(seen[place] != seen[place + num] for place in range(len(seen) - num)):
        return None
    return [seen[(first + turn) % num] for turn in range(num)]
