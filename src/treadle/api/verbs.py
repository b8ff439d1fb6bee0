"""What people do with a step, as functions: lower, verify, simulate, compare. Each builds a `treadle.step.Step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, get_args

from treadle.costs import Costs, load_costs
from treadle.host.errors import named
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.trace import Trace
from treadle.lowering.options import WHOLE_CELLS, LoweringOptions
from treadle.simulator.compare import Comparison
from treadle.simulator.compare import compare as compare_traces
from treadle.simulator.predict import Durations
from treadle.simulator.predict import simulate as simulate_program
from treadle.simulator.slowness import Factors
from treadle.step import Step, Target, steps_of
from treadle.verifier import Communicators, ReceiveOrder, VerifyReport
from treadle.verifier.communicator_queues import COMMUNICATORS
from treadle.weights.update_plan import UpdatePlan

CostsOrName: TypeAlias = Costs | str
"""Costs, or what `load_costs` takes: `unit`, a preset, or the path of a TOML file."""


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
        >>> lower(schedule, "deepseek-v3-h800", treadle.LoweringOptions(layers=1, moe=True)).num_ranks
        2

    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"lower takes a Schedule, got {named(schedule)}; {_way_out(schedule)}")
    return make_step(schedule, costs, options).program


def verify(
    target: Schedule | Program | Trace,
    costs: CostsOrName = "unit",
    options: LoweringOptions | None = None,
    *,
    receives: ReceiveOrder = "sender",
    ring: int | None = None,
    max_activations: int | None = None,
    memory_limit: int | None = None,
    communicators: Communicators | None = None,
    lazy: bool = False,
) -> VerifyReport:
    """Check that a schedule or a program finishes, with the right data, within its memory.

    A sound Schedule whose layers are known, by `options` or by costs of a model, is lowered, and its Program is checked
    too.

    Args:
        target: a Schedule, a Program or a Trace (whose program is checked), sound or not.
        costs: how long ops take, on which what a Program holds at once depends; or their name.
        options: of a Schedule: how it is lowered.
        receives: of a Schedule: the order in which receives are posted where the schedule does not give one.
        ring: receive buffers on each channel; None for as many as there are messages.
        max_activations: of a Schedule: the most activations of (mb, chunk) that a rank may hold at once.
        memory_limit: of a Program, or a Schedule whose layers are known: the most bytes of activations that a rank may
            hold at once.
        communicators: which channels share a communicator: none ("channel"), those of one direction of the pipe
            ("direction"), of a pair of ranks ("pair") or all ("group"). None for "pair" if the schedule has an order of
            issue, as torch's files with messages do, else each channel is judged by itself.
        lazy: communicators are made at their first message, and making one waits for all its ranks.

    Returns:
        All findings, worst first, and each rank's peak.

    Raises:
        TypeError: `target` is something else.
        ValueError: a limit does not apply to this target, or it is a measured run that cannot be verified.

    Example:
        >>> print(verify(treadle.generate("dualpipe", pp=4, microbatches=8)))
        clean: 4 ranks, 62 cells, peak 5 activations

    """
    if not isinstance(target, Schedule | Program | Trace):
        raise TypeError(f"verify takes a Schedule, a Program or a Trace, got {named(target)}; {_way_out(target)}")
    if communicators not in (None, *COMMUNICATORS):
        raise ValueError(f"communicators are None or one of {', '.join(COMMUNICATORS)}, got {communicators!r}")
    if receives not in get_args(ReceiveOrder):
        raise ValueError(f"receives are one of {', '.join(get_args(ReceiveOrder))}, got {receives!r}")
    step = make_step(target, costs, options)
    return step.verify(
        receives=receives,
        ring=ring,
        max_activations=max_activations,
        memory_limit=memory_limit,
        communicators=communicators,
        lazy=lazy,
    ).report


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
        target: a Program that finishes, or a sound Schedule, which is lowered with `options` first.
        costs: how long ops take; or their name; or, of a Program, Durations: one for each op.
        options: of a Schedule: how it is lowered; by default to whole cells.
        slowness: each rank is slower by a random share of up to this much, 0.05 is 5 %; or an array with the factor of
            each rank, which multiplies all its times.
        seed: of that share.

    Returns:
        A Trace: the Program with a start and an end for each op.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the schedule is not sound, the program does not finish (`treadle.verify` explains why), or no costs
            have this name.

    Example:
        >>> trace = simulate(treadle.generate("gpipe", pp=2, microbatches=2))
        >>> trace.clock.show(trace.makespan)
        9

    """
    if not isinstance(target, Schedule | Program):
        raise TypeError(f"simulate takes a Schedule or a Program, got {named(target)}; {_way_out(target)}")
    if isinstance(costs, Durations):
        if isinstance(target, Schedule):
            raise ValueError("Durations are one for each op of a Program; lower the schedule first: treadle.lower(...)")
        return simulate_program(target, costs, slowness=slowness, seed=seed)
    return make_step(target, costs, options, slowness=slowness, seed=seed).trace


