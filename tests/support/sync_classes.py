"""The classes of what orders or keeps something in a log: each can be left out, to see whether the checker finds it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from treadle.runtime.checker.analysis import analyse
from treadle.runtime.checker.log import LAUNCH, RECORD_STREAM, Entry, EventRecord, HostWait, Keep, Wait
from treadle.runtime.checker.stream_recorder import OUTSIDE

BACK_PRESSURE = "treadle/runtime/run/lanes/stream.py"
"""LaunchSite the launching thread waits for the device so as not to run too far ahead: that orders nothing."""


def op_kind(told: str) -> str:
    """`attn_f 0.1 L0` is an attn_f, `send F0.0 to rank 1` a send F."""
    words = told.split(" ")
    if words[0] in ("send", "receive"):
        return f"{words[0]} {words[1][0]}"
    return re.split(r"[\d]", words[0])[0] if len(words) < 3 or words[1][:1].isdigit() else told


def sync_classes(log: Sequence[Entry]) -> dict[str, list[int]]:
    """The places of the log by class: waits of streams, by both ops; waits of the host; recorded streams."""
    recorded = {entry.event: op_kind(entry.where.op) for entry in log if isinstance(entry, EventRecord)}
    found: dict[str, list[int]] = defaultdict(list)
    for place, entry in enumerate(log):
        if entry.where.op == OUTSIDE:
            continue
        match entry:
            case Wait(why=why) if why != LAUNCH:
                found[f"{op_kind(entry.where.op)}: {why} for {recorded.get(entry.event, '?')}"].append(place)
            case HostWait() if not entry.where.line.startswith(BACK_PRESSURE):
                found[f"{op_kind(entry.where.op)}: the host waits for {entry.why}"].append(place)
            case Keep(by=by) if by == RECORD_STREAM:
                found[f"{op_kind(entry.where.op)}: {by} at {entry.where.line.partition(':')[0]}"].append(place)
    return found


def missed(log: Sequence[Entry], streams: Sequence[str]) -> tuple[set[str], set[str]]:
    """(the classes without which nothing is found, all classes)."""
    classes = sync_classes(log)
    return {
        name for name, places in classes.items() if not analyse(log, streams, without=set(places), only_first=True)
    }, set(classes)
