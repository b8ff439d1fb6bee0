"""`treadle compare`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from treadle.api.load_save import load_run
from treadle.api.verbs import compare_steps
from treadle.cli.common_options import Json, spread_options
from treadle.cli.compared import make_steps, sized_targets
from treadle.cli.measured_steps import write_fit
from treadle.cli.output import print_json
from treadle.cli.step_flags import StepFlags, layout_blocks, make_traces
from treadle.cli.target import Microbatches, Pp, Target, Vpp
from treadle.cli.terminal import out, suggest, working
from treadle.ir.show import show_held, show_time
from treadle.ir.steps import Steps
from treadle.ir.trace import Clock, Trace
from treadle.schedules import default_schedule
from treadle.simulator import Comparison, Difference, OpGroup
from treadle.simulator.fitted_run import fit_run
from treadle.step import Step


@spread_options
def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B ...]",
            help="Schedules by name, with sizes of their own as in interleaved:vpp=4; or files: schedules, programs, "
            "traces; a directory that plan --files wrote, or of traces, one a rank.",
        ),
    ],
    flags: StepFlags,
    pp: Pp = None,
    vpp: Vpp = None,
    microbatches: Microbatches = None,
    fit_to: Annotated[
        Path | None, typer.Option("--fit", help="Write costs fitted from the last one, as TOML for --costs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compares schedules, programs or traces with the first one; two traces of one program op by op.

    All schedules get the same model: one of --model-layers, or the smallest that all of them cut evenly.
    """
    if len(names) < 2 and fit_to is None:
        raise ValueError(
            f"comparing takes at least two, got {names[0]}; 'treadle simulate' shows one, --fit fits costs to it"
        )
    if len(names) < 2 and as_json:
        raise ValueError(f"--json prints a comparison, which takes at least two, got {names[0]}; leave --json out")
    targets = sized_targets(names, Target("", pp, vpp, microbatches))
    loaded = [(name, target.load()) for name, target in zip(names, targets, strict=True)]
    steps = make_steps(targets, loaded, flags, used=fit_to is not None)
    traces = make_traces(steps)
    if fit_to is not None:
        write_fit(fit_run(_measured(steps[-1], targets[-1], traces[-1]), _blocks(traces[-1], flags)), fit_to)
        suggest(f"treadle simulate {_like(traces[-1])} --costs {shlex.quote(str(fit_to))}")
    if len(names) < 2:
        return
    with working("comparing"):
        comparison = compare_steps(steps)
    if as_json:
        print_json("compare", comparison.as_dict())
        return
    _print_table(comparison)
    out.print(f"{comparison.held}{_layer_time(steps)}", soft_wrap=True)
    if comparison.ops is not None:
        _print_difference(comparison.ops, comparison.clock)
    elif comparison.why_not and len(traces) == 2:
        out.print(f"not compared op by op: {escape(comparison.why_not)}", style="dim", soft_wrap=True)
    if fit_to is None:
        suggest("treadle simulate --help")


def _measured(step: Step, target: Target, trace: Trace) -> Steps:
    """Return all measured steps of the run that a trace is of; a predicted trace is its only step."""
    if not isinstance(step.target, Trace):
        return Steps.of(trace)
    run = load_run([Path(target.name)])
    return run if isinstance(run, Steps) else run.steps


def _blocks(trace: Trace, flags: StepFlags) -> tuple[str, ...] | None:
    """Return the blocks of the stages where a layout has them, at the grain of cells."""
    known = flags.layout is not None and not trace.program.layout.by_layer
    return layout_blocks(flags.layout, flags.dense, flags.costs) if known and flags.layout else None


def _like(trace: Trace) -> Target | str:
    """Return a schedule that has as many stages as a trace, as it is typed."""
    layout, placement = trace.program.layout, trace.program.layout.placement
    if layout.by_layer:
        return f"{Target(default_schedule(), placement.pp, None, layout.num_microbatches)} --layers 1"
    vpp = placement.num_stages // placement.pp
    return Target(default_schedule(vpp), placement.pp, vpp if vpp > 1 else None, layout.num_microbatches)


def _layer_time(steps: list[Step]) -> str:
    """What was taken for a layer's, or else a chunk's, forward; nothing where costs differ."""
    (costs, *others) = {
        id(step.costs): step.costs for step in steps if not isinstance(step.target, Trace)
    }.values() or (None,)
    if costs is None or others:
        return ""
    what, ticks = ("layer", costs.of_layer("f")) if costs.says_layers else ("chunk", costs.cell("f"))
    return f"; a {what}'s forward takes {show_time(costs.clock, ticks)}"


def _ratio(ratio: float | None) -> str:
    return f"{ratio:.3f}x" if ratio is not None else ""


def _print_table(comparison: Comparison) -> None:
    clock = comparison.clock
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for column in ("makespan", "", "bubble", "exposed comm", "", "peak"):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        table.add_row(
            f"[bold]{escape(row.name)}[/]",
            show_time(clock, row.makespan.value),
            _ratio(row.makespan.ratio),
            f"{row.bubble.value:.2%}",
            show_time(clock, row.exposed.value),
            _ratio(row.exposed.ratio),
            show_held(row.metrics.peak, row.metrics.peak_unit),
        )
    out.print(table)


def _print_difference(ops: Difference, clock: Clock) -> None:
    for title, groups in (("kind", ops.by_kind), ("lane", ops.by_lane), ("rank", ops.by_rank[:8])):
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(f"by {title}", min_width=12)
        for column in ("ops", "second / first", "median", "total", "starts later by"):
            table.add_column(column, justify="right")
        for group in groups:
            table.add_row(*_cells(group, clock))
        out.print(table)
    if ops.causes:
        causes = ", ".join(f"{cause.group.name} {cause.share:.0%}" for cause in ops.causes[:6])
        out.print(f"most of the difference in time: {escape(causes)}", soft_wrap=True)
    for outlier in ops.outliers[:5]:
        out.print(
            f"outlier: rank {outlier.rank} {escape(outlier.label)}: {show_time(clock, outlier.first)} and "
            f"{show_time(clock, outlier.second)}, {outlier.ratio:.2f}x where its kind has {outlier.usual:.2f}x",
            soft_wrap=True,
        )


def _cells(group: OpGroup, clock: Clock) -> tuple[str, ...]:
    def signed(ticks: float) -> str:
        return ("-" if ticks < 0 else "+" if ticks > 0 else "") + show_time(clock, abs(ticks))

    duration = (signed(group.duration.median), signed(group.duration.total))
    return (escape(group.name), str(group.num_ops), _ratio(group.ratio), *duration, signed(group.start.median))
