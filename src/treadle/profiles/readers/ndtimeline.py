"""NDTimeline: Chrome traces whose events are named as Megatron names its timers.

    {"name": "forward-compute", "pid": 0, "tid": 0, "ts": 48943.5, "dur": 63459.0, "ph": "X",
     "args": {"step": 23, "model_chunk": 0, "mb_id": 0}}

A process is a data-parallel rank ("DP rank [0]"), a thread a stream of a rank ("PP rank 0, TP rank 0, compute"). Sends
and receives have neither micro-batch nor chunk (-1): they are counted. All ranks are on one clock.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from treadle.ir.ops import ACTIONS, OpKind
from treadle.ir.program import Ints, Shorts
from treadle.profiles.chrome_events import span_ns
from treadle.profiles.entries import events
from treadle.profiles.reader import Advance, Opening
from treadle.profiles.recording import UNKNOWN, Mark, MarkColumns, RankRecording, Recording, Remark
from treadle.profiles.work_names import ops_of

_NAMED = re.compile(rb'"(?:forward|backward)-(?:compute|send|recv)[a-z-]*"')
_PLACED = re.compile(rb'"thread_name"[^}]*\{\s*"name":\s*"PP rank \d+, TP rank \d+')
_PROCESS = re.compile(r"DP rank \[?(\d+)")
_THREAD = re.compile(r"PP rank (\d+), TP rank (\d+)")


class NDTimelineReader:
    """Reads NDTimeline's Chrome traces."""

    form = "NDTimeline"

    def recognises(self, opening: Opening) -> bool:
        """Look for an event of a micro-batch's computation or message with its arguments, or for a name of a thread.

        A large mesh has megabytes of names, which Chrome traces put before all events.
        """
        of_work = _NAMED.search(opening.head) is not None and b'"mb_id"' in opening.head
        return opening.head.lstrip()[:1] in (b"[", b"{") and (of_work or _PLACED.search(opening.head) is not None)

    def read(self, paths: Sequence[Path], advance: Advance) -> Recording:
        """Read the files of one run; ranks may be in one file or in several."""
        found: dict[_Place, list[MarkColumns]] = defaultdict(list)
        sources: dict[_Place, str] = {}
        remarks: list[Remark] = []
        for path in paths:
            for place, own in _read(path, remarks).items():
                found[place] += own
                sources.setdefault(place, str(path))
            advance(path.stat().st_size)
        if not found:
            raise ValueError(f"{paths[0]}: no event of a rank whose place is named ('PP rank 0, TP rank 0, compute')")
        dp = 1 + max(d for _, d in found)
        ranks = tuple(
            RankRecording.joined_of(own, source=sources[pp, d], clock="NDTimeline", rank=pp * dp + d, pp=pp, dp=d)
            for (pp, d), own in sorted(found.items())
        )
        return Recording(
            self.form,
            ranks,
            pp=1 + max(pp for pp, _ in found),
            vpp=1 + max(_highest(rank, rank.chunk) for rank in ranks),
            dp=dp,
            num_mb=1 + max(_highest(rank, rank.mb) for rank in ranks),
            late_receives=True,
            remarks=tuple(remarks),
        )


def _highest(rank: RankRecording, column: Ints | Shorts) -> int:
    """The highest number that a computation names, 0 where none does."""
    return int(column[np.isin(rank.kind, ACTIONS)].max(initial=0))


_Place: TypeAlias = tuple[int, int]
"""Rank of the pipeline, and replica."""


def _read(path: Path, remarks: list[Remark]) -> dict[_Place, list[MarkColumns]]:
    """The marks of each place in a file; adds what could not be used to the remarks."""
    threads: dict[tuple[Any, Any], MarkColumns] = defaultdict(MarkColumns)
    counts: Counter[tuple[Any, Any]] = Counter()
    unknown: Counter[str] = Counter()
    processes: dict[Any, int] = {}
    places: dict[tuple[Any, Any], tuple[int, int]] = {}
    source = str(path)
    for event in events(path):
        if not isinstance(event, dict):
            raise ValueError(f"{source}: a Chrome trace is a list of events, or an object with them as traceEvents")
        where = event.get("pid"), event.get("tid")
        if event.get("ph") == "M":
            name = str(event.get("args", {}).get("name", ""))
            if event.get("name") == "process_name" and (found := _PROCESS.search(name)):
                processes[event.get("pid")] = int(found[1])
            if event.get("name") == "thread_name" and (found := _THREAD.search(name)):
                places[where] = int(found[1]), int(found[2])
        if event.get("ph") != "X":
            continue
        kinds = ops_of(event["name"])
        if not kinds:
            unknown[event["name"]] += 1
            continue
        counts[where] += 1
        for mark in _marks(event, kinds, source):
            threads[where].append(mark)
    remarks += [Remark(f"events named {name!r} are not known, and left out", source, n) for name, n in unknown.items()]
    nowhere = [where for where in threads if where[0] not in processes or where not in places]
    if nowhere:
        num = sum(counts[where] for where in nowhere)
        remarks.append(Remark("an event is of a thread or process without a name, and left out", source, num))
    elsewhere = [where for where in threads if where not in nowhere and places[where][1] != 0]
    if elsewhere:
        num = sum(counts[where] for where in elsewhere)
        remarks.append(Remark("events of tensor-parallel ranks but the first are left out", source, num))
    marks: dict[_Place, list[MarkColumns]] = defaultdict(list)
    for where, own in threads.items():
        if where not in nowhere and where not in elsewhere:
            marks[places[where][0], processes[where[0]]].append(own)
    return marks


def _marks(event: dict[str, Any], kinds: tuple[OpKind, ...], source: str) -> list[Mark]:
    args = event["args"]
    start, end = span_ns(event, source)
    mb = args.get("mb_id", UNKNOWN) if kinds[0] in ACTIONS else UNKNOWN
    chunk, step = args.get("model_chunk", UNKNOWN), args.get("step", UNKNOWN)
    return [Mark(kind, start, end, mb=mb, chunk=chunk, step=step) for kind in kinds]
