"""Which annotation a device's work belongs to: kernel -> correlation -> launch -> innermost annotation.

Autograd launches the kernels of a backward from a thread of its own, where no annotation is. So a launch belongs to the
innermost annotation of its own thread or, where that has none, of all threads at that time. Annotations that name an op
come first: a library's own (`nccl:all_to_all`) inside one do not take its kernels.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from treadle.ir.program import Ints, Longs
from treadle.profiles.kineto_file import NO_LAUNCH, Annotation, KinetoFile
from treadle.profiles.work_names import begun_as, op_of, pp_ops

NOBODY = -1
"""Stands for no annotation."""


class AttributionRow(NamedTuple):
    """The device's work under annotations of one name. Times are nanoseconds, summed over the annotations.

    `busy_ns` counts moments at which any of its work ran, `extent_ns` goes from the first start to the last end of each
    annotation. `kernel_ns` adds up the kernels of each stream, and `copy_ns` all copies and fills: together they are
    more than `busy_ns` where streams run side by side.
    """

    name: str
    lane: str
    num_annotations: int
    num_events: int
    busy_ns: int
    extent_ns: int
    kernel_ns: dict[int, int]
    copy_ns: int


def attribute(file: KinetoFile) -> Ints:
    """Return for each event of the device the index of its annotation, or NOBODY."""
    launches, device = file.launches, file.device
    found = np.full(len(device.start), NOBODY, np.int32)
    if len(launches.correlation):
        at = np.searchsorted(launches.correlation, device.correlation)
        at = np.minimum(at, len(launches.correlation) - 1)
        known = launches.correlation[at] == device.correlation
        found[known] = _around(file.annotations, launches.time[at[known]], launches.thread[at[known]])
    if file.on_device and (found == NOBODY).any():
        lost = np.flatnonzero(found == NOBODY)
        inside = innermost(file.on_device, range(len(file.on_device)), device.start[lost])
        host = np.array([*file.annotation_of, NOBODY], np.int32)
        found[lost] = host[inside]
    return found


def _around(annotations: Sequence[Annotation], times: Longs, threads: Ints) -> Ints:
    """The annotation of each launch: an op's before any other, its own thread's before those of all."""
    ops = [at for at, annotation in enumerate(annotations) if names_op(annotation.name)]
    by_thread = defaultdict(list)
    for at in ops:
        by_thread[annotations[at].thread].append(at)
    found = np.full(len(times), NOBODY, np.int32)
    for thread, own in by_thread.items():
        here = threads == thread
        found[here] = innermost(annotations, own, times[here])
    for chosen in (ops, range(len(annotations))):
        lost = found == NOBODY
        found[lost] = innermost(annotations, chosen, times[lost])
    return found


def names_op(name: str) -> bool:
    """Return whether a name stands for an op."""
    return bool(pp_ops(begun_as(name) or name)) or op_of(name) is not None


def innermost(annotations: Sequence[Annotation], chosen: Iterable[int], times: Longs) -> Ints:
    """Return for each time the one of the chosen annotations that contains it and started last, or NOBODY."""
    bounds: list[int] = []
    inside: list[int] = [NOBODY]
    open_now: list[tuple[int, int, int]] = []
    edges = sorted(
        edge
        for at in chosen
        for edge in ((annotations[at].start, 1, at), (annotations[at].end, 0, at))
        if annotations[at].end > annotations[at].start
    )
    for time, opens, at in edges:
        if opens:
            heapq.heappush(open_now, (-time, annotations[at].end, at))
        while open_now and open_now[0][1] <= time:
            heapq.heappop(open_now)
        now = open_now[0][2] if open_now else NOBODY
        if now != inside[-1]:
            bounds.append(time)
            inside.append(now)
    return np.array(inside, np.int32)[np.searchsorted(np.array(bounds, np.int64), times, side="right")]


def table(file: KinetoFile, owner: Ints | None = None) -> list[AttributionRow]:
    """Return a row for each name of annotations that the device worked for; the last, without a name, is nobody's."""
    owner = owner if owner is not None else attribute(file)
    by_name: dict[str, list[Longs]] = defaultdict(list)
    order = np.argsort(owner, kind="stable")
    for at, events in _groups(owner, order):
        by_name[file.annotations[at].name if at != NOBODY else ""].append(events)
    return [_row(file, name, by_name[name]) for name in sorted(by_name, key=lambda name: (not name, name))]


def _groups(owner: Ints, order: Longs) -> Iterable[tuple[int, Longs]]:
    """The events of each annotation that has any."""
    if not len(owner):
        return
    cuts = np.flatnonzero(np.diff(owner[order])) + 1
    for events in np.split(order, cuts):
        yield int(owner[events[0]]), events


def _row(file: KinetoFile, name: str, groups: list[Longs]) -> AttributionRow:
    device, together = file.device, np.concatenate(groups)
    duration, copies = device.end - device.start, together[device.copies[together]]
    kernels = together[~device.copies[together]]
    streams = device.stream[kernels]
    return AttributionRow(
        name,
        lane=_lane(name, float(device.talks[together].mean())),
        num_annotations=len(groups) if name else 0,
        num_events=len(together),
        busy_ns=busy_ns(device.start[together], device.end[together]),
        extent_ns=sum(int(device.end[own].max() - device.start[own].min()) for own in groups) if name else 0,
        kernel_ns={int(on): int(duration[kernels[streams == on]].sum()) for on in np.unique(streams)},
        copy_ns=int(duration[copies].sum()),
    )


def _lane(name: str, share_talking: float) -> str:
    """By purpose: of an op its own, else what most kernels do."""
    ops = pp_ops(name)
    op = op_of(name)
    kind = ops[0].kind if ops else op[0] if op is not None else None
    talks = kind.lane.communicates if kind is not None else share_talking > 0.5
    return "communication" if talks else "compute"


def busy_ns(start: Longs, end: Longs) -> int:
    """Return for how long at least one of the intervals lasted.

    Example:
        >>> busy_ns(np.array([0, 5, 20]), np.array([10, 12, 21]))
        13

    """
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(end[order])
    before = np.r_[np.iinfo(np.int64).min, until[:-1]]
    return int(np.maximum(until - np.maximum(start, before), 0).sum())


def extents(file: KinetoFile, owner: Ints, compute: Sequence[bool]) -> dict[int, tuple[int, int]]:
    """Return first start and last end of each annotation's work; of one that computes, communication is left out."""
    device, found = file.device, {}
    for at, events in _groups(owner, np.argsort(owner, kind="stable")):
        if at in (NOBODY, NO_LAUNCH):
            continue
        own = events[~device.talks[events]] if compute[at] else events
        own = own if len(own) else events
        found[at] = (int(device.start[own].min()), int(device.end[own].max()))
    return found
