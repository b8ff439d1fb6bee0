"""Weft: a distributed training step as data. Write it, verify it, read it back.

import weft

schedule = weft.generate("dualpipe", pp=8, microbatches=20)
print(weft.verify(schedule))
"""

from weft.api import dumps, load, loads
from weft.ir import Action, B, Cell, F, I, Kind, Pair, Placement, Schedule, W
from weft.schedules import generate
from weft.verify import Finding, Report, explain, verify

__version__ = "0.1.0"

__all__ = [
    "Action",
    "B",
    "Cell",
    "F",
    "Finding",
    "I",
    "Kind",
    "Pair",
    "Placement",
    "Report",
    "Schedule",
    "W",
    "dumps",
    "explain",
    "generate",
    "load",
    "loads",
    "verify",
]
