"""A weight update, buffer by buffer, as `treadle show --json` of an update prints it."""

from __future__ import annotations

from typing import Annotated, TypedDict

from treadle.fields.kinds import Amount, Count
from treadle.ir.printed_peak import TimeUnit


class UpdateRowJson(TypedDict):
    """A buffer's ops as they are printed."""

    device: Annotated[Count, "The device."]
    buffer: Annotated[str, "Its buffer."]
    ops: Annotated[list[tuple[str, float, float]], "The ops on the buffer, in order."]


class UpdateRowsJson(TypedDict):
    """A weight update, buffer by buffer, as it is printed."""

    unit: TimeUnit
    makespan: Annotated[Amount, "Time from the first start to the last end, in unit."]
    about: Annotated[str, "The assumptions of a prediction, or where a measurement was made."]
    rows: Annotated[list[UpdateRowJson], "A row for each buffer of each device."]
