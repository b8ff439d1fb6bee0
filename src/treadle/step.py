"""A step: from what a user named to its Program, report, Trace, metrics and critical path.

The command line, `treadle.lower`, `verify`, `simulate`, `compare`, `draw` and notebooks all build a `Step`. Each
product is made once, when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from treadle.costs import UNIT_COSTS, Costs, durations, missing
from treadle.folding.folded_metrics import measure_folded
from treadle.folding.folded_path import folded_path
from treadle.folding.folding import Folded, fold, num_simulated
from treadle.folding.step_tail import why_not
from treadle.ir import Schedule
from treadle.ir.ops import MEASURED_ONLY, OpKind
from treadle.ir.program import Ints, Layout, Program
from treadle.ir.trace import Trace
from treadle.lowering.lower import lower
from treadle.lowering.options import WHOLE_CELLS, LoweringOptions
from treadle.passes.cells import ReceiveOrder, lower_cells
from treadle.passes.cut import common_layers
from treadle.passes.issue_order import issue_order
from treadle.simulator import Metrics, PathSummary, critical_path, measure, simulate, summarize_path
from treadle.simulator.slowness import Factors, Stragglers, checked_factors, slow_factors
from treadle.verifier import Communicators, Finding, VerifyReport, verify_program, verify_schedule
from treadle.verifier.communicator_checks import judge_in_turn
from treadle.verifier.communicator_queues import Judgement, out_of_turn
from treadle.view.hang import Hang, run_to_hang
from treadle.weights.bucket_stream import stream_of
from treadle.weights.summary import UpdateMetrics, measure_update
from treadle.weights.update_checks import verify_update
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import UpdatePlan
from treadle.weights.update_rates import simulate_update

Target: TypeAlias = Schedule | Program | Trace | UpdatePlan
"""What a user names, or what a file held."""


class Verdict(NamedTuple):
    """A report, and the Program that it is of; None where a Schedule was judged."""

    report: VerifyReport
    program: Program | None


class Hanging(NamedTuple):
    """A step that does not finish: its Trace up to there, where it hangs, and the finding that explains it."""

    trace: Trace
    hang: Hang
    finding: Finding


class SharedHang(NamedTuple):
    """How a schedule hangs on shared communicators: its ops, those that each rank issues, in order, and the verdict."""

    program: Program
    issued: tuple[Ints, ...]
    judgement: Judgement


@dataclass(frozen=True, eq=False)
class Step:
    """One training step, or one weight update, with costs and options.

    Example:
        >>> from treadle import generate
        >>> step = Step(generate("1f1b", pp=4, microbatches=8))
        >>> step.report.clean, step.trace.clock.show(step.metrics.makespan)
        (True, 33)

    """

    target: Target
    costs: Costs = UNIT_COSTS
    options: LoweringOptions = WHOLE_CELLS
    """How a Schedule is lowered."""

    slowness: float | Factors = 0.0
    """Each rank is slower by a random share of up to this much; or the factor of each rank."""

    stragglers: Stragglers | None = None
    """Ranks that are slower than all others, besides."""

    seed: int = 0
    unfolded: bool = False
    """Simulate every GPU of a mesh, also those that are alike."""

    name: str = ""

    @cached_property
    def program(self) -> Program:
        """The Program; a Schedule's is lowered, sound or not.

        Raises:
            ValueError: options do not fit the schedule.

        """
        target = self.target
        if isinstance(target, Schedule):
            return lower(target, self.costs, self.options)
        if isinstance(target, UpdatePlan):
            return lower_update(stream_of(target))
        return target.program if isinstance(target, Trace) else target

    @property
    def is_update(self) -> bool:
        """True for a weight update, False for a training step."""
        return not isinstance(self.target, Schedule) and self.program.layout.is_update

    @cached_property
    def schedule_report(self) -> VerifyReport:
        """The report on a Schedule, without limits."""
        assert isinstance(self.target, Schedule)
        return verify_schedule(self.target)

    @cached_property
    def report(self) -> VerifyReport:
        """The report on the Schedule or Program, without limits."""
        return self.verify().report

    def verify(
        self,
        *,
        receives: ReceiveOrder = "sender",
        ring: int | None = None,
        max_activations: int | None = None,
        memory_limit: int | None = None,
        communicators: Communicators | None = None,
        lazy: bool = False,
    ) -> Verdict:
        """Judge a Schedule and, where its layers are known and it is sound, its Program; or judge a Program.

        A Schedule that has an order of issue, as torch's files with messages do, is judged with a communicator for
        each pair of ranks unless `communicators` says otherwise.

        Raises:
            ValueError: a limit does not apply to this target, or it is a measured run with ops that no rule covers.

        """
        if isinstance(self.target, Schedule):
            shared = communicators or ("pair" if self.target.issue or lazy else None)
            return self._verify_schedule(receives, ring, max_activations, memory_limit, shared, lazy)
        given = {"receives": receives != "sender" or None, "max_activations": max_activations}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` is for schedules: a Program has its messages and lanes already; leave it out"
                )
        program = self.program
        if self.is_update:
            if ring is not None:
                raise ValueError("`ring` is for the channels of a pipeline, which an update has none of; leave it out")
            if communicators is not None or lazy:
                raise ValueError("`communicators` and `lazy` are for the channels of a pipeline; leave them out")
            return Verdict(verify_update(program, memory_limit=memory_limit), program)
        around = sorted({OpKind(kind).name.lower() for kind in set(program.kind.tolist()) & set(MEASURED_ONLY)})
        if around:
            raise ValueError(
                f"this is a measured run with {' and '.join(around)} around its cells, which no rule covers, so it is "
                "not verified; verify the schedule that ran: 'treadle import PROFILE --schedule ran.txt' writes it"
            )
        shared = communicators or ("pair" if lazy else None)
        return Verdict(self._verify_program(ring, memory_limit, shared, lazy=lazy), program)

    def shared_hang(
        self, *, receives: ReceiveOrder = "sender", communicators: Communicators | None = None, lazy: bool = False
    ) -> SharedHang | None:
        """Return how a Schedule hangs on shared communicators, as `verify` judges it; None if it does not."""
        if not isinstance(self.target, Schedule):
            return None
        program = lower_cells(self.target, receives=receives)
        order = issue_order(self.target, program, receives=receives)
        if order is None or out_of_turn(program, order):
            return None
        judgement, _ = judge_in_turn(program, order, communicators or "pair", lazy=lazy)
        issued = tuple(order.op[start:stop] for start, stop in pairwise(order.ptr.tolist()))
        return SharedHang(program, issued, judgement) if judgement.circle else None

    def _verify_schedule(
        self,
        receives: ReceiveOrder,
        ring: int | None,
        max_activations: int | None,
        memory_limit: int | None,
        communicators: Communicators | None,
        lazy: bool,
    ) -> Verdict:
        assert isinstance(self.target, Schedule)
        knows_layers = self.options.knows_layers(self.costs)
        if memory_limit is not None:
            self._check_bytes(knows_layers)
        if (receives, ring, max_activations, communicators) == ("sender", None, None, None):
            report = self.schedule_report
        else:
            report = verify_schedule(
                self.target,
                receives=receives,
                ring=ring,
                max_activations=max_activations,
                communicators=communicators,
                lazy=lazy,
            )
        if not (knows_layers and report.clean):
            return Verdict(report, None)
        return Verdict(self._verify_program(ring, memory_limit), self.program)

    def _check_bytes(self, knows_layers: bool) -> None:
        if not knows_layers:
            raise ValueError(
                "`memory_limit` is in bytes, which need layers: add `layers=N` or `model_layers=N`; `max_activations` "
                "counts activations"
            )
        costs = self.costs
        silent = costs.unsaved(costs.blocks)
        if silent:
            raise ValueError(
                f"costs {costs.name!r} do not say what layers save, so `memory_limit` cannot be judged; add "
                f"[saved_bytes] {', '.join(silent)} to a costs file (0 where nothing is saved)"
            )

    def _verify_program(
        self,
        ring: int | None,
        memory_limit: int | None,
        communicators: Communicators | None = None,
        *,
        lazy: bool = False,
    ) -> VerifyReport:
        ticks = durations(self.program, self.costs)
        return verify_program(
            self.program, ticks, ring=ring, memory_limit=memory_limit, communicators=communicators, lazy=lazy
        )

    def check_sound(self) -> None:
        """Raise a ValueError if the target is a Schedule that is not sound."""
        if isinstance(self.target, Schedule) and not self.schedule_report.clean:
            finding = self.schedule_report.findings[0]
            raise ValueError(f"the schedule is not sound: {finding}; 'treadle verify' shows it all")

    @cached_property
    def trace(self) -> Trace:
        """The Trace: the target itself, or predicted.

        Raises:
            ValueError: the schedule is not sound, or the program does not finish.

        """
        if isinstance(self.target, Trace):
            return self.target
        self.check_sound()
        program = self.program
        if self.is_update:
            return simulate_update(program)
        slowness = self.slowness if self.stragglers is None else self._factors(program.num_ranks)
        return simulate(program, self.costs, slowness=0.0 if slowness is None else slowness, seed=self.seed)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """What the prediction takes as 0 because the costs do not give it."""
        if isinstance(self.target, Trace) or self.is_update:
            return ()
        return missing(self.pipeline if self.folds else self.program, self.costs)

    @cached_property
    def metrics(self) -> Metrics | UpdateMetrics:
        """The step in numbers."""
        if self.folds:
            return measure_folded(self.folded)
        return measure_update(self.trace) if self.is_update else measure(self.trace)

    @cached_property
    def path(self) -> PathSummary:
        """The critical path, summarized."""
        return folded_path(self.folded) if self.folds else summarize_path(self.trace, critical_path(self.trace))

    @property
    def about(self) -> str:
        """What was assumed, or where the step was measured."""
        return self.folded.about if self.folds else self.trace.about

    @cached_property
    def hanging(self) -> Hanging | None:
        """The step up to where it hangs; None if it finishes."""
        target = self.target
        if isinstance(target, Trace) or self.is_update or (isinstance(target, Schedule) and self.schedule_report.clean):
            return None
        found = run_to_hang(lower_cells(target) if isinstance(target, Schedule) else self.program, self.costs)
        if found is None:
            return None
        report = self.schedule_report if isinstance(target, Schedule) else self._verify_program(None, None)
        return Hanging(*found, report.findings[0])

    @property
    def has_replicas(self) -> bool:
        """True if every GPU is a rank and there is more than one pipeline."""
        return isinstance(self.target, Schedule) and self.options.every_gpu and self.options.ep * self.options.dp > 1

    @cached_property
    def pipeline(self) -> Program:
        """One pipeline, which stands for all of a mesh."""
        if not self.has_replicas:
            return self.program
        assert isinstance(self.target, Schedule)
        return lower(self.target, self.costs, replace(self.options, every_gpu=False))

    @cached_property
    def folds(self) -> bool:
        """True if GPUs that are alike are simulated once; `why_unfolded` says why not."""
        return self.has_replicas and not self.unfolded and self.why_unfolded is None

    @cached_property
    def why_unfolded(self) -> str | None:
        """Why the replicas cannot be folded, or None if they can."""
        return why_not(self.pipeline)

    @property
    def num_columns(self) -> int:
        """The columns of the mesh that a folded simulation goes through: those that differ."""
        return num_simulated(self.pipeline, ep=self.options.ep, dp=self.options.dp, slowness=self._mesh_factors)

    @cached_property
    def folded(self) -> Folded:
        """The step of every GPU, where those that are alike are simulated once.

        Raises:
            ValueError: the schedule is not sound, or the replicas cannot be folded.

        """
        self.check_sound()
        return fold(self.pipeline, self.costs, ep=self.options.ep, dp=self.options.dp, slowness=self._mesh_factors)

    @cached_property
    def _mesh_factors(self) -> Factors | None:
        return self._factors(self.pipeline.num_ranks * self.options.ep * self.options.dp)

    def _factors(self, num_ranks: int) -> Factors | None:
        """Return the factor of each rank; None if none is slower."""
        if not isinstance(self.slowness, int | float):
            return checked_factors(self.slowness, num_ranks)
        return slow_factors(num_ranks, self.slowness, self.stragglers, self.seed)


def steps_of(
    targets: Sequence[tuple[str, Target]], costs: Costs, options: LoweringOptions, *, used: bool = False
) -> list[Step]:
    """Return a step for each (name, target); where there are several, all schedules get one model.

    Options that no target reads are refused, unless the caller has a use for them.

    Raises:
        ValueError: the schedules would get models of different sizes, or the costs a slow stage that is not the same
            layers in all of them.

    """
    if not used and options != WHOLE_CELLS and not any(isinstance(target, Schedule) for _, target in targets):
        raise ValueError("options set how Schedules are lowered, and all of these are lowered already; leave them out")
    _check_stages(targets, costs)
    held = hold_model(targets, costs, options) if len(targets) > 1 else options
    return [Step(target, costs, held, name=name) for name, target in targets]


def _check_stages(targets: Sequence[tuple[str, Target]], costs: Costs) -> None:
    """Refuse factors of stages for schedules that cut a model into different numbers of stages."""
    stages = {target.placement.num_stages: name for name, target in targets if isinstance(target, Schedule)}
    if costs.stage and len(stages) > 1:
        (num, name), (other_num, other), *_ = stages.items()
        raise ValueError(
            f"costs {costs.name!r} have [stage.{min(costs.stage)}], whose layers depend on the cut: {name} has {num} "
            f"stages, {other} has {other_num}; leave their [stage] sections out, or compare schedules of as many stages"
        )


def hold_model(targets: Sequence[tuple[str, Target]], costs: Costs, options: LoweringOptions) -> LoweringOptions:
    """Return the options with the layers of the model that all schedules are given.

    That is what the options or the costs say; else the layers of a trace or program that knows them; else the smallest
    model that all schedules cut evenly. Where all have as many stages, and neither costs nor a trace know about layers,
    chunks are alike anyway and stay chunks.

    Raises:
        ValueError: the schedules would get models of different sizes.

    """
    stages = {name: target.placement.num_stages for name, target in targets if isinstance(target, Schedule)}
    if not stages or options.model_layers is not None or options.blocks is not None or costs.model:
        return options
    smallest = common_layers(stages.values())
    if options.layers is not None:
        if len(set(stages.values())) > 1 and isinstance(options.layers, int):
            each = ", ".join(f"{name} {options.layers * count}" for name, count in stages.items())
            raise ValueError(
                f"`layers={options.layers}` gives every stage as many layers, so the models differ ({each}); hold one "
                f"model: `model_layers={options.layers * smallest}`{'' if options.moe else ' `by_layer=True`'}"
            )
        return options
    layouts = [layout for _, target in targets if (layout := _layout(target)) is not None]
    counts = set(stages.values()) | {layout.placement.num_stages for layout in layouts}
    unknown = any(not layout.model_layers for layout in layouts)
    if len(counts) == 1 and (unknown or not costs.says_layers) and not options.asks_for_layers:
        return options
    if not costs.says_layers:
        each = ", ".join(f"{name} {count}" for name, count in stages.items())
        raise ValueError(
            f"costs {costs.name!r} say what a chunk takes, and these schedules cut a model into different numbers of "
            f"chunks ({each}); add layers = N to their [cells], the layers of that chunk, or a [model]"
        )
    fitting = {layout.model_layers for layout in layouts if layout.model_layers >= max(stages.values())}
    return replace(options, model_layers=fitting.pop() if len(fitting) == 1 else smallest)


def _layout(target: Target) -> Layout | None:
    if isinstance(target, Schedule | UpdatePlan):
        return None
    return target.program.layout if isinstance(target, Trace) else target.layout
