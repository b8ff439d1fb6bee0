"""The other steps of a run, in the header of the one that a file shows: columns, compressed, as text.

    "steps": {"about": "measured", "numbers": [12, 13, 14], "columns": "eJzt..."}

The columns are the starts of all ops of all steps, and then their durations, 8 bytes each, as differences from the op
before: zlib, then base64.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

from treadle.fields.fields import Fields, Object
from treadle.files.checked_columns import LATEST
from treadle.ir.program import Longs
from treadle.ir.steps import Steps
from treadle.ir.trace import Trace

_KEYS = ("about", "numbers", "columns")
_MOST_STEPS = 100_000


def steps_object(steps: Steps) -> Object:
    """The steps as JSON has them."""
    origin = steps.start.min()
    columns = np.stack([steps.start - origin, steps.end - steps.start]).astype("<i8")
    packed = zlib.compress(np.diff(columns.reshape(-1), prepend=0).tobytes(), 6)
    return {"about": steps.about, "numbers": steps.numbers, "columns": base64.b64encode(packed).decode()}


def read_steps(fields: Fields, trace: Trace) -> Steps:
    """The steps of the Program of a Trace; a ValueError says what is wrong with them."""
    fields.expect(_KEYS)
    numbers = fields.wholes("numbers", 0, int(np.iinfo(np.int32).max))
    num_ops = trace.program.num_ops
    if not 1 <= len(numbers) <= _MOST_STEPS or len(set(numbers)) != len(numbers):
        raise fields.error("numbers", f"1 to {_MOST_STEPS:,} different numbers of steps", list(numbers[:8]))
    times = _unpacked(fields, 2 * len(numbers) * num_ops).reshape(2, len(numbers), num_ops)
    start, duration = times
    if times.size and not (times.min() >= 0 and times.max() < LATEST):
        raise fields.error("columns", f"starts and durations from 0 to {LATEST:,} ticks", int(times.min()))
    return Steps(trace.program, tuple(numbers), start, start + duration, trace.clock, fields.text("about"))


def _unpacked(fields: Fields, wanted: int) -> Longs:
    text = fields.text("columns")
    try:
        unpack = zlib.decompressobj()
        data = unpack.decompress(base64.b64decode(text, validate=True), 8 * wanted + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{fields.source}: steps.columns cannot be unpacked: {error}; write the trace again") from None
    if len(data) != 8 * wanted:
        raise ValueError(
            f"{fields.source}: steps.columns holds {len(data):,} bytes or more, and the steps of the program have "
            f"{8 * wanted:,}; write the trace again"
        )
    return np.cumsum(np.frombuffer(data, "<i8")).astype(np.int64)
