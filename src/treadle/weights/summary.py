"""A summary of an update's Trace: how long its parts take on each device, and how much of them is hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.ir.ops import LaneKind
from treadle.ir.program import Longs
from treadle.ir.trace import Clock, Trace

if TYPE_CHECKING:
    from treadle.weights.printed_update import DeviceJson, UpdateMetricsJson


@dataclass(frozen=True)
class DeviceMetrics:
    """Ticks that a device copies, broadcasts and reloads; and of copies and reloads those during a broadcast."""

    h2d: int
    broadcast: int
    reload: int
    h2d_hidden: int
    reload_hidden: int

    def as_dict(self, clock: Clock) -> DeviceJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {
            "h2d": clock.show(self.h2d),
            "broadcast": clock.show(self.broadcast),
            "reload": clock.show(self.reload),
            "h2d_hidden": clock.show(self.h2d_hidden),
            "reload_hidden": clock.show(self.reload_hidden),
        }


@dataclass(frozen=True)
class UpdateMetrics:
    """An update in numbers; `moved_bytes` are broadcast once each."""

    makespan: int
    num_ops: int
    clock: Clock
    moved_bytes: int
    devices: tuple[DeviceMetrics, ...]

    @property
    def hidden(self) -> float:
        """The share of all reloading that goes on during a broadcast."""
        total = sum(device.reload for device in self.devices)
        return sum(device.reload_hidden for device in self.devices) / total if total else 0.0

    def as_dict(self) -> UpdateMetricsJson:
        """Return a dict for JSON; times are in the clock's unit."""
        return {
            "unit": self.clock.unit,
            "makespan": self.clock.show(self.makespan),
            "num_ops": self.num_ops,
            "moved_bytes": self.moved_bytes,
            "hidden": self.hidden,
            "devices": [device.as_dict(self.clock) for device in self.devices],
        }


def measure_update(trace: Trace) -> UpdateMetrics:
    """The numbers of an update, predicted or measured."""
    program = trace.program
    lanes: dict[tuple[int, int], int] = {}
    for lane in range(program.num_lanes):
        lanes[int(program.lane_rank[lane]), int(program.lane_kind[lane])] = lane
    devices = []
    for rank in range(program.num_ranks):
        h2d, sent, reload = (
            _spans(trace, lanes.get((rank, kind))) for kind in (LaneKind.H2D, LaneKind.BROADCAST, LaneKind.RELOAD)
        )
        busy = (_total(h2d), _total(sent), _total(reload))
        devices.append(DeviceMetrics(*busy, _common(h2d, sent), _common(reload, sent)))
    first = lanes.get((0, LaneKind.BROADCAST))
    span = program.lane_ptr[first : first + 2] if first is not None else np.zeros(2, np.int64)
    moved = int(program.size_bytes[span[0] : span[1]].sum())
    return UpdateMetrics(trace.makespan, program.num_ops, trace.clock, moved, tuple(devices))


_Spans = tuple[Longs, Longs]


def _spans(trace: Trace, lane: int | None) -> _Spans:
    """Starts and ends of a lane's ops."""
    if lane is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first, last = trace.program.lane_ptr[lane], trace.program.lane_ptr[lane + 1]
    return trace.start[first:last], trace.end[first:last]


def _total(spans: _Spans) -> int:
    return int((spans[1] - spans[0]).sum())


def _common(some: _Spans, other: _Spans) -> int:
    """The time in which an op of each of two lanes runs; a lane's ops do not overlap."""
    if not len(some[0]) or not len(other[0]):
        return 0
    edges = np.stack(other, 1).reshape(-1)
    passed = np.repeat(np.r_[0, np.cumsum(other[1] - other[0])], 2)[1:-1]

    start, end = (np.interp(times, edges, passed) for times in some)
    return round(float((end - start).sum()))
