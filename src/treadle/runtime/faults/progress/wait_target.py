"""Wait targets as numbers for slot WAITS_FOR: a rank, no rank, or several ranks together."""

from __future__ import annotations

from treadle.runtime.faults.watch import waits_for_group

NOBODY = -1
"""The wait target of computation."""

ALIKE, ALL, TIED = map(waits_for_group, range(3))
"""ALIKE: the ranks with the same parameters, as a reduction waits for. TIED: those that share one of this rank's
parameters. ALL: these, the pipe and the expert group."""
