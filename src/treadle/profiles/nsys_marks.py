"""The marks of one process of an Nsight Systems export, by the names of its ranges.

    PP:0F3                                            torch's names: stage and micro-batch are exact (also Treadle's)
    forward chunk 3 (phase1)                          PithTrain: micro-batch 3 of chunk 1
    forward chunk 3 (phase1) backward chunk 0 (phase0)
    ...P2PCommunicator.send_forward_recv_backward     Megatron: only messages are named

Megatron computes between two messages: a forward after a `recv_forward` and before a `send_forward`, a backward
likewise. Where both lie between two messages, the backward begins with the first launch by autograd's thread; if ranges
`layer_0f-layer_3b` are there, they ran overlapped. An op's time is from the start of the first to the end of the last
kernel that was launched in its range, by any thread; NCCL's kernels are those of messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from treadle.ir.ops import MESSAGES, OpKind
from treadle.ir.program import Longs
from treadle.profiles.nsys_file import NsysFile, Range
from treadle.profiles.recording import UNKNOWN, Mark, Remark
from treadle.profiles.work_names import PPOp, layers_of, ops_of, pp_ops

_CHUNK = re.compile(r"(?:rank \d+ )?(forward|backward) chunk (\d+) \(phase(\d+)\)")
_PAIR = re.compile(r"(?:rank \d+ )?forward chunk (\d+) \(phase(\d+)\),? ?backward chunk (\d+) \(phase(\d+)\)")
_KINDS = {"forward": OpKind.F, "backward": OpKind.B}
_WEIGHT = re.compile(r"(?:rank \d+ )?weight chunk.*")
"""PithTrain does not say whose weight gradients these are."""
_MEGATRON = re.compile(r"(?:.*\.)?P2PCommunicator\.|(?:.*\.)?p2p_communication\.")


class _Interval(NamedTuple):
    """A piece of the host's time and the ops that were launched in it."""

    start: int
    end: int
    ops: tuple[PPOp, ...]


def is_wanted(name: str) -> bool:
    """Return whether a range's name is that of an op, or where one is."""
    known = _named(name) or _is_message(name) or _WEIGHT.fullmatch(name)
    return bool(known) or layers_of(name) is not None


def is_megatron(ranges: Sequence[Range]) -> bool:
    """Return whether only messages are named."""
    return not any(_named(each.name) for each in ranges) and any(_is_message(each.name) for each in ranges)


def marks_of(file: NsysFile, ranges: Sequence[Range]) -> tuple[list[Mark], int, list[Remark]]:
    """Return the marks of a process, the device that it used, and remarks on what was not as expected."""
    source = str(file.path)
    thread, intervals, remarks = _intervals(ranges, source)
    if not intervals:
        return [], -1, remarks
    if not file.has_device:
        remarks.append(Remark("no kernels were recorded: times are the host's; record with -t cuda,nvtx", source))
        return [mark for each in intervals for mark in _marks(each, each.start, each.end)], -1, remarks
    bounds = ([each.start for each in intervals], [each.end for each in intervals])
    found = file.launched(ranges[0].process, thread, *bounds)
    if any(_follows(each) for each in intervals):
        intervals = list(_split(intervals, found.handed_over))
        bounds = ([each.start for each in intervals], [each.end for each in intervals])
        found = file.launched(ranges[0].process, thread, *bounds)
    marks, idle = [], 0
    if any(_exchanges(each) for each in intervals):
        intervals = [each if each.ops[0].kind not in MESSAGES else each._replace(ops=()) for each in intervals]
        remarks.append(Remark("messages of several chunks are exchanged at once, inseparable, and ignored", source))
    for at, each in enumerate(intervals):
        message = all(op.kind in MESSAGES for op in each.ops)
        start, end = (found.nccl_start, found.nccl_end) if message else (found.start, found.end)
        if start[at] < end[at]:
            marks += _marks(each, int(start[at]), int(end[at]))
        elif not message:
            idle += 1
            marks += _marks(each, each.start, each.end)
    if idle:
        remarks.append(Remark("a range launched nothing: its time is the host's", source, idle))
    return marks, found.device, remarks


