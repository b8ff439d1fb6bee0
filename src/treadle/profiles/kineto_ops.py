"""The ops in a file of torch.profiler: exact ones (`PP:0F3`), or parts of layers that are counted (`attn(F)`).

On a device an op lasts from the first start to the last end of the work that was launched inside its annotation.
Without one, the annotation is the op. There a computation first waits for its message, inside its own annotation: torch
notes when a receive (`gloo:recv`) was found there, which ends that message and starts the computation.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from treadle.ir.ops import ACTIONS, LaneKind, OpKind, OpRole
from treadle.profiles.attribution import NOBODY, attribute, extents, innermost
from treadle.profiles.kineto_file import SENDS, Annotation, KinetoFile
from treadle.profiles.recording import UNKNOWN, Mark, Remark
from treadle.profiles.work_names import LANES, PPOp, begun_as, is_sharding, op_of, pp_ops

_STEP = re.compile(r"ProfilerStep#(\d+)")
_FOUND = re.compile(r"\w+:recv(?:AnySource)?\b.*")
_SENT = re.compile(SENDS)
_ACTIVATION = (OpKind.RECV_F, OpKind.SEND_F)
_GRADIENT = (OpKind.RECV_B, OpKind.SEND_B)
_MESSAGES: dict[OpKind, tuple[OpKind, OpKind]] = {
    kind: _ACTIVATION if kind is OpKind.F else _GRADIENT for kind in ACTIONS if kind is not OpKind.W
}
"""The message that an action reads, and the one that it makes."""
_BACKWARD = ("_B", "_W")
_BESIDE = (LaneKind.DP, LaneKind.WORLD, LaneKind.TIED)
_WORTH_TELLING_NS = 10_000_000
"""torch has these ranges without FSDP too, empty."""


class _Range(NamedTuple):
    """An annotation that names ops, and when they ran: on the device, or as the host has it."""

    at: int
    ops: tuple[PPOp, ...]
    start: int
    end: int


def marks_of(file: KinetoFile, remarks: list[Remark]) -> list[Mark]:
    """The marks of a rank, whichever way its work is annotated."""
    exact = {at: ops for at, a in enumerate(file.annotations) if (ops := pp_ops(begun_as(a.name) or a.name))}
    if file.num_copies:
        remarks.append(Remark("an event was recorded twice, and counts once", file.source, file.num_copies))
    shards = [a.end - a.start for a in file.annotations if is_sharding(a.name)]
    if sum(shards) > _WORTH_TELLING_NS:
        took = f"{sum(shards) / 1e6:,.1f} ms in all"
        remarks.append(Remark(f"PP:0UNSHARD or RESHARD, work of FSDP, has no op: {took}", file.source, len(shards)))
    unread = Counter(
        a.name
        for at, a in enumerate(file.annotations)
        if a.name.startswith("PP:") and at not in exact and not is_sharding(a.name)
    )
    for name, times in unread.items():
        remarks.append(Remark(f"unknown range {name!r}, ignored", file.source, times))
    if not exact:
        exact = _parts(file)
    ranges = _in_one(file, _timed(file, exact, remarks))
    if not len(file.device.start):
        ranges = _without_waiting(file, ranges)
    marks = [
        Mark(op.kind, each.start, each.end, op.mb, op.stage, op.chunk, op.layer, joined=op.joined)
        for each in ranges
        for op in each.ops
    ]
    marks += _of_lanes(file)
    return _with_steps(file, marks)


def _timed(file: KinetoFile, exact: dict[int, tuple[PPOp, ...]], remarks: list[Remark]) -> list[_Range]:
    """When the ops ran: first start to last end of their work on the device, or the annotation itself."""
    ordered = sorted(exact, key=lambda at: (file.annotations[at].start, -file.annotations[at].end))
    spans: dict[int, tuple[int, int]] = {}
    if len(file.device.start):
        computes = [_computes(exact.get(at, ())) for at in range(len(file.annotations))]
        owner = attribute(file)
        spans = extents(file, owner, computes)
        is_op = np.array([at in exact for at in range(len(file.annotations))] + [False])  # the last is NOBODY's
        lost = int(np.count_nonzero(~is_op[owner]))
        ordered = [at for at in ordered if at in spans or begun_as(file.annotations[at].name) is None]
        idle = sum(at not in spans for at in ordered)
        if lost:
            remarks.append(Remark("an event of the device belongs to no op", file.source, lost))
        if idle:
            remarks.append(Remark("an op without work on the device has the times of its host", file.source, idle))
    return [_Range(at, exact[at], *spans.get(at, file.annotations[at][2:])) for at in ordered]


def _in_one(file: KinetoFile, ranges: list[_Range]) -> list[_Range]:
    """Make one range of an op and of what goes on with it later; a send that is waited for at the end has ended."""
    made: list[_Range] = []
    last: dict[tuple[PPOp, ...], int] = {}
    for each in ranges:
        goes_on = begun_as(file.annotations[each.at].name) is not None
        if goes_on and each.ops[0].kind.is_send:
            continue
        if goes_on and each.ops in last:
            at = last[each.ops]
            made[at] = made[at]._replace(end=max(each.end, made[at].end))
            continue
        last[each.ops] = len(made)
        made.append(each)
    return made


def _computes(ops: Sequence[PPOp]) -> bool:
    return bool(ops) and not ops[0].kind.lane.communicates


def _without_waiting(file: KinetoFile, ranges: list[_Range]) -> list[_Range]:
    """Begin each computation where its message was found, and end the message there.

    torch's runtime posts a receive in a range of its own. Its single-stage schedules receive and send inside the range
    of the computation, which is made into three.
    """
    ends = {at: max(a.end for a in own) for at, own in _inside(file, ranges, _FOUND).items()}
    sends = {at: min(a.start for a in own) for at, own in _inside(file, ranges, _SENT).items()}
    came: dict[tuple[OpKind, int, int], int] = {}
    made: list[_Range] = []
    for each in ranges:
        first, end = each.ops[0], ends.get(each.at)
        if first.kind.is_recv and end is not None:
            came[first.kind, first.stage, first.mb] = end
            made.append(each._replace(end=max(end, each.start)))
        elif first.kind in _MESSAGES and first.stage == UNKNOWN:
            made += _in_three(each, end, sends.get(each.at))
        else:
            wanted = (_MESSAGES[first.kind][0], first.stage, first.mb) if first.kind in _MESSAGES else None
            found = came.pop(wanted, each.start) if wanted is not None else each.start
            made.append(each._replace(start=found) if each.start < found < each.end else each)
    return made


def _inside(file: KinetoFile, ranges: list[_Range], name: re.Pattern[str]) -> dict[int, list[Annotation]]:
    """The annotations of that name by the range in which they begin."""
    wanted = [a for a in file.annotations if name.fullmatch(a.name)]
    times = np.array([a.start for a in wanted], np.int64)
    found: dict[int, list[Annotation]] = defaultdict(list)
    for annotation, at in zip(wanted, innermost(file.annotations, [r.at for r in ranges], times).tolist(), strict=True):
        if at != NOBODY:
            found[at].append(annotation)
    return found


def _in_three(each: _Range, found: int | None, sent: int | None) -> Iterator[_Range]:
    """Receive, computation and send of a range that has all of them."""
    (op,) = each.ops
    receive, send = _MESSAGES[op.kind]
    start = min(found, each.end) if found is not None else each.start
    end = max(sent, start) if sent is not None else each.end
    if found is not None:
        yield each._replace(ops=(PPOp(receive, mb=op.mb),), end=start)
    yield each._replace(start=start, end=end)
    if sent is not None:
        yield each._replace(ops=(PPOp(send, mb=op.mb),), start=end)


def _parts(file: KinetoFile) -> dict[int, tuple[PPOp, ...]]:
    """The ops of annotations that name parts of layers: their layers and micro-batches are counted.

    Backward goes through layers from the last to the first. Forward and backward inside one annotation are of two
    micro-batches, the backward of the earlier one.
    """
    named = {at: op for at, a in enumerate(file.annotations) if (op := op_of(a.name)) is not None}
    if not named:
        return {}
    others = [at for at, a in enumerate(file.annotations) if at not in named and not _STEP.fullmatch(a.name)]
    starts = np.array([file.annotations[at].start for at in named], np.int64)
    around = dict(zip(named, innermost(file.annotations, others, starts).tolist(), strict=True))
    cells: dict[int, list[int]] = defaultdict(list)
    for at in sorted(named, key=lambda at: file.annotations[at].start):
        cells[around[at]].append(at)
    found: dict[int, tuple[PPOp, ...]] = {}
    forwards, backwards = count(), count()
    for own in cells.values():
        is_back = {at: named[at][0].name.endswith(_BACKWARD) for at in own}
        paired = len(set(is_back.values())) == 2
        if paired and not found:
            next(forwards)
        mbs = {way: next(backwards if way else forwards) for way in sorted(set(is_back.values()))}
        for at, place, num in _places(own, named):
            kind, layer = named[at]
            if kind.role in (OpRole.ACTION, OpRole.MESSAGE) or kind.lane in _BESIDE:
                found[at] = (PPOp(kind),)
                continue
            counted = num - 1 - place if is_back[at] else place
            layer = layer if layer != UNKNOWN else counted
            found[at] = (PPOp(kind, mb=mbs[is_back[at]], layer=layer, joined=paired and is_back[at]),)
    return found


def _places(own: Sequence[int], named: dict[int, tuple[OpKind, int]]) -> Iterator[tuple[int, int, int]]:
    """Each annotation of a cell, the how-manieth of its kind it is, and how many there are."""
    of_kind: dict[OpKind, list[int]] = defaultdict(list)
    for at in own:
        of_kind[named[at][0]].append(at)
    for places in of_kind.values():
        for place, at in enumerate(places):
            yield at, place, len(places)


def _of_lanes(file: KinetoFile) -> list[Mark]:
    """The ops of Treadle's lanes whose threads the profiler did not see."""
    marks = []
    for key, ops in file.about.items():
        if not key.startswith(LANES) or not isinstance(ops, list):
            continue
        for name, start, end in ops:
            marks += [
                Mark(op.kind, int(start), int(end), op.mb, op.stage, op.chunk, op.layer, joined=op.joined)
                for op in pp_ops(name)
            ]
    return marks


# -- steps -------------------------------------------------------------------------------------------------------------


def _with_steps(file: KinetoFile, marks: list[Mark]) -> list[Mark]:
    """Number the steps: a new one begins with a ProfilerStep, and where an op comes again.

    They have ProfilerStep's numbers if each of those is one step, else they are counted.
    """
    marks = sorted(marks, key=lambda mark: (mark.start, mark.end))
    named = sorted((a.start, int(m[1])) for a in file.annotations if (m := _STEP.fullmatch(a.name)))
    begins = [start for start, _ in named]
    steps: list[int] = []
    periods: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for mark in marks:
        label = (mark.kind, mark.mb, mark.stage, mark.chunk, mark.layer)
        period = bisect_right(begins, mark.start) - 1
        if mark.mb != UNKNOWN:
            if not periods or label in seen or (period != periods[-1]):
                periods.append(period)
                seen.clear()
            seen.add(label)
        steps.append(max(0, len(periods) - 1))
    if periods and min(periods) >= 0 and len(set(periods)) == len(periods):
        numbers = [named[period][1] for period in periods]
        steps = [numbers[step] for step in steps]
    return [mark._replace(step=step) for mark, step in zip(marks, steps, strict=True)]
