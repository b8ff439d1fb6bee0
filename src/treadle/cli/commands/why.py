"""`treadle why`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from treadle.api.load_save import holds_traces
from treadle.api.tried_cut import ASSUMED_LAYERS, TriedCut, try_cut
from treadle.cli.common_options import Json
from treadle.cli.followed_run import follow as follow_run
from treadle.cli.measured_steps import choose_steps, load_steps, quoted
from treadle.cli.output import print_json
from treadle.cli.terminal import again, note, out, suggest, working, wrote
from treadle.cli.writable import check_file
from treadle.diagnosis import WhyReport, analyse
from treadle.diagnosis.heat import Heat
from treadle.diagnosis.why_page import page
from treadle.ir.blocks import write_layout
from treadle.ir.program import Layout
from treadle.ir.show import show_time
from treadle.ir.steps import Steps

SHOWN_REPLICAS = 16


def why(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|DIR...", help="A trace of Treadle, or the files of a profile: one run."),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a page: .html.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps: 16,20-39,403-.")] = None,
    as_json: Json = False,
    follow: Annotated[bool, typer.Option("--follow", help="Read files as they appear in DIR.")] = False,
    metrics: Annotated[Path | None, typer.Option(help="With --follow: metrics for Prometheus, as a text file.")] = None,
    idle: Annotated[float | None, typer.Option(help="With --follow: end after so many seconds without a file.")] = None,
) -> None:
    """Finds why a run is slow: which worker, stage, kind of op or unequal data, by simulating it without them.

    The slowdown S compares the steps with an ideal one, in which every op takes the mean or median of its type.
    With --follow it exits with 1 if something is slower at the end than it was before.
    """
    if not follow and (metrics is not None or idle is not None):
        raise ValueError("--metrics and --idle are for --follow")
    if output is not None and output.suffix != ".html":
        raise ValueError(f"a page's name ends in .html, got {str(output)!r}; --json is for programs")
    if follow:
        if len(paths) > 1 or steps is not None or as_json:
            raise ValueError("--follow takes one directory, and neither --steps nor --json; --metrics is for programs")
        for path in filter(None, (output, metrics)):
            check_file(path)
        raise typer.Exit(1 if follow_run(paths[0], output, metrics, idle) else 0)
    measured = choose_steps(load_steps(paths), steps)
    with working("simulating"):
        report = analyse(measured)
    if as_json:
        print_json("why", report.as_dict())
    else:
        _print_all(report, measured, paths)
    if output is not None:
        output.write_text(page(report, paths[0].name), encoding="utf-8")
        wrote(output)
    if as_json:
        return
    if output is None:
        suggest(again("-o why.html"))
    elif holds_traces(paths):
        suggest(f"treadle draw {shlex.quote(str(paths[0]))} -o page.html")
    else:
        suggest(f"treadle import {quoted(paths)} -o trace.json.gz")


def _print_all(report: WhyReport, measured: Steps, paths: list[Path]) -> None:
    """Print the report and, where a cut of the model mends the cause, the commands that find it."""
    layout = measured.program.layout
    cut = report.cause.what == "stage" and not layout.by_layer  # layers that are alike cannot be cut better
    with working("simulating"):
        tried = try_cut(measured) if cut else None
    _print(report, _cut_lines(tried, layout, paths) if tried is not None else ())
    if tried is None:
        return
    if not tried.pays:
        note(f"no cut of {write_layout(tried.blocks, dense=True)} into whole layers makes the step 1% shorter")
    if not any(layout.blocks):
        assumed = f"no profile names layers, {ASSUMED_LAYERS} a stage assumed"
        note(f"'treadle import' takes your job's --layout: {assumed}")


def _cut_lines(tried: TriedCut, layout: Layout, paths: list[Path]) -> tuple[str, ...]:
    """Return the commands that find the cut, and what it gives: nothing where it gives nothing."""
    if not tried.pays:
        return ()
    placement = layout.placement
    fit = f"treadle compare {quoted(paths)}" if holds_traces(paths) else f"treadle import {quoted(paths)}"
    sizes = f"--pp {placement.pp}" + (f" --vpp {placement.vpp}" if placement.num_stages > placement.pp else "")
    sizes += " --placement v" if placement.name == "v" else ""
    cut, clock = shlex.quote(write_layout(tried.blocks, dense=True)), tried.fitted.costs.clock
    took, shorter = (show_time(clock, float(each)) for each in (tried.fitted.predicted, tried.makespan))
    return (
        f"{fit} --layout {cut} --fit job.toml",
        f"treadle balance {sizes} --costs job.toml",
        f"finds {write_layout(tried.balanced)}: {shorter} from begin to end of a step, simulated with the fitted "
        f"costs, for {took} with this cut, {tried.gain:.1%} less",
    )


def _print(report: WhyReport, commands: tuple[str, ...]) -> None:
    out.print(f"[bold]{escape(_capital(report.cause.sentence))}.[/]", soft_wrap=True)
    for command in commands:
        out.print(escape(f"  {command}"), soft_wrap=True)
    out.print(f"slowdown {report.slowdown:.3f}x against the ideal step: {escape(report.in_words)}", soft_wrap=True)
    _print_table("share of the step lost to each", report.shares.items(), "{:.1%}")
    kinds = sorted(report.by_kind.items(), key=lambda item: -item[1])
    _print_table("slowdown by one kind of op alone", kinds, "{:.4f}")
    _print_steps(report)
    _print_heat(report)


def _print_table(title: str, rows: Iterable[tuple[str, float]], form: str) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(title, min_width=34)
    table.add_column("", justify="right")
    for name, value in rows:
        table.add_row(escape(name), form.format(value).replace("-0.0%", "0.0%"))
    out.print(table)


def _print_steps(report: WhyReport) -> None:
    if len(report.by_step) < 2:
        return
    slowest = sorted(report.by_step.items(), key=lambda item: -item[1])
    told = ", ".join(f"{number} ({slowdown:.3f})" for number, slowdown in slowest[:3])
    fastest = f"{slowest[-1][0]} ({slowest[-1][1]:.3f})"
    out.print(f"slowest of {len(slowest)} steps: {told}; fastest: {fastest}", soft_wrap=True)


def _print_heat(report: WhyReport) -> None:
    """Workers as a map: a row a replica, a column a rank of the pipeline."""
    heat = Heat.of(report.workers)
    rows = sorted(range(report.dp), key=lambda dp: -max(report.workers[dp]))[:SHOWN_REPLICAS]
    table = Table(box=None, padding=(0, 0, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("worker  ", justify="right")
    for rank in range(report.pp):
        table.add_column(f" rank {rank} ", justify="center")
    for dp in sorted(rows):
        cells = [Text(f" {score:.3f} ", style=_style(heat, score), justify="center") for score in report.workers[dp]]
        table.add_row(f"dp {dp}  ", *cells)
    out.print(table)
    if report.dp > len(rows):
        out.print(f"... and {report.dp - len(rows)} replicas that are faster (--json and -o have all)", style="dim")


def _style(heat: Heat, score: float) -> str:
    fill, ink = heat.colours(score)
    return f"{ink} on {fill}"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
