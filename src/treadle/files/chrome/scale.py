"""Times as a Chrome-trace file has them: microseconds from the first start, and exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.files.checked_columns import LATEST
from treadle.ir.program import Longs
from treadle.ir.trace import Clock

_NANOSECONDS = (Clock("ns", 1), Clock("us", 1000), Clock("ms", 1_000_000), Clock("s", 1_000_000_000))
_DECIMAL = 1000
_PLACES = tuple(f".{ns:03d}" for ns in range(_DECIMAL))
_LONGEST_DECIMAL = 2**42  # 50 days; past it the double that is read from a decimal does not tell nanoseconds apart


@dataclass(frozen=True)
class TickScale:
    """The origin of a file's times, and the ticks of its microsecond.

    Where a tick is a nanosecond, times have three decimals. Other clocks have no microseconds: there one stands for the
    ticks that divide every time, so that a file of whole units has whole numbers, and so has one of thirds of a unit.
    """

    origin: int
    ticks_per_us: int

    @classmethod
    def of(cls, start: Longs, end: Longs, clock: Clock) -> TickScale:
        """The scale that these times are exact in."""
        origin = int(start.min()) if len(start) else 0
        if clock in _NANOSECONDS:
            return cls(origin, _DECIMAL)
        shared = math.gcd(clock.ticks, int(np.gcd.reduce(start - origin)), int(np.gcd.reduce(end - origin)))
        return cls(origin, shared)

    @property
    def decimals(self) -> bool:
        """Do times have decimals."""
        return self.ticks_per_us == _DECIMAL

    @property
    def longest_us(self) -> int:
        """The latest time that comes back as it was written."""
        return _LONGEST_DECIMAL if self.decimals else 2 * LATEST // self.ticks_per_us

    def check_span(self, end: Longs) -> None:
        """Refuse times that would not come back as they are."""
        span_us = (int(end.max(initial=self.origin)) - self.origin) // self.ticks_per_us
        if span_us > self.longest_us:
            raise ValueError(
                f"JSON holds times of up to {self.longest_us:,} us exactly, the trace spans {span_us:,}; write .npz"
            )

    def texts(self, ticks: Longs) -> list[str]:
        """Times from the origin, as they are written."""
        whole, rest = np.divmod(ticks, self.ticks_per_us)
        if not self.decimals:
            return [str(us) for us in whole.tolist()]
        return [f"{us}{_PLACES[ns]}" for us, ns in zip(whole.tolist(), rest.tolist(), strict=True)]

    def ticks(self, values: list[Any]) -> tuple[Longs, int | None]:
        """Convert times of a file back to ticks; also return the place of the first value that no Trace wrote."""
        types, most = {int, float} if self.decimals else {int}, self.longest_us
        if set(map(type, values)) - types or (values and not (min(values) >= 0 and max(values) <= most)):
            wrong = next(n for n, value in enumerate(values) if type(value) not in types or not 0 <= value <= most)
            return np.empty(0, np.int64), wrong
        if not self.decimals:
            return np.array(values, np.int64) * self.ticks_per_us, None
        decimal = np.array(values, np.float64)
        ticks = np.rint(decimal * _DECIMAL)
        # both sides are the double that is nearest to the same decimal, if it has three places
        rounded = np.flatnonzero(ticks / _DECIMAL != decimal)
        return ticks.astype(np.int64), int(rounded[0]) if len(rounded) else None
