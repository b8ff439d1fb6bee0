"""`treadle plan`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from treadle.cli.common_options import Json, parse_bytes, parse_count, spread_options
from treadle.cli.judged_file import judge_file, show_launch
from treadle.cli.memory_table import memory_table
from treadle.cli.output import print_json
from treadle.cli.plan_knobs import Knobs
from treadle.cli.slow import Slow
from treadle.cli.tables import rows_table
from treadle.cli.terminal import again, note, out, suggest, working, wrote
from treadle.cli.watched_search import watched_search
from treadle.cli.writable import check_directory, check_file
from treadle.estimate import Cluster, load_cluster, load_model
from treadle.estimate.cluster import GIB, PRECISIONS
from treadle.folding.stragglers import QUANTILES, StragglerStudy
from treadle.ir.blocks import write_layout
from treadle.ir.show import show_bytes, show_time
from treadle.planner import SearchResult, find_plan
from treadle.planner.find_plan import usable_bytes
from treadle.planner.job_estimate import Alternative, describe
from treadle.planner.plan_files import untrainable, write_files
from treadle.planner.plan_page import page
from treadle.planner.plan_report import (
    batch_text,
    beside_texts,
    commands,
    count_text,
    host_text,
    plan_object,
    schedule_text,
    show_count,
    step_text,
    study_text,
)
from treadle.planner.planned_step import PlannedStep
from treadle.planner.step_parts import parts_text
from treadle.planner.straggler_plan import DRAWS, study_plan
from treadle.trainers import TRAINERS, megatron, read_job, trainer

SHOWN = 12


@spread_options
def plan(
    cluster_name: Annotated[
        str, typer.Option("--cluster", help="A preset with how many GPUs (h800:2048), or a .toml file.")
    ],
    knobs: Knobs,
    model_name: Annotated[
        str | None, typer.Option("--model", help="A preset (kimi-k2), a .toml file, or Hugging Face's config.json.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from", help="Judge the job of a trainer's log, launch script or configuration; no search."),
    ] = None,
    for_trainer: Annotated[
        str | None,
        typer.Option("--for", help=f"Only what this trainer runs, and its launch at the end: {', '.join(TRAINERS)}."),
    ] = None,
    tokens_per_batch: Annotated[
        str | None, typer.Option(help="Tokens of a step, over all GPUs: 4194304 or 4Mi. By default 32,768 a GPU.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    num_tokens: Annotated[
        str, typer.Option("--tokens", help="Tokens of the whole run, for its days and GPU-hours: 15T.")
    ] = "1T",
    memory_limit: Annotated[
        str | None, typer.Option(help="What a GPU may hold: 70GiB. By default what CUDA, NCCL and torch leave of it.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="A GPU's share of its host's memory, for offload: 256GiB. By default the cluster's."),
    ] = None,
    straggler_share: Annotated[
        str | None,
        typer.Option("--stragglers", help="Draw slow GPUs, so many: 0.1%. Which schedule do they slow down least?"),
    ] = None,
    straggler_factor: Annotated[float | None, typer.Option(help="By which factor they are slow; 1.2.")] = None,
    draws: Annotated[int | None, typer.Option(help=f"How often slow GPUs are drawn; {DRAWS}.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a page: .html; with --for the launch: .sh, .yaml.")
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option(help="Write the plan to this directory, which simulate, draw, verify and compare take."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Picks schedule and parallelism for a model on a cluster: step time, memory by part, and the alternatives.

    Needs no GPU. Every candidate's memory is counted and its step is simulated, unless one that was simulated beats
    the least time it can take.
    """
    written_for = trainer(for_trainer) if for_trainer is not None else None
    launch = output if written_for is not None and output is not None and output.suffix != ".html" else None
    if output is not None and output.suffix not in (".html", written_for.suffix if written_for else ".html"):
        raise ValueError(
            f"a page's name ends in .html, got {str(output)!r}; --json is for programs, and --for a trainer writes its "
            "launch"
        )
    output = output if launch is None else None
    cluster = load_cluster(cluster_name)
    if ":" not in cluster_name and not cluster_name.endswith(".toml"):
        note(f"{cluster_name} is one host of {cluster.num_gpus} GPUs; --cluster {cluster_name}:512 has 512 of them")
    _check_precision(knobs.precision, cluster)
    limit = usable_bytes(cluster)
    if memory_limit is not None:
        limit = _gpu_bytes("--memory-limit", "what a GPU may hold", memory_limit)
    if host_memory is not None:
        share = _gpu_bytes("--host-memory", "a GPU's share of its host's memory", host_memory)
        cluster = replace(cluster, host_memory_gib=share / GIB)
    if usable_bytes(cluster) < limit <= cluster.memory_bytes:
        note(f"CUDA, NCCL and torch's allocator usually leave {usable_bytes(cluster) / GIB:.1f} GiB of this GPU")
    if from_file is not None:
        if knobs != Knobs():
            raise ValueError("--from judges the job of its file, and searches nothing; leave options of the search out")
        shape = load_model(model_name) if model_name is not None else None
        judge_file(read_job(from_file, cluster, shape), limit, written_for, launch, as_json=as_json)
        return
    if model_name is None:
        raise ValueError("--model is missing; give it, or --from with a trainer's log, launch script or configuration")
    model = load_model(model_name)
    space, tokens = knobs.space(model), _tokens(num_tokens)
    if written_for is not None:
        space = replace(space, trainer=written_for, balanced=(not written_for.even_stages,))
    slow = Slow(0.0, straggler_share, straggler_factor, 0)
    slow.check()
    stragglers = slow.stragglers()
    if draws is not None:
        _check_draws(draws, straggler_share)
    if files is not None:
        check_directory(files)
    if output is not None:
        check_file(output)
    search = partial(
        find_plan,
        model,
        cluster,
        tokens_per_batch=parse_count(tokens_per_batch) if tokens_per_batch is not None else None,
        seq_len=seq_len,
        memory_limit=limit,
        space=space,
    )
    found, interrupted = watched_search(search)
    with working("simulating"):
        others, chosen = found.alternatives, PlannedStep.of(found.best, tokens)
    study = None
    if stragglers is not None:
        with working("drawing slow GPUs") as advance:
            study = study_plan(found.best, others, stragglers, draws=draws or DRAWS, progress=advance)
    if output is not None:
        output.write_text(page(found, chosen, others, study, files or Path("plan")), encoding="utf-8")
    written = write_files(chosen, files) if files is not None else ()
    if as_json:
        print_json("plan", plan_object(found, chosen, others, study))
    if output is not None:
        wrote(output)
    if not as_json:
        _print(found, chosen, others)
        if study is not None:
            _print_study(study)
        _tell_next(chosen, files, written)
        show_launch(found.best.job, written_for, launch)
    elif launch is not None:
        show_launch(found.best.job, written_for, launch)
    if interrupted:
        raise typer.Exit(130)


