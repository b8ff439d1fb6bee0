"""The extracts of published timelines (tests/data/straggler/make.py says whose), as timelines again."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "straggler"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((DATA / "published.json").read_text())["jobs"]

_COMPUTE = ("forward-compute", "backward-compute")


def write_timeline(job: str, path: Path) -> Path:
    """Write a job's extract as NDTimeline does, with a thread a rank, and return the path."""
    path.write_bytes(gzip.compress(json.dumps(timeline(job)).encode(), 1))
    return path


def timeline(job: str) -> list[dict[str, Any]]:
    """The events of a job."""
    head, _, columns = lzma.decompress((DATA / f"{job}.xz").read_bytes()).partition(b"\n")
    header = json.loads(head)
    num = sum(size for *_, size in header["sizes"])
    name = np.frombuffer(columns, np.uint8, num).tolist()
    planes = np.frombuffer(columns, np.uint8, offset=num).reshape(2, 4, num)
    gap, dur = (np.ascontiguousarray(plane.T).view("<i4").reshape(-1).tolist() for plane in planes)
    events, at = [], 0
    for dp, pp, step, size in header["sizes"]:
        latest, seen = header["origins"][str(step)], Counter[str]()
        for k in range(at, at + size):
            what, start = header["names"][name[k]], latest + gap[k]
            mb = seen[what] if what in _COMPUTE else -1
            chunk = 0 if what in _COMPUTE else -1
            args = {"step": step, "model_chunk": chunk, "mb_id": mb}
            events.append({"name": what, "pid": dp, "tid": pp, "ts": start, "dur": dur[k], "ph": "X", "args": args})
            latest = max(latest, start + dur[k])
            seen[what] += 1
        at += size
    return [*events, *_names(header["sizes"])]


def _names(sizes: list[list[int]]) -> list[dict[str, Any]]:
    threads = sorted({(dp, pp) for dp, pp, *_ in sizes})
    processes = sorted({dp for dp, _ in threads})
    return [
        *({"name": "process_name", "pid": dp, "ph": "M", "args": {"name": f"DP rank [{dp}]"}} for dp in processes),
        *(
            {"name": "thread_name", "pid": dp, "tid": pp, "ph": "M", "args": {"name": f"PP rank {pp}, TP rank 0, all"}}
            for dp, pp in threads
        ),
    ]
