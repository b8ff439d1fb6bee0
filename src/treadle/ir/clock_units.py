"""The units in which clocks count."""

from __future__ import annotations

SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
"""Seconds of a unit."""

CLOCK_UNITS = (*SECONDS, "unit")
"""The units that a clock can have: those of real time, and a unit of costs without one."""
