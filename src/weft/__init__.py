"""Weft: a distributed training step as data. Write it, verify it, simulate it.

import weft

schedule = weft.generate("dualpipe", pp=8, microbatches=20)
print(weft.verify(schedule))
"""

from weft.api import dumps, load, loads
from weft.costs import Costs, load_costs
from weft.ir import Action, B, Cell, F, I, Kind, Pair, Placement, Schedule, W
from weft.ir.program import Program
from weft.ir.trace import Trace
from weft.plan import Options, lower
from weft.schedules import generate
from weft.simulate import compare, measure, simulate
from weft.verify import Finding, Report, explain
from weft.verify import verify_schedule as verify

__version__ = "0.1.0"

__all__ = [
    "Action",
    "B",
    "Cell",
    "Costs",
    "F",
    "Finding",
    "I",
    "Kind",
    "Options",
    "Pair",
    "Placement",
    "Program",
    "Report",
    "Schedule",
    "Trace",
    "W",
    "compare",
    "dumps",
    "explain",
    "generate",
    "load",
    "load_costs",
    "loads",
    "lower",
    "measure",
    "simulate",
    "verify",
]
