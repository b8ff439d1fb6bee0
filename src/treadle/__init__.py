"""Treadle: a distributed training step as data. Write it, verify it, simulate it.

import treadle

schedule = treadle.generate("dualpipe", pp=8, microbatches=20)
print(treadle.verify(schedule))
"""

from typing import TYPE_CHECKING, Any

from treadle.api import dumps, load, loads, save_trace
from treadle.costs import Costs, load_costs
from treadle.ir import Action, B, Cell, F, I, Kind, Pair, Placement, Schedule, W
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.plan import LoweringOptions, lower
from treadle.schedules import generate
from treadle.simulate import compare, measure, simulate
from treadle.verify import Finding, VerifyReport, explain
from treadle.verify import verify_schedule as verify

if TYPE_CHECKING:
    from treadle.runtime import Pipeline, RankLostError, StageOutput

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
    "LoweringOptions",
    "Pair",
    "Pipeline",
    "Placement",
    "Program",
    "RankLostError",
    "Schedule",
    "StageOutput",
    "Trace",
    "VerifyReport",
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

_RUNNING = ("StageOutput", "Pipeline", "RankLost", "RankLostError")


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for, so that planning works without it."""
    if name not in _RUNNING:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    try:
        from treadle import runtime
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"treadle.{name} runs on torch; install it with: pip install 'treadle[run]'") from error
    return getattr(runtime, name)
