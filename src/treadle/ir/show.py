"""Sizes and times as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.ir.clock_units import SECONDS

if TYPE_CHECKING:
    from treadle.ir.printed_peak import PeakJson
    from treadle.ir.trace import Clock


def counted(count: int, name: str) -> str:
    """Return a count with its noun: `1 rank`, `8 micro-batches`."""
    return f"{count} {name}" + ("" if count == 1 else "es" if name.endswith("ch") else "s")


_BYTES = (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def show_bytes(size: float) -> str:
    """A number of bytes: `22.5 GB`, `300 bytes`."""
    unit, scale = next(((u, s) for u, s in _BYTES if float(f"{size:.4g}") >= s), ("bytes", 1))
    return f"{size / scale:.4g} {unit}"


def show_held(size: float, unit: str) -> str:
    """A peak in its unit: `22.5 GB`, `12 layers`, `1 activation`."""
    if unit == "bytes":
        return show_bytes(size)
    return f"{size:.6g} {unit[:-1] if size == 1 else unit}"


def peak_object(peaks: Sequence[float], unit: str) -> PeakJson:
    """What each rank holds at most, as JSON has it."""
    return {"unit": unit, "most": max(peaks, default=0), "ranks": list(peaks)}


def show_time(clock: Clock, ticks: float) -> str:
    """A time, with its unit where it is a real one: `2.172 s`, `14`."""
    if clock.unit == "unit":
        return f"{clock.show(ticks):.6g}"
    seconds = ticks / clock.ticks * SECONDS[clock.unit]
    unit, scale = next(((u, s) for u, s in (("s", 1), ("ms", 1e-3)) if float(f"{seconds:.4g}") >= s), ("us", 1e-6))
    return f"{seconds / scale:.4g} {unit}"
