"""`treadle selfcheck`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape
from rich.table import Table

from treadle.cli.common_options import Json
from treadle.cli.output import json_text, print_json
from treadle.cli.terminal import again, err, out, suggest, wrote
from treadle.host.extras import brought_by

if TYPE_CHECKING:
    from treadle.cli.printed import MachineJson, SelfcheckJson
    from treadle.selfcheck import CheckResult, SelfcheckReport

COLOURS = {"passed": "green", "skipped": "yellow", "failed": "bold red"}
READ_BY_BACKENDS = ("CUDA_", "GLOO_", "HIP_", "MASTER_", "NCCL_", "OMP_", "ROCR_", "TORCH_")


def selfcheck(
    ranks: Annotated[int, typer.Option(help="Ranks: processes on this host, with a device each if there are any.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer meshes and steps: under a minute.")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, sim (a device of threads), or the accelerator, the default if there is one."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the report into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Checks this machine: lanes, gradients of all schedules, overlap, offload, a weight update. Exits with 0 or 1."""
    with brought_by("run", "update", needed_by="selfcheck"):
        from treadle.selfcheck import Setup, run_checks
    if output is not None and not output.absolute().parent.is_dir():
        raise ValueError(f"-o {output}: there is no directory {output.absolute().parent}")
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(READ_BY_BACKENDS)}
    report = run_checks(Setup(num_ranks=ranks, quick=quick, device_type=device), _progress, settings)
    if output is not None:
        output.write_text(json_text("selfcheck", _as_dict(report)), "utf-8")
        wrote(output)
    if as_json:
        print_json("selfcheck", _as_dict(report))
    else:
        _print(report)
        if output is None:
            suggest(again("-o report.json"))
    raise typer.Exit(0 if report.ok else 1)


def _as_dict(report: SelfcheckReport) -> SelfcheckJson:
    return {
        "ok": report.ok,
        "num_passed": report.num("passed"),
        "num_skipped": report.num("skipped"),
        "num_failed": report.num("failed"),
        "device_type": report.device_type,
        "backend": report.backend,
        "num_ranks": report.num_ranks,
        "quick": report.quick,
        "seconds": round(report.seconds, 3),
        "machine": cast("MachineJson", dict(report.machine)),
        "settings": dict(report.settings),
        "checks": [
            {
                "name": check.name,
                "status": check.status,
                "about": check.about,
                "advice": check.advice,
                "seconds": round(check.seconds, 3),
                "numbers": dict(check.numbers),
            }
            for check in report.checks
        ],
    }


def _progress(name: str, result: CheckResult | None) -> None:
    """A line a check on stderr, so that a person sees where a run is, and a log where it stopped."""
    if result is None:
        err.print(f"[dim]{escape(name)} ...[/]", soft_wrap=True)
    else:
        status = f"[{COLOURS[result.status]}]{result.status}[/]"
        err.print(f"{escape(name)} {status} [dim]in {result.seconds:.1f} s[/]", soft_wrap=True)


def _print(report: SelfcheckReport) -> None:
    machine = report.machine
    built = "".join(f", {name} {machine[name]}" for name in ("cuda", "hip", "nccl") if machine[name])
    out.print(f"treadle {machine['treadle']}, Python {machine['python']}, torch {machine['torch']}{built}")
    out.print(f"{machine['platform']}, {machine['num_cpus']} processors", soft_wrap=True)
    for device in machine["devices"]:
        out.print(f"{device['type']}:{device['index']} {device['name']}, {device['memory_bytes'] / 1e9:.0f} GB")
    out.print(f"{report.num_ranks} ranks on {report.device_type}, backend {report.backend}")
    for name, value in report.settings.items():
        out.print(f"{name}={escape(value)}", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("check", no_wrap=True)
    table.add_column("result")
    table.add_column("found")
    for check in report.checks:
        status = f"[{COLOURS[check.status]}]{check.status}[/]"
        table.add_row(escape(check.name), status, escape(check.about))
    out.print(table)
    for check in report.checks:
        if check.status == "failed":
            out.print(f"[bold red]what to do[/]  {escape(check.name)}: {escape(check.advice)}", soft_wrap=True)
    counts = ", ".join(f"{report.num(status)} {status}" for status in ("passed", "skipped", "failed"))
    out.print(f"[bold]{counts}[/] in {report.seconds:.0f} s")