def _check_precision(precision: str, cluster: Cluster) -> None:
    """Refuse a name that is no precision; one that the GPU lacks is refused where its rate is looked up."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"--precision is one of {', '.join(PRECISIONS)}, got {precision!r}; {cluster.name} has rates for "
            f"{', '.join(cluster.peak_flops)}"
        )


def _gpu_bytes(option: str, what: str, text: str) -> int:
    size = parse_bytes(text)
    if size < GIB:
        meant = f"; write {text}GiB" if text.isdecimal() else ""
        raise ValueError(f"{option} is {what}, at least 1GiB, got {text}: {show_bytes(size)}{meant}")
    return size


def _tokens(text: str) -> int:
    tokens = parse_count(text)
    if tokens < 1:
        raise ValueError(f"--tokens is what the whole run trains on, at least 1, such as 15T, got {text}")
    return tokens


def _check_draws(draws: int, share: str | None) -> None:
    if share is None:
        raise ValueError("--draws is about stragglers; give their share: --stragglers 0.1%")
    if draws < 1:
        raise ValueError(f"--draws is a whole number from 1, got {draws}")


def _print(found: SearchResult, chosen: PlannedStep, others: tuple[Alternative, ...]) -> None:
    job = chosen.estimate.job
    assert job.layout is not None
    head = f"{job.model.name} on {job.cluster.name}: {describe(job)}"
    out.print(f"[bold]{escape(head)}[/]", soft_wrap=True)
    unrun = schedule_text(job.schedule)
    figures = {
        **({"schedule": unrun} if unrun is not None else {}),
        "batch": batch_text(job),
        "step": step_text(chosen),
        **beside_texts(found),
        "throughput": f"{chosen.tokens_per_s_per_gpu:,.0f} tokens/s/GPU",
        f"{show_count(chosen.num_tokens)} tokens": f"{chosen.days:,.1f} days, {chosen.gpu_hours:,.0f} GPU-hours",
        "MFU": f"{chosen.mfu:.1%} ({chosen.flops_per_s_per_gpu / 1e12:.0f} TFLOP/s/GPU, {job.precision})",
        "parts of the step": parts_text(chosen.parts),
        "idle": f"{chosen.metrics.idle_share:.1%} of the step, mean over ranks",
        "exposed communication": f"{chosen.exposed_share:.1%} of the step",
        "memory": f"{chosen.estimate.memory_bytes / GIB:.1f} GiB of {found.memory_limit / GIB:.1f}",
        **({"pinned host memory": host_text(chosen)} if job.offload else {}),
        "micro-batches": f"{job.num_microbatches} of {job.micro_batch_size} x {job.seq_len:,} tokens a replica",
        "CUDA graphs": " ".join([job.cuda_graph, *megatron.graph_flags(job)]),
        "layout": write_layout(job.layout),
        "verified": "clean" if chosen.report.clean else str(chosen.report),
    }
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in figures.items():
        table.add_row(name, escape(value))
    out.print(table)
    if flags := megatron.flags(job):
        out.print(escape(f"Megatron-LM  {flags}"), soft_wrap=True)
    out.print(memory_table(chosen.estimate.memory))
    _print_alternatives(others, found.unable)
    _print_front(found)
    out.print(count_text(found), style="dim", soft_wrap=True)


def _print_alternatives(others: tuple[Alternative, ...], unable: tuple[tuple[str, str], ...]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("alternatives (one setting changed)")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("")
    for other in others:
        slower = f"{other.slower:+.1%}" if other.slower is not None else ""
        table.add_row(f"{other.knob.replace('_', '-')} {escape(other.value)}", slower, escape(other.reason))
    for name, reason in unable:
        table.add_row(f"schedule {escape(name)}", "", escape(reason))
    out.print(table)


def _print_front(found: SearchResult) -> None:
    table = rows_table("Pareto front: step time against memory", "step", "memory")
    for each in found.front[:SHOWN]:
        table.add_row(escape(describe(each.job)), f"{each.step_s:.3f} s", f"{each.memory_bytes / GIB:.1f} GiB")
    out.print(table)
    if len(found.front) > SHOWN:
        out.print(f"... and {len(found.front) - SHOWN} more (--json and -o have all)", style="dim")


def _print_study(study: StragglerStudy) -> None:
    table = rows_table(f"{study.stragglers}, {study.num_draws} draws", "step", "median", *QUANTILES)
    for row in study.rows:
        times = (show_time(row.clock, ticks) for ticks in (row.base, row.median))
        table.add_row(escape(row.name), *times, *(f"+{row.slowdown(share):.1%}" for share in QUANTILES.values()))
    out.print(table)
    out.print(escape(study_text(study)), soft_wrap=True)


def _tell_next(chosen: PlannedStep, files: Path | None, written: tuple[Path, ...]) -> None:
    if files is None:
        suggest(again("--files plan"))
        return
    reason = untrainable(chosen.estimate.job)
    if reason is not None:
        note(f"treadle.train cannot run this job: {reason}")
    else:
        note("treadle.train has no fused kernels and saves about twice as much; its --dry-run counts its own memory")
    names = ", ".join(shlex.quote(str(path)) for path in written)
    out.print(f"wrote {names}; commands that take a schedule take the directory", style="dim", soft_wrap=True)
    for command in commands(chosen, files):
        out.print(escape(f"  {command}"), soft_wrap=True)