def compare(
    *targets: Schedule | Program | Trace,
    costs: CostsOrName = "unit",
    options: LoweringOptions | None = None,
    names: Sequence[str] | None = None,
) -> Comparison:
    """Compare schedules, programs or traces with the first one; two traces of one program op by op.

    All schedules get the same model: that of `options` or costs, or the smallest that all of them cut evenly.

    Args:
        targets: two or more; what has no times yet is simulated.
        costs: how long ops take; or their name.
        options: of schedules: how they are lowered.
        names: of each; by default those of the schedules.

    Returns:
        A row for each; `ops` has the ops of two traces of one program, or `why_not` says why there are none.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there are fewer than two, their clocks differ, or the schedules would get different models.

    Example:
        >>> schedules = [treadle.generate(name, pp=4, microbatches=8) for name in ("1f1b", "zb-h1")]
        >>> [(row.name, round(row.makespan.ratio, 3)) for row in compare(*schedules).rows]
        [('1f1b', 1.0), ('zb-h1', 0.818)]

    """
    if len(targets) < 2:
        raise ValueError(f"comparing takes at least two, got {len(targets)}: treadle.compare(one, other)")
    for target in targets:
        if not isinstance(target, Schedule | Program | Trace):
            raise TypeError(f"compare takes Schedules, Programs and Traces, got {named(target)}; {_way_out(target)}")
    if names is not None and len(names) != len(targets):
        raise ValueError(f"names are one for each of {len(targets)}, got {len(names)}")
    called = list(names) if names is not None else names_of(targets)
    steps = steps_of(list(zip(called, targets, strict=True)), checked_costs(costs), checked_options(options))
    return compare_steps(steps)


def compare_steps(steps: Sequence[Step]) -> Comparison:
    """Compare the traces of steps, each under its name."""
    return compare_traces([(step.name, step.trace) for step in steps])


def names_of(targets: Sequence[Target]) -> list[str]:
    """Return a name for each target: a schedule's own, or what it is; where two are alike, with a number."""
    names: list[str] = []
    for target in targets:
        name = target.name if isinstance(target, Schedule) else _kind(target)
        number = sum(each == name or each.startswith(f"{name} (") for each in names)
        names.append(f"{name} ({number + 1})" if number else name)
    return names


def make_step(target: Target, costs: Any = "unit", options: Any = None, **more: Any) -> Step:
    """Return the step of a target, with costs by name and default options.

    Raises:
        TypeError: costs or options are of another type.
        ValueError: options are given for what is lowered already, or no costs have this name.

    """
    if options is not None and not isinstance(target, Schedule):
        raise ValueError("options set how a Schedule is lowered, and this is lowered already; leave them out")
    return Step(target, checked_costs(costs), checked_options(options), **more)


def checked_costs(given: Any) -> Costs:
    """Return costs, loaded by name if need be; raise a TypeError if it is something else."""
    if isinstance(given, str):
        return load_costs(given)
    if not isinstance(given, Costs):
        raise TypeError(f"costs are Costs or a name that treadle.load_costs takes, such as 'unit', got {named(given)}")
    return given


def checked_options(given: Any) -> LoweringOptions:
    """Return options, by default those of whole cells; raise a TypeError if it is something else."""
    if given is None:
        return WHOLE_CELLS
    if not isinstance(given, LoweringOptions):
        raise TypeError(f"options are treadle.LoweringOptions(...), got {named(given)}")
    return given


def _kind(target: Program | Trace | UpdatePlan) -> str:
    if isinstance(target, Trace):
        return "measured" if target.measured else "predicted"
    return "program" if isinstance(target, Program) else "update"


def _way_out(value: object) -> str:
    if isinstance(value, str):
        return f"treadle.generate({value!r}, pp=..., microbatches=...) makes one, treadle.load reads a file"
    if isinstance(value, Trace):
        return "a Trace has its Program: trace.program"
    if isinstance(value, Program):
        return "this Program is lowered already"
    return "treadle.generate makes a Schedule, treadle.load reads a file"
