"""NDTimeline: Chrome traces whose events are named as Megatron names its timers.

    {"name": "forward-compute", "pid": 0, "tid": 0, "ts": 48943.5, "dur": 63459.0, "ph": "X",
     "args": {"step": 23, "model_chunk": 0, "mb_id": 0}}

A process is a data-parallel rank ("DP rank [0]"), a thread a stream of a rank ("PP rank 0, TP rank 0, compute"). Sends
and receives have neither micro-batch nor chunk (-1): they are counted. All ranks are on one clock.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from treadle.ir.program import OpKind
from treadle.profiles.names import ops_of
from treadle.profiles.reader import Advance, Opening
from treadle.profiles.recording import UNKNOWN, Mark, RankRecording, Recording, Remark
from treadle.profiles.standing import COMPUTE

_NAMED = re.compile(rb'"(?:forward|backward)-(?:compute|send|recv)[a-z-]*"')
_PROCESS = re.compile(r"DP rank \[?(\d+)")
_THREAD = re.compile(r"PP rank (\d+), TP rank (\d+)")


class NDTimelineReader:
    """Reads NDTimeline's Chrome traces."""

    form = "NDTimeline"

    def recognises(self, opening: Opening) -> bool:
        """Look for an event of a micro-batch's computation, or of a message, with NDTimeline's arguments."""
        named = _NAMED.search(opening.head) is not None
        return opening.head.lstrip()[:1] in (b"[", b"{") and named and b'"mb_id"' in opening.head

    def read(self, paths: Sequence[Path], advance: Advance) -> Recording:
        """Read the files of one run; ranks may be in one file or in several."""
        marks: dict[tuple[int, int], list[Mark]] = defaultdict(list)
        sources: dict[tuple[int, int], str] = {}
        remarks: list[Remark] = []
        for path in paths:
            found, more = _read(path)
            advance(path.stat().st_size)
            remarks += more
            for where, own in found.items():
                marks[where] += own
                sources.setdefault(where, str(path))
        if not marks:
            raise ValueError(f"{paths[0]}: no event of a rank whose place is named ('PP rank 0, TP rank 0, compute')")
        dp = 1 + max(d for _, d in marks)
        ranks = tuple(
            RankRecording.of(own, source=sources[pp, d], clock="NDTimeline", rank=pp * dp + d, pp=pp, dp=d)
            for (pp, d), own in sorted(marks.items())
        )
        computed = [mark for own in marks.values() for mark in own if mark.kind in (OpKind.F, OpKind.B)]
        return Recording(
            self.form,
            ranks,
            pp=1 + max(pp for pp, _ in marks),
            vpp=1 + max((mark.chunk for mark in computed), default=0),
            dp=dp,
            num_mb=1 + max((mark.mb for mark in computed), default=0),
            late_receives=True,
            remarks=tuple(remarks),
        )


def _read(path: Path) -> tuple[dict[tuple[int, int], list[Mark]], list[Remark]]:
    """The marks of each (pp, dp) in a file, and what could not be used."""
    events = _events(path)
    processes, threads = _places(events)
    marks: dict[tuple[int, int], list[Mark]] = defaultdict(list)
    unknown: Counter[str] = Counter()
    nowhere = elsewhere = 0
    for event in events:
        if event.get("ph") != "X":
            continue
        kinds = ops_of(event["name"])
        if not kinds:
            unknown[event["name"]] += 1
            continue
        dp, place = processes.get(event.get("pid")), threads.get((event.get("pid"), event.get("tid")))
        if dp is None or place is None:
            nowhere += 1
        elif place[1] != 0:
            elsewhere += 1
        else:
            marks[place[0], dp] += _marks(event, kinds)
    source = str(path)
    remarks = [Remark(f"events named {name!r} are not known, and left out", source, n) for name, n in unknown.items()]
    if nowhere:
        remarks.append(Remark("an event is of a thread or process without a name, and left out", source, nowhere))
    if elsewhere:
        remarks.append(Remark("events of tensor-parallel ranks but the first are left out", source, elsewhere))
    return marks, remarks


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: cannot be decompressed: {error}; the file is damaged or cut off") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not JSON: {error}; the file is damaged or cut off") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path}: a Chrome trace is a list of events, or an object with them as traceEvents")
    return events


def _places(events: Iterable[dict[str, Any]]) -> tuple[dict[Any, int], dict[tuple[Any, Any], tuple[int, int]]]:
    """The data-parallel rank of each process; the pipeline and tensor-parallel rank of each thread."""
    processes: dict[Any, int] = {}
    threads: dict[tuple[Any, Any], tuple[int, int]] = {}
    for event in events:
        if event.get("ph") != "M":
            continue
        name = str(event.get("args", {}).get("name", ""))
        if event.get("name") == "process_name" and (found := _PROCESS.search(name)):
            processes[event.get("pid")] = int(found[1])
        if event.get("name") == "thread_name" and (found := _THREAD.search(name)):
            threads[event.get("pid"), event.get("tid")] = int(found[1]), int(found[2])
    return processes, threads


def _marks(event: dict[str, Any], kinds: tuple[OpKind, ...]) -> list[Mark]:
    args = event["args"]
    start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
    mb = args.get("mb_id", UNKNOWN) if kinds[0] in COMPUTE else UNKNOWN
    chunk, step = args.get("model_chunk", UNKNOWN), args.get("step", UNKNOWN)
    return [Mark(kind, start, end, mb=mb, chunk=chunk, step=step) for kind in kinds]
