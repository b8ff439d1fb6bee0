"""Weft: a distributed training step as data. Write it, verify it, simulate it.

import weft

schedule = weft.generate("dualpipe", pp=8, microbatches=20)
print(weft.verify(schedule))
"""

from typing import TYPE_CHECKING, Any

from weft.api import dumps, load, loads, save_trace
from weft.costs import Costs, load_costs
from weft.ir import Action, B, Cell, F, I, Kind, Pair, Placement, Schedule, W
from weft.ir.program import Program
from weft.ir.trace import Trace
from weft.plan import Options, lower
from weft.schedules import generate
from weft.simulate import compare, measure, simulate
from weft.verify import Finding, Report, explain
from weft.verify import verify_schedule as verify

if TYPE_CHECKING:
    from weft.runtime import Output, Pipeline, RankLost

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
    "Output",
    "Pair",
    "Pipeline",
    "Placement",
    "Program",
    "RankLost",
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
    "save_trace",
    "simulate",
    "verify",
]

_RUNNING = ("Output", "Pipeline", "RankLost")


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for, so that planning works without it."""
    if name not in _RUNNING:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    try:
        from weft import runtime
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"weft.{name} runs on torch; install it with: pip install 'weft[run]'") from error
    return getattr(runtime, name)
