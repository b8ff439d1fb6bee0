"""`treadle calibrate`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from treadle.calibrate import CalibrationReport, EstimatedRun, cluster_text, read_runs
from treadle.calibrate import calibrate as calibrate_cluster
from treadle.calibrate.calibration_report import SUSPICIOUS, show_constant
from treadle.cli.common_options import Json
from treadle.cli.output import print_json
from treadle.cli.tables import rows_table
from treadle.cli.terminal import again, note, out, suggest, working
from treadle.cli.writable import check_file
from treadle.estimate import load_cluster
from treadle.estimate.cluster import GIB
from treadle.estimate.model_shape import PRESETS


def calibrate(
    cluster_name: Annotated[
        str, typer.Option("--cluster", help="A preset with how many GPUs (h800:256), or a .toml file.")
    ],
    measured: Annotated[
        Path, typer.Option(help="Measured runs: a CSV file with model, step_s, global_batch_size, tp, pp, ...")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the cluster with fitted constants: .toml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fits a cluster's constants to runs that you measured, so that plans for it fit them too.

    Constants that no run depends on stay as they are. With three or more runs each is also estimated from the others.
    """
    if output is not None and output.suffix != ".toml":
        raise ValueError(f"a cluster's file ends in .toml, got {str(output)!r}")
    if output is not None:
        check_file(output)
    cluster = load_cluster(cluster_name)
    runs = read_runs(measured, cluster)
    with working("fitting") as advance:
        report = calibrate_cluster(cluster, runs, progress=advance)
    if output is not None:
        count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
        about = f"{cluster.name}, fitted to {count} of {measured.name} by `treadle calibrate`."
        text = cluster_text(replace(report.cluster, name=output.stem), cluster, about)
        output.write_text(text, encoding="utf-8")
    if as_json:
        print_json("calibrate", report.as_dict())
        return
    _print_runs(report)
    _print_constants(report)
    for each in report.runs:
        _point_out(each)
    if output is None:
        note("the constants are not kept; -o ours.toml writes them")
        suggest(again("-o ours.toml"))
    else:
        out.print(f"wrote {escape(str(output))}; every --cluster takes it", style="dim", soft_wrap=True)
        names = [each.run.job.model.name for each in report.runs]
        for name in [name for name in names if (PRESETS / f"{name}.toml").is_file()][:1]:
            suggest(f"treadle plan --model {name} --cluster {shlex.quote(str(output))}")


def _print_runs(report: CalibrationReport) -> None:
    table = rows_table("run", "measured", "before", "after", "leave-one-out")
    for each in report.runs:
        estimates = (_estimate(each, value) for value in (each.before, each.after, each.left_out))
        table.add_row(escape(each.run.name), f"{each.seconds:.4g} s", *estimates)
    medians = (report.median(name) for name in ("before", "after", "left_out"))
    table.add_row("median, either way", "", *("" if each is None else f"{each:.1%}" for each in medians))
    out.print(table)


def _estimate(each: EstimatedRun, value: float | None) -> str:
    return "" if value is None else f"{value:.4g} s {each.error(value):+.1%}"


def _print_constants(report: CalibrationReport) -> None:
    table = rows_table("constant", "from", "to", "constrained by the runs")
    for each in report.moved:
        table.add_row(each.name, show_constant(each.before), show_constant(each.after), f"{each.told:.0%}")
    if report.moved:
        out.print(table)
    else:
        out.print("no constant moved: the estimates fit the runs as they are")
    out.print(f"not constrained by these runs: {', '.join(report.untold)}", style="dim")


def _point_out(each: EstimatedRun) -> None:
    """Say what is odd about a run."""
    where = f"line {each.run.line}, {each.run.name}"
    if each.suspicious:
        off = each.error(each.after)
        out.print(
            escape(
                f"suspicious: {where}: still {off:+.1%} off, more than {SUSPICIOUS:.0%}; check its row; if it is "
                "right, the estimate lacks something that this run has"
            ),
            soft_wrap=True,
        )
    if each.over_bytes:
        held, over = each.memory_bytes / GIB, each.over_bytes / GIB
        note(
            f"{where}: by the estimate it takes {held:.1f} GiB, {over:.1f} more than fit, and it ran: its row lacks "
            "what saves memory (recompute, offload), or the memory estimate is off for it"
        )
