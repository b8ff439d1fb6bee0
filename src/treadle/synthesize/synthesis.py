"""`synthesize_schedule`, as people call it."""

from __future__ import annotations

import time

from treadle.costs import Costs, load_costs
from treadle.ir import Placement
from treadle.lowering import LoweringOptions
from treadle.synthesize.limits import MemoryLimits
from treadle.synthesize.make_problem import make_problem
from treadle.synthesize.order_search import OrderSearch, Progress
from treadle.synthesize.result import Synthesis
from treadle.synthesize.solver import SolverOptions, cp_model


def synthesize_schedule(
    *,
    pp: int,
    microbatches: int,
    vpp: int | None = None,
    placement: str | Placement = "loop",
    costs: Costs | str = "unit",
    limits: MemoryLimits | None = None,
    whole: bool = False,
    options: LoweringOptions | None = None,
    solver: SolverOptions | None = None,
    progress: Progress | None = None,
) -> Synthesis:
    """Find an order of cells that is no slower than any schedule of ours, and a bound on how fast one can be.

    Args:
        pp: ranks of the pipeline.
        microbatches: of a step; with two pipes, of both together.
        vpp: chunks on each rank; None for 1, or 2 where the placement needs two.
        placement: loop, v, bidirectional, a table such as 0,2/1,3, or a Placement.
        costs: how long cells and messages take and what layers save, or their name.
        limits: what a rank may hold.
        whole: keep backwards whole, for models whose weight gradients are not split off.
        options: the model's layers or blocks, at the grain of cells.
        solver: time limit, workers and seed.
        progress: is called with the standing after every better order.

    Returns:
        The Synthesis: a verified schedule, its makespan by the simulator, the bound.

    Raises:
        ModuleNotFoundError: OR-Tools is not installed.
        ValueError: sizes do not fit, no order keeps the limits, or none was found in time.

    Example:
        >>> found = synthesize_schedule(pp=2, microbatches=4, limits=MemoryLimits(max_activations=2))
        >>> found.clock.show(found.makespan), found.proven
        (13, True)

    """
    began = time.monotonic()
    cp_model()  # without it there is nothing to do: raise before anything is generated
    if not isinstance(placement, Placement):
        for name, size in (("pp", pp), ("vpp", vpp)):
            if size is not None and size < 1:
                raise ValueError(f"{name} is a whole number from 1, got {size}")
        chunks = vpp if vpp is not None else _default_vpp(placement)
        placement = Placement.parse(placement, pp, chunks)
    loaded = load_costs(costs) if isinstance(costs, str) else costs
    problem = make_problem(placement, microbatches, loaded, options=options, limits=limits, whole=whole)
    return OrderSearch(problem, solver if solver is not None else SolverOptions(), progress, began=began).run()


def _default_vpp(placement: str) -> int:
    if "," in placement or "/" in placement:
        return placement.partition("/")[0].count(",") + 1
    return 1 if placement == "loop" else 2
