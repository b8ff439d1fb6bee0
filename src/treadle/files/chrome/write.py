"""Trace -> Chrome-trace JSON, piece by piece: what is in memory besides the columns is one piece's text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

from treadle.fields.fields import Object
from treadle.files.checked_columns import check_program, check_times, fingerprint
from treadle.files.chrome.events import Events
from treadle.files.chrome.other_steps import steps_object
from treadle.files.chrome.scale import TickScale
from treadle.files.header import VERSION, layout_object, timing_object
from treadle.ir.ops import LaneKind
from treadle.ir.program import Longs, Program
from treadle.ir.steps import Steps
from treadle.ir.trace import Trace

MOST_OPS = 1_000_000
"""Ops in one file; viewers do not open more."""

_PIECE = 50_000
_MESSAGES = (LaneKind.SEND, LaneKind.RECV)
_UPDATE = (LaneKind.H2D, LaneKind.BROADCAST, LaneKind.RELOAD)
_COPIES = (LaneKind.OUT, LaneKind.IN)
_FIRST = (LaneKind.COMPUTE, LaneKind.EP, *_MESSAGES, *_COPIES, LaneKind.DP, LaneKind.HOST, *_UPDATE)
_FROM_THE_TOP = (*_FIRST, *(kind for kind in LaneKind if kind not in _FIRST))


def dump(trace: Trace, file: str | Path | IO[str], *, ranks: range | None = None, steps: Steps | None = None) -> None:
    """Write a Trace, or what `ranks` of it did, to a stream or a file, compressed if its name ends in .gz.

    `steps` are those of the run that the trace is one of; a viewer shows the trace, `load_steps` reads them all.
    """
    source = str(file) if isinstance(file, str | Path) else "the trace"
    check_program(trace.program, source)
    check_times(trace, source)
    writer = _Writer(trace, _chosen(trace.program, ranks), steps)
    writer.check_size()
    with _opened(file) as stream:
        stream.write(writer.head())
        stream.write(",\n".join(writer.metadata()))
        for first in range(0, len(writer.ops), _PIECE):
            lines = writer.events.lines(writer.ops[first : first + _PIECE])
            stream.write(",\n")
            stream.write(",\n".join(lines))
        stream.write("\n]}\n")


def _chosen(program: Program, ranks: range | None) -> range:
    num_ranks = program.layout.num_ranks
    if ranks is None:
        return range(num_ranks)
    if not ranks or ranks.step != 1 or ranks.start < 0 or ranks.stop > num_ranks:
        raise ValueError(f"ranks is a range of the {num_ranks} ranks such as range(0, {num_ranks}), got {ranks}")
    return ranks


def _opened(file: str | Path | IO[str]) -> AbstractContextManager[IO[str]]:
    if not isinstance(file, str | Path):
        return nullcontext(file)
    if str(file).endswith(".gz"):
        return gzip.open(file, "wt", compresslevel=4, encoding="ascii", newline="\n")
    return Path(file).open("w", encoding="ascii", newline="\n")


@dataclass(frozen=True)
class _Writer:
    """The parts of a file that holds the `ranks` of a Trace."""

    trace: Trace
    ranks: range
    steps: Steps | None

    @cached_property
    def tids(self) -> dict[int, int]:
        """The lanes of the ranks as a viewer shows them, and their threads: above all pids, the same in all parts."""
        program = self.trace.program
        place = np.argsort(np.array(_FROM_THE_TOP))[program.lane_kind]
        order = np.lexsort((program.lane_peer, place, program.lane_rank)).tolist()
        first = program.layout.num_ranks + 1
        ranks = program.lane_rank.tolist()
        return {lane: first + at for at, lane in enumerate(order) if ranks[lane] in self.ranks}

    @cached_property
    def ops(self) -> Longs:
        """The ops to write. Receives come last: viewers want an arrow's start before its end."""
        program = self.trace.program
        here = np.zeros(program.num_lanes, bool)
        here[list(self.tids)] = True
        late = program.lane_kind == LaneKind.RECV
        lane_of = program.lane_of
        return np.concatenate([np.flatnonzero((here & ~late)[lane_of]), np.flatnonzero((here & late)[lane_of])])

    @cached_property
    def scale(self) -> TickScale:
        return TickScale.of(self.trace.start[self.ops], self.trace.end[self.ops], self.trace.clock)

    @cached_property
    def events(self) -> Events:
        return Events(self.trace, self.scale, self.tids)

    def check_size(self) -> None:
        if len(self.ops) > MOST_OPS:
            raise ValueError(
                f"{len(self.ops):,} ops are more than the {MOST_OPS:,} that viewers open as JSON; "
                "write .npz, or some ranks a file (`ranks`), which merge puts together again"
            )
        self.scale.check_span(self.trace.end[self.ops])

    def head(self) -> str:
        program, clock, ticks_per_us = self.trace.program, self.trace.clock, self.scale.ticks_per_us
        treadle: Object = {"version": VERSION, "layout": layout_object(program.layout), **timing_object(self.trace)}
        treadle |= {"program": fingerprint(program), "num_ops": program.num_ops, "num_lanes": program.num_lanes}
        treadle |= {"origin": self.scale.origin, "ticks_per_us": ticks_per_us}
        if len(self.ranks) < program.layout.num_ranks:
            treadle["ranks"] = [self.ranks.start, self.ranks.stop - 1]
        if self.steps is not None:
            treadle["steps"] = steps_object(self.steps)
        lanes = ",\n".join(_compact(self._lane(lane)) for lane in self.tids)
        other: Object = {"about": self.trace.about, "time": f"1 {clock.unit} is {clock.ticks // ticks_per_us} us here"}
        return (
            f'{{"displayTimeUnit":"ms",\n"otherData":{_compact(other)},\n'
            f'"treadle":{_compact(treadle)[:-1]},"lanes":[\n{lanes}\n]}},\n"traceEvents":[\n'
        )

    def _lane(self, index: int) -> Object:
        program = self.trace.program
        lane, (first, after) = program.lane(index), program.lane_ptr[index : index + 2].tolist()
        where = {"tid": self.tids[index], "lane": index, "rank": lane.rank, "kind": lane.kind.name, "peer": lane.peer}
        return {**where, "group": int(program.lane_group[index]), "first": first, "num_ops": after - first}

    def metadata(self) -> Iterator[str]:
        """The names of processes and threads, and their places."""
        for rank in sorted({self.trace.program.lane(lane).rank for lane in self.tids}):
            yield from _named("process", {"pid": rank + 1}, f"rank {rank}", rank)
        for place, (index, tid) in enumerate(self.tids.items()):
            lane = self.trace.program.lane(index)
            yield from _named("thread", {"pid": lane.rank + 1, "tid": tid}, lane.name, place)


def _named(what: str, where: Object, name: str, place: int) -> Iterator[str]:
    yield _compact({"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}})
    yield _compact({"ph": "M", "name": f"{what}_sort_index", **where, "args": {"sort_index": place}})


def _compact(content: Object) -> str:
    return json.dumps(content, separators=(",", ":"))
