"""A clock that counts while a host sleeps, and that nobody sets."""

from __future__ import annotations

import time


def boot_ns() -> int:
    """Return nanoseconds since the host booted; the same on all of its processes. A paused virtual machine may stop."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
