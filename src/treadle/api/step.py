"""Lowering, verifying and simulating as people call them: with defaults, costs by name, and errors in a sentence."""

from __future__ import annotations

from typing import Any, TypeAlias

import treadle.plan.lowering as lowering
from treadle.costs import Costs, durations, load_costs
from treadle.host.errors import named
from treadle.ir import Schedule
from treadle.ir.program import OpKind, Program
from treadle.ir.trace import Trace
from treadle.plan import LoweringOptions
from treadle.simulate.predict import Durations
from treadle.simulate.predict import simulate as simulate_program
from treadle.simulate.slowness import Factors
from treadle.verify import ReceiveOrder, VerifyReport, verify_program, verify_schedule
from treadle.weights.rates import simulate_update
from treadle.weights.verify import verify_update

CostsOrName: TypeAlias = Costs | str
"""Costs, or what `load_costs` takes: `unit`, a preset, or the path of a TOML file."""


_MEASURED_ONLY = {int(OpKind.GC), int(OpKind.REDUCE_LAYERNORM)}
"""Kinds that no lowering makes."""


def lower(schedule: Schedule, costs: CostsOrName = "unit", options: LoweringOptions | None = None) -> Program:
    """Lower a schedule to a Program: ops on lanes, with what they wait for.

    Args:
        schedule: verified or not.
        costs: durations, by which launches are ordered and `hold` and `early` are chosen, and sizes in bytes; or their
            name.
        options: by default whole cells.

    Returns:
        The Program of all ranks.

    Raises:
        TypeError: an argument is of another type.
        ValueError: options do not fit the schedule, or no costs have this name.

    Example:
        >>> schedule = treadle.generate("1f1b", pp=2, microbatches=4)
        >>> lower(schedule, "deepseek-v3-h800", treadle.LoweringOptions(layers=1)).num_ranks
        2

    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"lower takes a Schedule, got {named(schedule)}; {_way_out(schedule)}")
    return lowering.lower(schedule, _costs(costs), _options(options))


def verify(
    target: Schedule | Program | Trace,
    *,
    costs: CostsOrName = "unit",
    eager: bool = False,
    receives: ReceiveOrder = "sender",
    ring: int | None = None,
    max_activations: int | None = None,
    memory_limit: int | None = None,
) -> VerifyReport:
    """Check that a schedule or a program finishes, with the right data, within its memory.

    Args:
        target: a Schedule, a Program or a Trace (whose program is checked), sound or not.
        costs: of a Program: how long ops take, on which what it holds at once depends.
        eager: of a Schedule: sends do not wait for their receives.
        receives: of a Schedule: the order in which receives are posted where the schedule does not say.
        ring: receive buffers on each channel; None for as many as there are messages.
        max_activations: of a Schedule: the most activations of (mb, chunk) that a rank may hold at once.
        memory_limit: of a Program: the most bytes of activations that a rank may hold at once.

    Returns:
        All findings, worst first, and each rank's peak.

    Raises:
        TypeError: `target` is something else.
        ValueError: a limit does not apply to this target.

    Example:
        >>> print(verify(treadle.generate("dualpipe", pp=4, microbatches=8)))
        clean: 4 ranks, 62 cells, peak 5 activations

    """
    if isinstance(target, Schedule):
        if memory_limit is not None:
            raise ValueError(
                "memory_limit is in bytes, which a Program knows; verify treadle.lower(schedule, costs, "
                "LoweringOptions(layers=...)), or limit the schedule's max_activations"
            )
        return verify_schedule(target, eager=eager, receives=receives, ring=ring, max_activations=max_activations)
    if isinstance(target, Trace):
        target = target.program
    if not isinstance(target, Program):
        raise TypeError(f"verify takes a Schedule, a Program or a Trace, got {named(target)}; {_way_out(target)}")
    for name, given in (("eager", eager), ("receives", receives != "sender"), ("max_activations", max_activations)):
        if given:
            raise ValueError(f"{name} is for schedules: a Program has its messages and lanes already; leave it out")
    if target.layout.is_update:
        return verify_update(target)
    around = sorted({OpKind(kind).name.lower() for kind in set(target.kind.tolist()) & _MEASURED_ONLY})
    if around:
        raise ValueError(
            f"this is a measured run with {' and '.join(around)} around its cells, of which no rule says anything; "
            "verify the schedule that ran: `treadle import PROFILE --schedule ran.txt` writes it"
        )
    return verify_program(target, durations(target, _costs(costs)), ring=ring, memory_limit=memory_limit)


def simulate(
    target: Schedule | Program,
    costs: CostsOrName | Durations = "unit",
    options: LoweringOptions | None = None,
    *,
    slowness: float | Factors = 0.0,
    seed: int = 0,
) -> Trace:
    """Predict when each op starts and ends.

    Args:
        target: a Program that finishes, or a Schedule, which is lowered with `options` first.
        costs: how long ops take; or their name; or, of a Program, Durations: one for each op.
        options: of a Schedule: how it is lowered; by default to whole cells.
        slowness: each rank is slower by a random share of up to this much, 0.05 is 5 %; or an array with the factor of
            each rank, which multiplies all its times.
        seed: of that share.

    Returns:
        A Trace: the Program with a start and an end for each op.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the program does not finish (`treadle.verify` says why), or no costs have this name.

    Example:
        >>> trace = simulate(treadle.generate("gpipe", pp=2, microbatches=2))
        >>> trace.clock.show(trace.makespan)
        9

    """
    if isinstance(target, Schedule):
        if isinstance(costs, Durations):
            raise ValueError("Durations are one for each op of a Program; lower the schedule first: treadle.lower(...)")
        target = lower(target, costs, options)
    elif options is not None:
        raise ValueError("options say how a Schedule is lowered, and this Program is; leave them out")
    if not isinstance(target, Program):
        raise TypeError(f"simulate takes a Schedule or a Program, got {named(target)}; {_way_out(target)}")
    if target.layout.is_update:
        return simulate_update(target)
    how_long = costs if isinstance(costs, Durations) else _costs(costs)
    return simulate_program(target, how_long, slowness=slowness, seed=seed)


def _costs(given: Any) -> Costs:
    if isinstance(given, str):
        return load_costs(given)
    if not isinstance(given, Costs):
        raise TypeError(f"costs are Costs or a name that treadle.load_costs takes, such as 'unit', got {named(given)}")
    return given


def _options(given: Any) -> LoweringOptions:
    if given is None:
        return LoweringOptions()
    if not isinstance(given, LoweringOptions):
        raise TypeError(f"options are treadle.LoweringOptions(...), got {named(given)}")
    return given


def _way_out(value: object) -> str:
    if isinstance(value, str):
        return f"treadle.generate({value!r}, pp=..., microbatches=...) makes one, treadle.load_any reads a file"
    if isinstance(value, Trace):
        return "a Trace has its Program: trace.program"
    if isinstance(value, Program):
        return "this Program is lowered already"
    return "treadle.generate makes a Schedule, treadle.load_any reads a file"
