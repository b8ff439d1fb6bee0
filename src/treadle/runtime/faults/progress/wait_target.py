"""Wait targets as numbers for slot WAITS_FOR: a rank, no rank, or several ranks together."""

from __future__ import annotations

NOBODY = -1
"""The wait target of computation."""


def waits_for_group(index: int) -> int:
    """Returns the wait target of a wait for all other ranks of a watch's `waited[index]`, as in a collective."""
    return -2 - index


ALIKE, ALL, TIED, EXPERTS = map(waits_for_group, range(4))
"""ALIKE: the ranks with the same parameters, as a reduction waits for. TIED: those that share one of this rank's
parameters. EXPERTS: the expert group. ALL: these and the pipe."""
