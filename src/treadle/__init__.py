"""Treadle: a distributed training step as data. Write it, verify it, simulate it.

import treadle

schedule = treadle.generate("dualpipe", pp=8, microbatches=20)
print(treadle.verify(schedule))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treadle.api import dumps, load, load_any, loads, save_trace
from treadle.costs import Costs, load_costs
from treadle.ir import Action, B, Cell, F, I, Kind, Pair, Placement, Schedule, W
from treadle.ir.notebook import set_renderer
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.plan import LoweringOptions, lower
from treadle.schedules import generate

# The functions `verify` and `simulate` hide the packages of these names as attributes of `treadle`. Imports still find
# the packages: `import treadle.verify.codes`, `from treadle.verify.codes import CODES`. An expression does not:
# `treadle.verify.codes` asks the function.
from treadle.simulate import compare, critical_path, fit, measure, simulate
from treadle.verify import Finding, VerifyReport, explain, verify_program
from treadle.verify import verify_schedule as verify

if TYPE_CHECKING:
    from treadle import moe, update
    from treadle.drawing import draw
    from treadle.runtime import Boundary, Pipeline, RankLostError, RunOptions, StageOutput, StepReport
    from treadle.runtime.model.segments import Segment, compute, exchange

__version__ = "0.1.0"

__all__ = [
    "Action",
    "B",
    "Boundary",
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
    "RunOptions",
    "Schedule",
    "Segment",
    "StageOutput",
    "StepReport",
    "Trace",
    "VerifyReport",
    "W",
    "compare",
    "compute",
    "critical_path",
    "draw",
    "dumps",
    "exchange",
    "explain",
    "fit",
    "generate",
    "load",
    "load_any",
    "load_costs",
    "loads",
    "lower",
    "measure",
    "moe",
    "save_trace",
    "simulate",
    "update",
    "verify",
    "verify_program",
]

_RUNTIME, _SEGMENTS = "treadle.runtime", "treadle.runtime.model.segments"
_NEEDS_TORCH = {
    **dict.fromkeys(
        ("Boundary", "Pipeline", "RankLost", "RankLostError", "RunOptions", "StageOutput", "StepReport"), _RUNTIME
    ),
    **dict.fromkeys(("Segment", "compute", "exchange"), _SEGMENTS),
    "draw": "treadle.drawing",
}
"""Names that are imported when they are first asked for, so that planning works without torch."""

_PACKAGES = ("moe", "update")


def __getattr__(name: str) -> Any:
    """Import a name that needs torch, or raise an ImportError that says how to install it."""
    if name not in _NEEDS_TORCH and name not in _PACKAGES:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    try:
        module = import_module(_NEEDS_TORCH.get(name, f"treadle.{name}"))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "msgspec", "xxhash", "safetensors"):
            raise
        extra = "update" if name == "update" else "run"
        text = f"treadle.{name} needs {error.name}; install it with: pip install 'treadle[{extra}]'"
        raise ImportError(text) from error
    return module if name in _PACKAGES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _html(shown: object) -> str:
    from treadle.notebook import html

    return html(shown)


set_renderer(_html)