def _marks(interval: _Interval, start: int, end: int) -> list[Mark]:
    return [Mark(op.kind, start, end, op.mb, op.stage, op.chunk, op.layer, UNKNOWN, op.joined) for op in interval.ops]


def _named(name: str) -> tuple[PPOp, ...]:
    """The ops of a name that says which micro-batch it is about."""
    if (found := _PAIR.fullmatch(name)) is not None:
        forward, backward = PPOp(OpKind.F, int(found[1]), chunk=int(found[2])), PPOp(OpKind.B, int(found[3]))
        return forward, backward._replace(chunk=int(found[4]), joined=True)
    if (found := _CHUNK.fullmatch(name)) is not None:
        return (PPOp(_KINDS[found[1]], int(found[2]), chunk=int(found[3])),)
    return pp_ops(name)


def _is_message(name: str) -> bool:
    return _MEGATRON.match(name) is not None and bool(ops_of(name))


def _intervals(ranges: Sequence[Range], source: str) -> tuple[int, list[_Interval], list[Remark]]:
    """The thread that works, what it launched when, and remarks."""
    megatron = is_megatron(ranges)
    chosen = [each for each in ranges if (_is_message(each.name) if megatron else _named(each.name))]
    if not chosen:
        return -1, [], []
    threads = [each.thread for each in chosen]
    thread = max(set(threads), key=threads.count)
    flat: list[Range] = []
    for each in chosen:
        if each.thread == thread and (not flat or each.start >= flat[-1].end):
            flat.append(each)
    remarks = []
    if weights := sum(_WEIGHT.fullmatch(each.name) is not None for each in ranges):
        remarks.append(Remark("'weight chunk' names no micro-batch, and is ignored", source, weights))
    if len(flat) < len(chosen):
        left = len(chosen) - len(flat)
        remarks.append(Remark("a range is of another thread, or within one of its like, and left out", source, left))
    if not megatron:
        return thread, [_Interval(each.start, each.end, _named(each.name)) for each in flat], remarks
    together = [each.start for each in ranges if min(layers_of(each.name) or (UNKNOWN,)) != UNKNOWN]
    return thread, list(_between_messages(flat, np.array(together, np.int64))), remarks


def _between_messages(messages: Sequence[Range], together: Longs) -> Iterator[_Interval]:
    """Megatron's messages, and what it computes between them."""
    for before, after in pairwise(messages):
        kinds = ops_of(before.name)
        yield _Interval(before.start, before.end, tuple(PPOp(kind) for kind in kinds))
        received, sent = set(kinds), set(ops_of(after.name))
        ops = []
        if OpKind.RECV_F in received and OpKind.SEND_F in sent:
            ops.append(PPOp(OpKind.F))
        if OpKind.RECV_B in received and OpKind.SEND_B in sent:
            overlapped = np.searchsorted(together, before.end) < np.searchsorted(together, after.start)
            ops.append(PPOp(OpKind.B, joined=bool(ops) and bool(overlapped)))
        if ops:
            yield _Interval(before.end, after.start, tuple(ops))
    last = messages[-1]
    yield _Interval(last.start, last.end, tuple(PPOp(kind) for kind in ops_of(last.name)))


def _exchanges(interval: _Interval) -> bool:
    """Return whether messages of one direction are both sent and received, of which the ends of a pipe lack some."""
    return bool(
        {"SEND_F", "RECV_F"} <= (kinds := {op.kind.name for op in interval.ops}) or {"SEND_B", "RECV_B"} <= kinds
    )


def _follows(interval: _Interval) -> bool:
    """Return whether a backward follows a forward in the interval."""
    return [op.kind for op in interval.ops] == [OpKind.F, OpKind.B] and not interval.ops[1].joined


def _split(intervals: Sequence[_Interval], handed_over: Longs) -> Iterator[_Interval]:
    """Cut a forward from the backward after it where another thread begins to launch."""
    for each, at in zip(intervals, handed_over.tolist(), strict=True):
        if _follows(each) and each.start < at < each.end:
            yield _Interval(each.start, at, each.ops[:1])
            yield _Interval(at, each.end, each.ops[1:])
        else:
            yield each
