"""The lines of a Chrome-trace file: one for each op and for each end of a message's arrow.

There may be a million: columns become lists a piece at a time, and each line is one formatting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from treadle.files.checked_columns import reordered
from treadle.files.chrome.scale import TickScale
from treadle.ir.ops import RECEIVES, SENDS, LaneKind, OpKind
from treadle.ir.program import NEVER, Lane, Longs, Op, Program
from treadle.ir.trace import Trace

_ARGS = '"index":%d,"kind":"%s","mb":%d,"chunk":%d,"layer":%d,"cell":%d,"launch":%d,"bytes":%d%s,"deps":%s'
_WHOLE = ("mb", "chunk", "layer", "cell", "launch", "size_bytes")
_LABEL = ("kind", "mb", "chunk", "layer")
_KINDS = tuple(OpKind)
_ANY_LANE = Lane(NEVER, LaneKind.COMPUTE, NEVER)  # labels are the same on all
_VERBS = {**dict.fromkeys(SENDS, "send "), **dict.fromkeys(RECEIVES, "receive ")}


@dataclass(frozen=True)
class Events:
    """The events of some lanes of a Trace; `tids` are those lanes, and their threads."""

    trace: Trace
    scale: TickScale
    tids: dict[int, int]

    def lines(self, ops: Longs) -> Iterator[str]:
        """A line for each op and, behind it, one for its end of an arrow."""
        trace, lanes = self.trace, self.trace.program.lane_of[ops].tolist()
        start, end = trace.start[ops], trace.end[ops]
        columns = zip(
            _names(trace.program, ops),
            [self._places[lane] for lane in lanes],
            self.scale.texts(start - self.scale.origin),
            self.scale.texts(end - start),
            _args(trace.program, ops),
            self._arrows(ops, lanes),
            strict=True,
        )
        for name, (cat, place), ts, dur, args, arrow in columns:
            yield f'{{"ph":"X","name":"{name}","cat":"{cat}",{place},"ts":{ts},"dur":{dur},"args":{{{args}}}}}'
            if arrow:
                yield arrow

    @cached_property
    def _places(self) -> dict[int, tuple[str, str]]:
        """Category, and process and thread, of each lane."""
        lanes = {lane: (self.trace.program.lane(lane), tid) for lane, tid in self.tids.items()}
        return {
            index: (lane.kind.name.lower(), f'"pid":{lane.rank + 1},"tid":{tid}')
            for index, (lane, tid) in lanes.items()
        }

    def _arrows(self, ops: Longs, lanes: list[int]) -> list[str]:
        """Return the line of an arrow's end for ops with a message; an empty one for the others."""
        trace, texts = self.trace, [""] * len(ops)
        matched = np.flatnonzero(self._match[ops] != NEVER)
        mine, other = ops[matched], self._match[ops][matched]
        is_send = trace.program.lane_kind[trace.program.lane_of[mine]] == LaneKind.SEND
        # measured, a receive may start before its send: its end of the arrow is where both are under way
        met = np.clip(trace.start[other], trace.start[mine], trace.end[mine])
        time = self.scale.texts(np.where(is_send, trace.start[mine], met) - self.scale.origin)
        message = np.where(is_send, mine, other).tolist()
        for place, sends, name, ts in zip(matched.tolist(), is_send.tolist(), message, time, strict=True):
            phase = '"s"' if sends else '"f","bp":"e"'
            where = self._places[lanes[place]][1]
            texts[place] = f'{{"ph":{phase},"id":{name},"name":"message","cat":"message",{where},"ts":{ts}}}'
        return texts

    @cached_property
    def _match(self) -> Longs:
        """Return the other end of each send and receive of these lanes, if that is on them too; else NEVER."""
        program = self.trace.program
        match = np.full(program.num_ops, NEVER, np.int64)
        ends: dict[int, dict[LaneKind, int]] = {}
        for index in self.tids:
            group, kind = int(program.lane_group[index]), LaneKind(int(program.lane_kind[index]))
            if group != NEVER and kind in (LaneKind.SEND, LaneKind.RECV):
                ends.setdefault(group, {})[kind] = index
        for pair in ends.values():
            if len(pair) == 2:
                sends, receives = (
                    program.lane_ptr[lane : lane + 2] for lane in (pair[LaneKind.SEND], pair[LaneKind.RECV])
                )
                count = min(sends[1] - sends[0], receives[1] - receives[0])
                match[sends[0] : sends[0] + count] = np.arange(receives[0], receives[0] + count)
                match[receives[0] : receives[0] + count] = np.arange(sends[0], sends[0] + count)
        return match


def _names(program: Program, ops: Longs) -> list[str]:
    """Return the label of each op, `F3.1`. Ranks share labels: each different one is made once."""
    known: dict[tuple[int, ...], str] = {}
    names = []
    for label in zip(*(getattr(program, name)[ops].tolist() for name in _LABEL), strict=True):
        name = known.get(label)
        if name is None:
            name = known[label] = _name(*label)
        names.append(name)
    return names


def _name(kind: int, mb: int, chunk: int, layer: int) -> str:
    op = Op(NEVER, _KINDS[kind], _ANY_LANE, mb, chunk, layer, NEVER)
    return _VERBS.get(op.kind, "") + op.label


def _args(program: Program, ops: Longs) -> list[str]:
    """All columns of an op that its place in the file does not say."""
    kinds = [_KINDS[kind].name for kind in program.kind[ops].tolist()]
    whole = (getattr(program, name)[ops].tolist() for name in _WHOLE)
    joined = [',"joined":true' if joined else "" for joined in program.joined[ops].tolist()]
    ptr, dep = (column.tolist() for column in reordered(program.dep_ptr, program.dep, ops))
    deps = [dep[first:after] for first, after in pairwise(ptr)]
    return [_ARGS % row for row in zip(ops.tolist(), kinds, *whole, joined, deps, strict=True)]
