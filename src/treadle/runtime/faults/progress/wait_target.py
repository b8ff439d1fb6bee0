"""Whom an instruction waits for, as a number that others can see: a rank, nobody, or some ranks together."""

from __future__ import annotations

from treadle.runtime.faults.watch import waits_for_group

NOBODY = -1
"""Computation waits for nobody."""

ALIKE, ALL = map(waits_for_group, range(2))
"""The ranks with the same parameters, as a reduction does; these and all of the pipe and the expert group."""
