"""The columns of a trace as text: little-endian arrays, deflated, in base64.

A predicted step repeats itself, and so do its columns once they hold differences: a start is written as the gap after
the end before it on the lane, a dependency as its distance from the one before. That is a byte an op; a measured
step, whose times are all different, takes about six.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.ir.ops import OpKind
from treadle.ir.program import Bools, Longs, Program
from treadle.ir.trace import Trace

_TYPES = {"u1": (0, 2**8 - 1), "i2": (-(2**15), 2**15 - 1), "i4": (-(2**31), 2**31 - 1)}


def columns(trace: Trace, path: Longs) -> dict[str, dict[str, Any]]:
    """The columns of ops that the page reads. Times are in ticks from the trace's first start."""
    program = trace.program
    return {
        "kind": column(program.kind),
        "mb": column(program.mb, differences=True),
        "chunk": column(_chunks(program)),
        "layer": column(program.layer),
        "sizeBytes": column(program.size_bytes),
        "joined": column(program.joined),
        "gap": column(_gaps(trace)),
        "duration": column(trace.end - trace.start),
        "numDeps": column(np.diff(program.dep_ptr)),
        "dep": column(program.dep, differences=True),
        "path": column(path, differences=True),
    }


def _chunks(program: Program) -> npt.NDArray[Any]:
    """Of an update, which has none, 1 for broadcasts on their source: the page gives what is above 0 another look."""
    if not program.layout.is_update:
        return program.chunk
    own: Bools = (program.kind == OpKind.BROADCAST) & (program.layer == program.lane_rank[program.lane_of])
    return own


def column(values: npt.NDArray[Any], *, differences: bool = False) -> dict[str, Any]:
    """An array in the narrowest type that holds it, and its differences where those are written."""
    whole: Longs = values.astype(np.int64)
    steps: Longs = np.diff(whole, prepend=0) if differences else whole
    name = _narrowest(whole, steps)
    packed = steps.astype(f"<{name}").tobytes()
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    text = base64.b64encode(deflate.compress(packed) + deflate.flush()).decode("ascii")
    return {"type": name, "differences": differences, "data": text}


def _narrowest(*arrays: Longs) -> str:
    """Past 32 bits a browser reads doubles, which hold whole numbers up to 2**53: 104 days of nanoseconds."""
    low = min(int(array.min(initial=0)) for array in arrays)
    high = max(int(array.max(initial=0)) for array in arrays)
    return next((name for name, (least, most) in _TYPES.items() if least <= low and high <= most), "f8")


def _gaps(trace: Trace) -> Longs:
    """From the end before it on its lane to an op's start; below zero where a measured op started before that."""
    ptr, origin = trace.program.lane_ptr, trace.start.min()
    before: Longs = np.r_[origin, trace.end[:-1]]
    before[ptr[:-1][np.diff(ptr) > 0]] = origin
    return trace.start - before
