"""A weight update in numbers as `treadle simulate --json` prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Amount, Count
from treadle.ir.printed_peak import TimeUnit


class DeviceJson(TypedDict):
    """A device's times as they are printed."""

    h2d: Annotated[Amount, "Time copying from the host, in unit."]
    broadcast: Annotated[Amount, "Time broadcasting, in unit."]
    reload: Annotated[Amount, "Time reloading, in unit."]
    h2d_hidden: Annotated[Amount, "Time copying during a broadcast, in unit."]
    reload_hidden: Annotated[Amount, "Time reloading during a broadcast, in unit."]


class UpdateMetricsJson(TypedDict):
    """A weight update in numbers as it is printed."""

    unit: TimeUnit
    makespan: Annotated[Amount, "Time from the first start to the last end, in unit."]
    num_ops: Annotated[Count, "Ops of all devices."]
    moved_bytes: Annotated[Count, "Bytes broadcast, each counted once."]
    hidden: Annotated[Amount, "The share of all reloading that goes on during a broadcast, from 0 to 1."]
    devices: Annotated[list[DeviceJson], "A row for each device."]
