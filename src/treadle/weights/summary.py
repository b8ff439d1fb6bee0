"""A summary of an update's Trace: how long its parts take on each device, and how much of them is hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treadle.ir.ops import LaneKind, OpKind
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
    """An update in numbers; `moved_bytes` are those sent, a broadcast once."""

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
    lanes: dict[tuple[int, int], list[int]] = {}
    for lane in range(program.num_lanes):
        lanes.setdefault((int(program.lane_rank[lane]), int(program.lane_kind[lane])), []).append(lane)
    devices = []
    for rank in range(program.num_ranks):
        h2d, reload = (_spans(trace, lanes.get((rank, kind), [])) for kind in (LaneKind.H2D, LaneKind.RELOAD))
        sent = _spans(trace, [lane for kind in _MOVING for lane in lanes.get((rank, kind), [])])
        busy = (_total(h2d), _total(sent), _total(reload))
        devices.append(DeviceMetrics(*busy, _common(h2d, sent), _common(reload, sent)))
    device = program.lane_rank[program.lane_of]
    counted = (program.kind == OpKind.RECV_BUCKET) | ((program.kind == OpKind.BROADCAST) & (device == 0))
    moved = int(program.size_bytes[counted].sum())
    return UpdateMetrics(trace.makespan, program.num_ops, trace.clock, moved, tuple(devices))


_Spans = tuple[Longs, Longs]
_MOVING = (LaneKind.BROADCAST, LaneKind.SEND, LaneKind.RECV)


def _spans(trace: Trace, lanes: list[int]) -> _Spans:
    """Starts and ends of the ops of lanes; ops of several lanes that overlap count once."""
    ptr = trace.program.lane_ptr
    ops = np.concatenate([np.zeros(0, np.int64), *(np.arange(ptr[lane], ptr[lane + 1]) for lane in lanes)])
    start, end = trace.start[ops], trace.end[ops]
    if len(lanes) > 1:
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order])
        start = np.maximum(start, np.r_[start[:1], end[:-1]])
    return start, end


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
