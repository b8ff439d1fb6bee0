"""`treadle synthesize`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from treadle.api import load_save
from treadle.cli.common_options import Json, parse_bytes
from treadle.cli.output import print_json
from treadle.cli.step_flags import StepFlags, make_traces
from treadle.cli.terminal import Advance, again, note, out, suggest, working, wrote
from treadle.cli.writable import check_file, form_of
from treadle.ir.show import peak_object, show_held, show_time
from treadle.ir.trace import Clock
from treadle.simulator import Metrics, measure
from treadle.synthesize import MemoryLimits, SolverOptions, Standing, Synthesis, synthesize_schedule

if TYPE_CHECKING:
    from treadle.cli.printed import SynthesizeJson


def synthesize(
    pp: Annotated[int, typer.Option("--pp", help="Ranks of the pipeline.")],
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", help="Micro-batches in a step.")],
    vpp: Annotated[int | None, typer.Option("--vpp", help="Chunks on each rank; 1, or 2 with v.")] = None,
    placement: Annotated[
        str, typer.Option("--placement", help="Stages on ranks: loop, v, bidirectional or a table: 0,2/1,3.")
    ] = "loop",
    costs_name: Annotated[
        str, typer.Option("--costs", help="How long cells take: unit, a preset, or a TOML file.")
    ] = "unit",
    model_layers: Annotated[int | None, typer.Option(help="Layers of the whole model, cut into stages.")] = None,
    layout: Annotated[str | None, typer.Option(help="Blocks of each stage: 'Et|(tt|)*30L'.")] = None,
    dense: Annotated[int | None, typer.Option(help="Layers, from the first on, that are dense.")] = None,
    mtp: Annotated[int | None, typer.Option(help="MTP blocks on the last stage; a --layout has its own.")] = None,
    max_activations: Annotated[int | None, typer.Option(help="Most activations alive at once on a rank.")] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Most bytes of activations on a rank: 60GB. With --model-layers, --layout, or costs of a whole model."
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Backwards stay whole: wgrad is not split off.")] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds to search; less if the best is proven.")] = 60.0,
    workers: Annotated[int, typer.Option(help="Threads of the solver. 1 repeats itself.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the solver's randomness.")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the schedule: text, or by its ending .json or .csv.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Finds an order of cells that is no slower than any schedule here, and bounds how much faster one could be.

    The order keeps the placement and the limits. It is simulated and verified as every schedule is.
    """
    flags = StepFlags(costs_name, model_layers=model_layers, layout=layout, dense=dense, mtp=mtp)
    limits = MemoryLimits(max_activations, parse_bytes(memory_limit) if memory_limit is not None else None)
    if limits.memory_limit is not None and not flags.options.knows_layers(flags.costs):
        raise ValueError(
            "--memory-limit is about bytes, which need layers: --model-layers, --layout, or costs with [model]; "
            "--max-activations counts activations"
        )
    if output is not None:
        check_file(output)
    solver = SolverOptions(time_limit, workers, seed)
    with working("synthesizing") as advance:
        found = synthesize_schedule(
            pp=pp,
            microbatches=microbatches,
            vpp=vpp,
            placement=placement,
            costs=flags.costs,
            limits=limits,
            whole=whole,
            options=flags.options,
            solver=solver,
            progress=lambda standing: _show(standing, flags.costs.clock, advance),
        )
    (trace,) = make_traces([flags.step(found.schedule)])
    metrics = measure(trace)
    if output is not None:
        output.write_text(load_save.dumps(found.schedule, form_of(output)), encoding="utf-8")
        wrote(output)
    if as_json:
        body: SynthesizeJson = {
            **found.as_dict(),
            "bubble": metrics.bubble,
            "peak": peak_object(metrics.peaks, metrics.peak_unit),
            "schedule": load_save.dumps(found.schedule),
        }
        print_json("synthesize", body)
        return
    _print(found, metrics)
    if output is None:
        note("the schedule is not kept; -o schedule.txt writes it")
        suggest(again("-o schedule.txt"))
    else:
        suggest(f"treadle simulate {shlex.quote(str(output))} {flags}".rstrip())


def _show(standing: Standing, clock: Clock, advance: Advance) -> None:
    best, bound = (show_time(clock, ticks) for ticks in (standing.makespan, standing.lower_bound))
    what = f"synthesizing: {best}, at least {bound}"
    advance(int(1000 * standing.seconds), int(1000 * standing.time_limit_s), what)


def _print(found: Synthesis, metrics: Metrics) -> None:
    best, bound = (show_time(found.clock, ticks) for ticks in (found.makespan, found.lower_bound))
    standing = "proven: no order is faster" if found.proven else f"at least {bound}, gap {found.gap:.2%}"
    peak = show_held(metrics.peak, metrics.peak_unit)
    out.print(f"[bold]makespan {best}[/], {standing}; bubble {metrics.bubble:.2%}, peak {peak}", soft_wrap=True)
    if found.ours is None or found.ours_makespan is None:
        ours = "no schedule here keeps placement and limits"
    else:
        gain = f"this takes {found.gain:.2%} less" if found.gain else "as fast as this"
        ours = f"best of the schedules here: {escape(found.ours)} {show_time(found.clock, found.ours_makespan)}, {gain}"
    out.print(f"{ours}; {found.num_tasks} tasks, {found.seconds:.1f} s, by {escape(found.source)}", soft_wrap=True)
