"""A trainer's configuration, judged, and the launch of a job, as they are printed."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from treadle.cli.memory_table import memory_table
from treadle.cli.output import print_json
from treadle.cli.terminal import again, out, plain, suggest, working, wrote
from treadle.cli.writable import check_file
from treadle.estimate import Job
from treadle.estimate.cluster import GIB
from treadle.planner.job_estimate import describe
from treadle.planner.judged_job import Change, JudgedJob, judge
from treadle.planner.plan_report import batch_text, judged_object, step_text
from treadle.planner.planned_step import PlannedStep
from treadle.planner.step_parts import parts_text
from treadle.trainers import TRAINERS, ReadJob, TrainerFormat, trainer


def judge_file(
    read: ReadJob, limit: int, written_for: TrainerFormat | None, launch: Path | None, *, as_json: bool
) -> None:
    """Print the step and the memory of a job that was read, what to change first, and what was not read."""
    with working("simulating"):
        judged = judge(read.job, limit, trainer(read.trainer))
        chosen = PlannedStep.of(judged.estimate)
    if as_json:
        print_json("judged", judged_object(read, judged, chosen))
    else:
        _print_step(read, judged, chosen)
        _print_changes(judged)
        _print_unread(read)
    if written_for is None:
        if not as_json:
            suggest(again(f"--for {read.trainer} -o better{trainer(read.trainer).suffix}"))
    elif launch is not None or not as_json:
        show_launch(judged.best.job, written_for, launch)


def show_launch(job: Job, written_for: TrainerFormat | None, path: Path | None) -> None:
    """Print or write the launch of a job; without a trainer, suggest the first that runs it."""
    if written_for is None:
        able = next((each for each in TRAINERS.values() if each.runs(job)), None)
        if able is not None:
            suggest(again(f"--for {able.name} -o launch{able.suffix}"))
        return
    text = written_for.launch(job)
    if path is None:
        plain(text)
    else:
        check_file(path)
        path.write_text(text, encoding="utf-8")
        wrote(path)


def _print_step(read: ReadJob, judged: JudgedJob, chosen: PlannedStep) -> None:
    job, memory, limit = read.job, judged.estimate.memory_bytes / GIB, judged.memory_limit / GIB
    head = f"{job.model.name} on {job.cluster.name}: {describe(job)}"
    out.print(f"[bold]{escape(head)}[/]", soft_wrap=True)
    figures = {
        "read as": f"{trainer(read.trainer).title}, {read.num_read} settings in the estimate",
        "batch": batch_text(job),
        "step": step_text(chosen),
        "throughput": f"{chosen.tokens_per_s_per_gpu:,.0f} tokens/s/GPU",
        "MFU": f"{chosen.mfu:.1%} ({chosen.flops_per_s_per_gpu / 1e12:.0f} TFLOP/s/GPU, {job.precision})",
        "parts of the step": parts_text(chosen.parts),
        "bubble": f"{chosen.metrics.idle_share:.1%} of the step, mean over ranks",
        "exposed communication": f"{chosen.exposed_share:.1%} of the step",
        "memory": f"{memory:.1f} GiB of {limit:.1f}: {'fits' if judged.fits else 'does not fit'}",
    }
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in figures.items():
        table.add_row(name, escape(value))
    out.print(table)
    out.print(memory_table(chosen.estimate.memory))


def _print_changes(judged: JudgedJob) -> None:
    error = f"{judged.error:.1%}"
    if not judged.changes and judged.pair is None:
        what = "makes it fit" if not judged.fits else f"is faster by more than {error}, the error of a comparison"
        out.print(f"what to change first: no single setting and no pair {what}", soft_wrap=True)
        return
    why = f"more than {error}, the error of a comparison" if judged.fits else "those that make it fit"
    out.print(f"what to change first ({why}):")
    for change in judged.changes:
        out.print(escape(f"  {change_text(change)}"), soft_wrap=True)
    if judged.pair is not None:
        out.print(escape(f"  both: {change_text(judged.pair)}"), soft_wrap=True)


def change_text(change: Change) -> str:
    """Return a change as a trainer's settings, with its gain and its cost."""
    settings = ", ".join(_setting(name, value) for name, value in change.settings)
    return f"{settings}: {change.step:+.1%}, {change.memory_bytes / GIB:+.1f} GiB"


def _setting(name: str, value: str | None) -> str:
    if value is None:
        return f"without {name}"
    return f"{name} {value}".strip() if name.startswith("--") else f"{name}: {value}"


def _print_unread(read: ReadJob) -> None:
    if read.unread:
        out.print("not in the estimate:")
    for each in read.unread:
        value = "" if each.value == "True" else each.value
        text = f"  {_setting(each.setting, value)}: matters to {each.matters}"
        out.print(escape(text.replace("matters to unknown", "unknown, may matter")), soft_wrap=True)
    for text in read.notes:
        out.print(escape(f"note: {text}"), soft_wrap=True)
