"""Make an extract of a published timeline: `python make.py timeline-ST.json.gz ST.xz`.

The timelines, and the results that `published.json` restates, are those of ByteDance-Seed/StragglerAnalysis (`data/`),
Copyright (c) 2025 Bytedance Ltd. and/or its affiliates, Apache License 2.0: three production jobs, one with a long last
stage (ST), one with a slow worker (AR), one with unequal sequences (SE). An extract has every event of a timeline with
its start and duration in whole microseconds; `tests/support/straggler.py` writes it as a timeline again.

An extract is LZMA of a line of JSON (names, when each step began, how many events each data-parallel rank,
stage and step has) and of columns over the events, rank by rank,
step by step, in order of start: the name's number (1 byte), then, as planes of their 4 bytes, the gap from the latest
end before, and the duration.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np


def make(timeline: Path, extract: Path) -> None:
    """Write the extract of a timeline."""
    events = json.loads(gzip.decompress(timeline.read_bytes()))
    place = {}
    for event in events:
        if event["name"] == "thread_name":
            place[event["pid"], event["tid"]] = int(re.findall(r"PP rank (\d+)", event["args"]["name"])[0])
    found: dict[tuple[int, int, int], list[tuple[int, int, str, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            args, start = event["args"], round(event["ts"])
            end = round(event["ts"] + event["dur"])
            where = event["pid"], place[event["pid"], event["tid"]], args["step"]
            found[where].append((start, end, event["name"], args["mb_id"]))
    names = sorted({name for own in found.values() for _, _, name, _ in own})
    origins: dict[int, int] = {}
    for (_, _, step), own in found.items():
        origins[step] = min([origins.get(step, own[0][0]), *(mark[0] for mark in own)])
    sizes: list[list[int]] = []
    columns: tuple[list[int], ...] = ([], [], [])
    for where in sorted(found):
        own = sorted(found[where], key=lambda mark: (mark[0], names.index(mark[2])))
        _check_order(own)
        sizes.append([*where, len(own)])
        latest = origins[where[2]]
        for start, end, name, _ in own:
            columns[0].append(names.index(name))
            columns[1].append(start - latest)
            columns[2].append(end - start)
            latest = max(latest, end)
    header = {"source": timeline.name, "names": names, "origins": origins, "sizes": sizes}
    planes = [np.array(columns[0], np.uint8).tobytes()]
    for column in columns[1:]:
        planes.append(np.array(column, "<i4").view(np.uint8).reshape(-1, 4).T.tobytes())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]
    packed = lzma.compress(json.dumps(header).encode() + b"\n" + b"".join(planes), filters=filters)
    extract.write_bytes(packed)


def _check_order(own: list[tuple[Any, ...]]) -> None:
    """Micro-batches are not stored: they are the k-th of their kind."""
    for name in ("forward-compute", "backward-compute"):
        order = [mb for _, _, own_name, mb in own if own_name == name]
        assert order == list(range(len(order))), order


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
