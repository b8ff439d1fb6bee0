"""Treadle: a distributed training step as data. Write it, verify it, simulate it.

import treadle

schedule = treadle.generate("dualpipe", pp=8, microbatches=20)
print(treadle.verify(schedule))

Names are imported when they are first asked for: `import treadle` takes milliseconds, and planning works without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from treadle.host.extras import brought_by

if TYPE_CHECKING:
    from treadle import models, moe, update
    from treadle.api.files import dumps, load, load_any, loads, save_trace
    from treadle.api.step import lower, simulate, verify
    from treadle.costs import Costs, load_costs
    from treadle.drawing import draw
    from treadle.host.errors import TreadleError
    from treadle.ir import Action, B, Cell, F, I, Kind, Pair, Placement, Schedule, W
    from treadle.ir.program import Program
    from treadle.ir.trace import Trace
    from treadle.plan import LoweringOptions
    from treadle.profiles.importing import import_profile
    from treadle.runtime import (
        Boundary,
        FurtherLoss,
        MTPBlock,
        Pipeline,
        RankLostError,
        RunOptions,
        StageOutput,
        StepReport,
    )
    from treadle.runtime.model.segments import Segment, compute, exchange
    from treadle.schedules import generate
    from treadle.simulate import Durations, compare, critical_path, fit, measure
    from treadle.verify import Finding, VerifyReport, explain, verify_program

__version__ = "0.1.0"

__all__ = [
    "Action",
    "B",
    "Boundary",
    "Cell",
    "Costs",
    "Durations",
    "F",
    "Finding",
    "FurtherLoss",
    "I",
    "Kind",
    "LoweringOptions",
    "MTPBlock",
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
    "TreadleError",
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
    "import_profile",
    "load",
    "load_any",
    "load_costs",
    "loads",
    "lower",
    "measure",
    "models",
    "moe",
    "save_trace",
    "simulate",
    "update",
    "verify",
    "verify_program",
]

_WHERE = {
    "treadle.api.files": ("dumps", "load", "load_any", "loads", "save_trace"),
    "treadle.api.step": ("lower", "simulate", "verify"),
    "treadle.costs": ("Costs", "load_costs"),
    "treadle.ir": ("Action", "B", "Cell", "F", "I", "Kind", "Pair", "Placement", "Schedule", "W"),
    "treadle.ir.program": ("Program",),
    "treadle.ir.trace": ("Trace",),
    "treadle.host.errors": ("TreadleError",),
    "treadle.plan": ("LoweringOptions",),
    "treadle.profiles.importing": ("import_profile",),
    "treadle.runtime": (
        "Boundary",
        "FurtherLoss",
        "MTPBlock",
        "Pipeline",
        "RankLost",
        "RankLostError",
        "RunOptions",
        "StageOutput",
        "StepReport",
    ),
    "treadle.drawing": ("draw",),
    "treadle.runtime.model.segments": ("Segment", "compute", "exchange"),
    "treadle.schedules": ("generate",),
    "treadle.simulate": ("Durations", "compare", "critical_path", "fit", "measure"),
    "treadle.verify": ("Finding", "VerifyReport", "explain", "verify_program"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
_PACKAGES = (
    "api",
    "costs",
    "estimate",
    "export",
    "ir",
    "models",
    "moe",
    "passes",
    "plan",
    "profiles",
    "runtime",
    "schedules",
    "search",
    "synthesize",
    "update",
    "view",
    "weights",
    "why",
)

_EXTRAS = {"update": "update", "models": "train", "synthesize": "plan"}
"""The extras that packages need beside torch."""

_FUNCTIONS = ("simulate", "verify")
"""Functions that hide the packages of their names as attributes of `treadle`. Imports still find the packages:
`from treadle.verify.codes import CODES`. An expression does not: `treadle.verify.codes` asks the function."""


class _Treadle(ModuleType):
    """The class of this package. Python sets an imported package as an attribute of its parent; not those two."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _FUNCTIONS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Treadle


def __getattr__(name: str) -> Any:
    """Import a name, or raise an ImportError that says what to install."""
    if name not in _MODULE_OF and name not in _PACKAGES:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    with brought_by(_EXTRAS.get(name, "run"), needed_by=f"treadle.{name}"):
        module = import_module(_MODULE_OF.get(name, f"treadle.{name}"))
    value = module if name in _PACKAGES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
