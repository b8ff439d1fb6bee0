"""Schedule -> Program at the grain of cells: one op an action, and a send and a receive for each message.

Sends leave in the order their actions run. Receives are posted in the sender's order, or in the order of use,
or as the schedule itself lists for a channel. The order of use is what a naive runtime does, and what goes wrong
on channels without tags as soon as messages overtake each other (zb-v, dualpipe, dualpipev).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.action import Kind
from treadle.ir.dependency import RULE, Need
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Bools, Ints, Layout, Longs, Program
from treadle.ir.schedule import Actions, Schedule
from treadle.passes.append import LaneColumns, add_waits, append_lanes

ReceiveOrder: TypeAlias = Literal["sender", "use"]

_FORWARD, _GRADIENT = int(Kind.F), int(Kind.B)  # what a message carries: an activation or a gradient


@dataclass(frozen=True)
class _Messages:
    """One side of all channels: which action makes or reads each message, and its label."""

    action: Ints
    channel: Ints
    what: Ints
    mb: Ints
    chunk: Ints

    def __getitem__(self, order: npt.NDArray[np.intp] | Bools) -> _Messages:
        columns = (self.action, self.channel, self.what, self.mb, self.chunk)
        return _Messages(*(column[order] for column in columns))

    def keys(self, num_mb: int, num_chunks: int) -> Longs:
        """A number for each (channel, label)."""
        key = self.channel.astype(np.int64) * 2 + self.what
        return (key * num_mb + self.mb) * num_chunks + self.chunk


def lower_cells(schedule: Schedule, *, receives: ReceiveOrder = "sender") -> Program:
    """The Program of a schedule at the grain of cells."""
    if receives not in ("sender", "use"):
        raise ValueError(f"receives are posted in the order of the sender or of use, got {receives!r}")
    actions = schedule.columns
    edges = _Edges(schedule, actions)
    sends = _stable(edges.sends(), key="channel")
    readers = _stable(edges.reads(), key="channel")
    posted = _receive_order(schedule, sends, readers, receives)
    return _assemble(schedule, actions, edges, sends, readers, posted)


class _Edges:
    """The dependency rule over columns: for each need of each action, who fills it, here or through a message."""

    def __init__(self, schedule: Schedule, actions: Actions) -> None:
        self.schedule, self.actions = schedule, actions
        placement = schedule.placement
        self.num_stages, self.pp = placement.num_stages, placement.pp
        shape = (placement.num_pipes, self.num_stages)
        self.holder_rank, self.holder_chunk = np.empty(shape, np.int32), np.empty(shape, np.int32)
        for pipe, stage in np.ndindex(shape):
            self.holder_rank[pipe, stage], self.holder_chunk[pipe, stage] = placement.holder(stage, pipe)
        self._locals: list[tuple[Ints, Ints]] = []
        self._reads: list[_Messages] = []
        self._sends: list[_Messages] = []
        first = self._first_of_each()
        for kind, rule in RULE.items():
            for need in rule:
                self._read(kind, need, first)
        for need in sorted({need for rule in RULE.values() for need in rule if need.step != 0}):
            self._send(need)

    def _first_of_each(self) -> npt.NDArray[np.int32]:
        """`[kind, pipe, stage, mb]` -> the first action that is it, or NEVER."""
        a = self.actions
        shape = (len(Kind), self.schedule.placement.num_pipes, self.num_stages)
        table = np.full((*shape, self.schedule.microbatches_per_pipe), NEVER, dtype=np.int32)
        real = np.flatnonzero(a.stage >= 0)[::-1]  # backwards, so that the first one is what stays
        table[a.kind[real], a.pipe[real], a.stage[real], a.mb[real]] = real
        return table

    def _read(self, kind: Kind, need: Need, first: npt.NDArray[np.int32]) -> None:
        """Who of this kind has this need: filled by an action of the same rank, or read from a message."""
        a = self.actions
        who, pipe, stage = self._along(a.kind == kind, need.step)
        peer = self.holder_rank[pipe, stage]
        here = peer == a.rank[who]
        offers = first[list(need.kinds)][:, pipe[here], stage[here], a.mb[who[here]]]
        filled = np.where(offers == NEVER, len(a), offers).min(axis=0)
        self._locals.append((who[here].astype(np.int32), np.where(filled == len(a), NEVER, filled)))
        away = who[~here]
        self._reads.append(self._messages(away, peer[~here], a.rank[away], need, a.chunk[away]))

    def _send(self, need: Need) -> None:
        """Who fills this need sends it as many stages against its direction."""
        a = self.actions
        makers, pipe, stage = self._along(np.isin(a.kind, need.kinds), -need.step)
        peer = self.holder_rank[pipe, stage]
        away = peer != a.rank[makers]
        makers, chunk = makers[away], self.holder_chunk[pipe, stage][away]
        self._sends.append(self._messages(makers, a.rank[makers], peer[away], need, chunk))

    def _along(self, chosen: Bools, step: int) -> tuple[npt.NDArray[np.intp], Ints, Ints]:
        """The chosen actions that have a stage `step` further, and its pipe and number."""
        a = self.actions
        target = a.stage + step
        inside = (a.stage >= 0) & (target >= 0) & (target < self.num_stages)
        who = np.flatnonzero(chosen & inside)
        return who, a.pipe[who], target[who]

    def _messages(self, action: npt.NDArray[np.intp], src: Ints, dst: Ints, need: Need, chunk: Ints) -> _Messages:
        channel = src * self.pp + dst
        what = np.full(len(action), _FORWARD if need.kinds == (Kind.F,) else _GRADIENT, np.int32)
        return _Messages(action.astype(np.int32), channel, what, self.actions.mb[action], chunk)

    def locals(self) -> tuple[Ints, Ints]:
        """(action, the action of the same rank that fills its need, or NEVER)."""
        who, filled = zip(*self._locals, strict=True)
        return np.concatenate(who), np.concatenate(filled)

    def reads(self) -> _Messages:
        """The messages that are read from other ranks."""
        return _concatenate(self._reads)

    def sends(self) -> _Messages:
        """The messages that are made for other ranks."""
        return _concatenate(self._sends)


def _concatenate(parts: list[_Messages]) -> _Messages:
    columns = ("action", "channel", "what", "mb", "chunk")
    return _Messages(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _stable(messages: _Messages, *, key: Literal["channel"]) -> _Messages:
    """Channel by channel, in the order of their actions."""
    return messages[np.lexsort((messages.action, getattr(messages, key)))]


def _occurrence(key: Longs) -> Longs:
    """Count for each entry the entries before it with the same key."""
    order = np.argsort(key, kind="stable")
    position = np.arange(len(key))
    starts = np.r_[True, np.diff(key[order]) != 0] if len(key) else np.empty(0, bool)
    count = np.empty(len(key), np.int64)
    count[order] = position - np.maximum.accumulate(np.where(starts, position, 0)) if len(key) else 0
    return count


def _match_by_label(wanted: _Messages, offered: _Messages, size: tuple[int, int]) -> Ints:
    """Return for the j-th `wanted` of a label the index of the j-th `offered` of it, or NEVER."""
    have, want = offered.keys(*size), wanted.keys(*size)
    have_nth, want_nth = _occurrence(have), _occurrence(want)
    width = 1 + max(int(have_nth.max(initial=0)), int(want_nth.max(initial=0)))
    have, want = have * width + have_nth, want * width + want_nth
    order = np.argsort(have)
    at = np.searchsorted(have[order], want)
    inside = at < len(have)
    found = np.full(len(want), NEVER, np.int32)
    candidates = order[at[inside]]
    found[inside] = np.where(have[candidates] == want[inside], candidates, NEVER)
    return found


def _label_size(*messages: _Messages) -> tuple[int, int]:
    mb = 1 + max(int(m.mb.max(initial=0)) for m in messages)
    chunk = 1 + max(int(m.chunk.max(initial=0)) for m in messages)
    return mb, chunk


def _receive_order(schedule: Schedule, sends: _Messages, readers: _Messages, order: ReceiveOrder) -> _Messages:
    """The receives that are posted, channel by channel, in order."""
    posted = readers
    if order == "sender":
        place = _match_by_label(readers, sends, _label_size(readers, sends))
        late = np.where(place == NEVER, len(sends.action), place)  # never sent: last, in the order of use
        posted = readers[np.lexsort((late, readers.channel))]
    for (src, dst), labels in schedule.receives.items():
        channel = src * schedule.pp + dst
        what = [(NEVER, channel, _FORWARD if x.kind is Kind.F else _GRADIENT, x.mb, x.chunk) for x in labels]
        columns = np.array(what, dtype=np.int32).reshape(-1, 5).T
        posted = _concatenate([posted[posted.channel != channel], _Messages(*columns)])
    return posted[np.argsort(posted.channel, kind="stable")]


def _assemble(
    schedule: Schedule,
    actions: Actions,
    edges: _Edges,
    sends: _Messages,
    readers: _Messages,
    posted: _Messages,
) -> Program:
    """Put the lanes in a row: every rank's compute, then each channel's two ends."""
    pp, first_send = schedule.pp, len(actions)
    first_recv = first_send + len(sends.action)
    channels = np.union1d(sends.channel, posted.channel)
    send_ptr = first_send + np.searchsorted(sends.channel, channels)
    recv_ptr = first_recv + np.searchsorted(posted.channel, channels)
    src, dst, ranks = channels // pp, channels % pp, np.arange(pp)
    lane_rank = np.concatenate([ranks, src, dst]).astype(np.int32)
    lane_peer = np.concatenate([np.full(pp, NEVER), dst, src]).astype(np.int32)
    kinds = (LaneKind.COMPUTE, LaneKind.SEND, LaneKind.RECV)
    lane_kind = np.repeat(np.array(kinds, np.uint8), [pp, len(channels), len(channels)])
    lane_group = np.concatenate([np.full(pp, NEVER), np.arange(len(channels)), np.arange(len(channels))])
    total = first_recv + len(posted.action)

    who, filled = edges.locals()
    read_from = _match_by_label(readers, posted, _label_size(readers, posted))
    consumer = np.concatenate([who, readers.action, np.arange(first_send, first_recv, dtype=np.int32)])
    producer = np.concatenate([filled, np.where(read_from == NEVER, NEVER, read_from + first_recv), sends.action])
    posted_cell = np.full(len(posted.action), NEVER, np.int32)
    read = read_from != NEVER
    posted_cell[read_from[read]] = actions.cell[readers.action[read]]
    kind = np.concatenate([actions.kind, sends.what + OpKind.SEND_F, posted.what + OpKind.RECV_F])
    lane_ptr = np.r_[np.searchsorted(actions.rank, ranks), send_ptr, recv_ptr, total]
    lanes = LaneColumns(
        kind=kind.astype(np.uint8),
        mb=np.concatenate([actions.mb, sends.mb, posted.mb]),
        chunk=np.concatenate([actions.chunk, sends.chunk, posted.chunk]).astype(np.int16),
        layer=np.zeros(total, np.int16),
        cell=np.concatenate([actions.cell, actions.cell[sends.action], posted_cell]),
        num_ops=np.diff(lane_ptr),
        rank=lane_rank,
        lane=lane_kind,
        peer=lane_peer,
        group=lane_group.astype(np.int32),
    )
    program = append_lanes(Program.empty(_layout(schedule)), [lanes])
    program = replace(program, joined=np.concatenate([actions.joined, np.zeros(total - first_send, bool)]))
    return add_waits(program, consumer, producer)


def _layout(schedule: Schedule) -> Layout:
    return Layout(
        placement=schedule.placement,
        num_mb=schedule.microbatches_per_pipe,
        blocks=("",) * schedule.placement.num_stages,
        forward=(OpKind.F,),
        backward=(OpKind.B,),
        weights=(OpKind.W,),
        saved={OpKind.F: 1},
        saved_unit="activations",
    )
