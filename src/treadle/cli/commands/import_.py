"""`treadle import`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from treadle.api import load_save
from treadle.cli.common_options import Json
from treadle.cli.measured_steps import import_run, tell, write_fit
from treadle.cli.output import print_json
from treadle.cli.terminal import again, out, suggest, working, wrote
from treadle.ir.blocks import parse_layout
from treadle.ir.show import counted, show_time
from treadle.profiles.imported import Imported
from treadle.simulator import Metrics, measure
from treadle.simulator.fitted_run import fit_run

if TYPE_CHECKING:
    from treadle.cli.printed import ImportJson


def import_(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR...", help="Files of a profile, or directories of them: one run.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the measured steps: .json or .json.gz, for Perfetto.")
    ] = None,
    fit_to: Annotated[
        Path | None, typer.Option("--fit", help="Write costs fitted to them, as TOML for --costs.")
    ] = None,
    schedule_to: Annotated[
        Path | None, typer.Option("--schedule", help="Write the schedule that ran, as text that every command reads.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="The stages' blocks, as Megatron writes them: 'Et*4|(t*5|)*2t*3L'.")
    ] = None,
    dp: Annotated[
        int | None, typer.Option("--dp", help="Replicas of the pipeline, where the files do not have it.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="Micro-batches of a step, where files do not have it.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step to show and to write; else the one in the middle.")] = None,
    as_json: Json = False,
) -> None:
    """Reads a profile of any trainer's run: which schedule it ran, when each op ran, what an op costs."""
    blocks = parse_layout(layout) if layout is not None else None
    imported = import_run(paths, dp=dp, microbatches=microbatches, blocks=blocks)
    trace = imported.steps.trace(step)
    metrics = measure(trace)
    if output is not None:
        with working(f"writing {output}"):
            load_save.save_steps(imported.steps, output, step)
        wrote(output)
    if fit_to is not None:
        write_fit(fit_run(imported.steps, number=step), fit_to)
    if schedule_to is not None:
        schedule_to.write_text(load_save.dumps(imported.schedule), encoding="utf-8")
        wrote(schedule_to)
    if as_json:
        print_json("import", _as_dict(imported, metrics, step))
        return
    _print(imported, metrics, step, paths)
    suggest(f"treadle why {shlex.quote(str(output))}" if output is not None else again("-o trace.json.gz"))


def _as_dict(imported: Imported, metrics: Metrics, step: int | None) -> ImportJson:
    schedule, steps, clock = imported.schedule, imported.steps, imported.steps.clock
    return {
        "form": imported.form,
        "unit": clock.unit,
        "schedule": schedule.name if imported.named else None,
        "pp": schedule.pp,
        "vpp": schedule.placement.vpp,
        "dp": imported.program.layout.dp,
        "microbatches": schedule.num_microbatches,
        "placement": [list(stages) for stages in schedule.placement.stages],
        "step": steps.typical if step is None else step,
        "makespan": clock.show(metrics.makespan),
        "bubble": metrics.bubble,
        "steps": [
            {"step": number, "makespan": clock.show(int(span))}
            for number, span in zip(steps.numbers, steps.makespans, strict=True)
        ],
        "remarks": [{"what": r.what, "source": r.source, "times": r.times} for r in imported.remarks],
    }


def _print(imported: Imported, metrics: Metrics, step: int | None, paths: list[Path]) -> None:
    schedule, steps, clock = imported.schedule, imported.steps, imported.steps.clock
    layout = imported.program.layout
    name = schedule.name if imported.named else "a schedule that is none of those here"
    chunks = f", {schedule.placement.vpp} chunks a rank" if schedule.placement.vpp > 1 else ""
    replicas = f" x {layout.dp} replicas" if layout.dp > 1 else ""
    size = f"{counted(schedule.pp, 'rank')}{replicas}{chunks}, {counted(schedule.num_microbatches, 'micro-batch')}"
    if layout.by_layer:
        name, size = "parts of layers", f"{counted(layout.model_layers, 'layer')} of one rank, {schedule.rows[0][0]}"
    out.print(f"[bold]{escape(name)}[/]: {size}; {escape(imported.form)}", soft_wrap=True)
    spans = steps.makespans
    out.print(
        f"{counted(len(steps.numbers), 'step')}, {show_time(clock, float(spans.min()))} to "
        f"{show_time(clock, float(spans.max()))}; step {steps.typical if step is None else step}: "
        f"{show_time(clock, metrics.makespan)}, bubble {metrics.bubble:.2%}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank")
    for column in ("busy", "idle"):
        table.add_column(column, justify="right")
    for number, rank in enumerate(metrics.ranks[:16]):
        table.add_row(str(number), show_time(clock, rank.busy), f"{rank.idle_share:.1%}")
    out.print(table)
    tell(imported, paths)
