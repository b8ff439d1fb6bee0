"""The step of a job, simulated; where it has many micro-batches, from simulations of few.

From 2P micro-batches on, each further P of them add the same time to the makespan, as long as all micro-batches cost
the same: a pipeline has come to its rhythm by then. Three sizes show whether it has. Where it has not (a stage that is
a little slower than the others takes many micro-batches to show), larger ones are tried, and then the whole step.
Where stages are alike that is exact; where they differ a rhythm may still change later, so a search simulates whole
what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from treadle.costs import Costs, ticks
from treadle.ir.execute import Times, execute
from treadle.ir.memory import peaks
from treadle.ir.ops import COMPUTE_PARTS, COPIES, KIND_OF, MESSAGES, LaneKind, OpKind, OpPhase, where
from treadle.ir.program import Program
from treadle.ir.trace import MICROSECONDS
from treadle.lowering.lower import with_saved
from treadle.planner.structure import Structure, Variant
from treadle.schedules import family

_ROUNDS = (2, 6)
"""Multiples of P from which on the rhythm is looked for."""
NEAR = 1.05
"""A simulation of few micro-batches is right to within so much: its time, and its memory where activations are
offloaded. What is shown is simulated whole."""
_DEPTH, _SHARES = 2, 20
"""Choices of `lower` are compared over at most so many layers a stage, with times in such shares of a layer's."""
_GROUPS = (
    *(tuple(KIND_OF[part, phase].cost_key for phase in (OpPhase.F, OpPhase.B, OpPhase.W)) for part in COMPUTE_PARTS),
    tuple(kind.cost_key for kind in where(lane=LaneKind.EP) if kind is not OpKind.COUNTS),
)
_MESSAGES = tuple(dict.fromkeys(kind.cost_key for kind in (*MESSAGES, *COPIES)))


class StepTime(NamedTuple):
    """A simulated step: its ticks, and the most bytes of saved activations that each rank holds where it offloads."""

    ticks: int
    held: tuple[int, ...] = ()


def simulate_step(structure: Structure, microbatches: int, costs: Costs) -> StepTime:
    """Simulate a step of a job, with about the choices that `treadle.lower` would make.

    Raises:
        ValueError: the step does not finish.

    """
    return simulate_variant(structure, microbatches, choose_variant(structure, costs), costs)


def simulate_variant(structure: Structure, microbatches: int, variant: Variant, costs: Costs) -> StepTime:
    """Simulate a step; one of many micro-batches by its rhythm."""
    pp = structure.pp
    for rounds in _ROUNDS if family(structure.schedule).regular else ():
        first = rounds * pp + microbatches % pp
        if microbatches <= 2 * first:
            break
        once, twice, thrice = (every_microbatch(structure, first + more * pp, variant, costs) for more in range(3))
        if thrice.ticks - twice.ticks == twice.ticks - once.ticks:
            more = (twice.ticks - once.ticks) * ((microbatches - first) // pp)
            return StepTime(once.ticks + more, thrice.held)
    return every_microbatch(structure, microbatches, variant, costs)


def simulate_whole(structure: Structure, microbatches: int, costs: Costs) -> StepTime:
    """Simulate every micro-batch of a step, of the Program that every command makes from the job's files."""
    program = structure.lower(microbatches, costs)
    times = _times(program, costs)
    held = tuple(peaks(program, times).size.tolist()) if structure.options.offload else ()
    return StepTime(int(times.end.max(initial=0)), held)


def choose_variant(structure: Structure, costs: Costs) -> Variant:
    """Return the choices that make a short step of alike stages fastest, where times are rounded.

    `lower` compares them on the job itself. Here jobs that are nearly alike share the comparison.
    """
    layers = sum(row.count("t") + row.count("d") for row in structure.blocks)
    depth = max(1, min(_DEPTH, layers // len(structure.blocks)))
    options = replace(structure.options, blocks=("t" * depth,) * len(structure.blocks), dp=1)
    alike = replace(structure, options=options, step_end=())
    unit = max(1, sum(costs.layer.values())) / _SHARES
    means = (sum(costs.layer.get(name, 0) for name in names) / len(names) for names in _GROUPS)
    messages = (costs.message.get(name, 0) for name in _MESSAGES)
    return _chosen_variant(alike, tuple(round(time / unit) for time in (*means, *messages)))


@lru_cache(maxsize=65536)
def _chosen_variant(structure: Structure, times: tuple[int, ...]) -> Variant:
    """Choose for times of attention, MLP and exchanges, each part of them alike, and of messages."""
    layer = {name: time for names, time in zip(_GROUPS, times, strict=False) for name in names}
    costs = Costs(
        "rounded", MICROSECONDS, layer=layer, message=dict(zip(_MESSAGES, times[len(_GROUPS) :], strict=True))
    )

    def faster(variants: Iterable[Variant]) -> Variant:
        return min(variants, key=lambda variant: every_microbatch(structure, 2 * structure.pp, variant, costs).ticks)

    best = faster(Variant(hold, early) for hold, early in product((False, True), (False, True)))
    return faster((best, best._replace(early_recompute=True))) if structure.options.recompute else best


def every_microbatch(structure: Structure, microbatches: int, variant: Variant, costs: Costs) -> StepTime:
    """Simulate all micro-batches of a step."""
    program = structure.program(microbatches, variant)
    times = _times(program, costs)
    held: tuple[int, ...] = ()
    if structure.options.offload:
        held = tuple(peaks(with_saved(program, costs, structure.options), times).size.tolist())
    return StepTime(int(times.end.max(initial=0)), held)


def _times(program: Program, costs: Costs) -> Times:
    times = execute(program, ticks(program, costs))
    if not times.finished:
        raise ValueError("the program of a candidate does not finish: 'treadle verify' shows why")
    return times
