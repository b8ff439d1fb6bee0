"""Treadle: a distributed training step as data. Plan it, write it, verify it, simulate it, run it.

import treadle

found = treadle.plan("llama3-8b", "h100:16")               # what to launch
print(treadle.why("profile/").cause.sentence)              # why a run is slow
schedule = treadle.generate("dualpipe", pp=8, microbatches=20)
print(treadle.verify(schedule), treadle.simulate(schedule, "deepseek-v3-h800").seconds)

Names are imported when they are first asked for: `import treadle` takes milliseconds, and planning works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treadle.host.extras import brought_by

if TYPE_CHECKING:
    from treadle import ir as ir
    from treadle import models as models
    from treadle import moe as moe
    from treadle import runtime as runtime
    from treadle import update as update
    from treadle.api.advice import balance, why
    from treadle.api.load_save import dumps, load, loads, save_trace
    from treadle.api.verbs import compare, lower, simulate, verify
    from treadle.costs import Costs, load_costs
    from treadle.drawing import draw
    from treadle.ir import Schedule
    from treadle.ir.program import Program
    from treadle.ir.trace import Trace
    from treadle.lowering.options import LoweringOptions
    from treadle.planner.find_plan import find_plan as plan
    from treadle.profiles.importing import import_profile
    from treadle.runtime import Pipeline, RankLostError, RunOptions, StageOutput
    from treadle.schedules import generate
    from treadle.simulator import fit, measure

__version__ = "0.1.0"

__all__ = [
    "Costs",
    "LoweringOptions",
    "Pipeline",
    "Program",
    "RankLostError",
    "RunOptions",
    "Schedule",
    "StageOutput",
    "Trace",
    "balance",
    "compare",
    "draw",
    "dumps",
    "fit",
    "generate",
    "import_profile",
    "load",
    "load_costs",
    "loads",
    "lower",
    "measure",
    "plan",
    "save_trace",
    "simulate",
    "verify",
    "why",
]

_WHERE = {
    "treadle.api.advice": ("balance", "why"),
    "treadle.api.load_save": ("dumps", "load", "loads", "save_trace"),
    "treadle.api.verbs": ("compare", "lower", "simulate", "verify"),
    "treadle.costs": ("Costs", "load_costs"),
    "treadle.drawing": ("draw",),
    "treadle.ir": ("Schedule",),
    "treadle.ir.program": ("Program",),
    "treadle.ir.trace": ("Trace",),
    "treadle.lowering.options": ("LoweringOptions",),
    "treadle.profiles.importing": ("import_profile",),
    "treadle.runtime": ("Pipeline", "RankLostError", "RunOptions", "StageOutput"),
    "treadle.schedules": ("generate",),
    "treadle.planner.find_plan": ("plan",),
    "treadle.simulator": ("fit", "measure"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
_DEFINED_AS = {"plan": "find_plan"}
"""Names that their modules define under another one."""

_PACKAGES = (
    "api",
    "costs",
    "estimate",
    "files",
    "ir",
    "models",
    "moe",
    "passes",
    "planner",
    "profiles",
    "recorder",
    "runtime",
    "schedules",
    "simulator",
    "synthesize",
    "update",
    "verifier",
    "view",
    "weights",
)

_EXTRAS = {"update": "update", "models": "train", "synthesize": "plan"}
"""The extras that packages need beside torch."""


def __getattr__(name: str) -> Any:
    """Import a name, or raise an ImportError that says what to install."""
    if name not in _MODULE_OF and name not in _PACKAGES:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    with brought_by(_EXTRAS.get(name, "run"), needed_by=f"treadle.{name}"):
        module = import_module(_MODULE_OF.get(name, f"treadle.{name}"))
    value = module if name in _PACKAGES else getattr(module, _DEFINED_AS.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
