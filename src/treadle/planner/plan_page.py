"""A plan as one HTML file that works without a network or a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from treadle.estimate import Job
from treadle.estimate.cluster import GIB
from treadle.estimate.job import OFFLOADED
from treadle.folding.stragglers import QUANTILES, StragglerStudy
from treadle.ir.blocks import write_layout
from treadle.ir.show import counted, show_time
from treadle.planner.front_chart import front_chart
from treadle.planner.job_estimate import Alternative, JobEstimate, describe
from treadle.planner.plan_bars import alternative_bars, memory_bars, memory_table
from treadle.planner.plan_report import (
    batch_text,
    beside_texts,
    commands,
    count_text,
    host_text,
    show_count,
    study_text,
)
from treadle.planner.planned_step import PlannedStep
from treadle.planner.ranked_search import SearchResult
from treadle.planner.run_errors import RunErrors, run_errors
from treadle.planner.step_picture import step_picture
from treadle.planner.uncertainty import doubts, recomputed_text
from treadle.schedules import family
from treadle.view.template import fill_template

_FRONT_ROWS = 6
"""Jobs of the Pareto front that show without a click."""


def page(
    found: SearchResult,
    chosen: PlannedStep,
    others: Sequence[Alternative],
    study: StragglerStudy | None = None,
    directory: Path = Path("plan"),
) -> str:
    """Return the HTML of a plan; its commands take the files of `directory`."""
    job = chosen.estimate.job
    assert job.layout is not None
    errors, marked = run_errors(job), _marked(found)
    parts = {
        "title": escape(f"{job.model.name} on {job.cluster.name}"),
        "head": escape(f"{job.model.name} on {job.cluster.name}: {_words(job)}"),
        "choice": escape(_choice(job)),
        "knobs": escape(describe(job)),
        "figures": _figures(chosen, errors, found.memory_limit),
        "backing": escape(_backing(errors)),
        "facts": _facts(chosen),
        "why": _why(found, marked),
        "others": _alternatives(others, errors, chosen.estimate.memory_bytes),
        "memory": memory_bars(chosen, found.memory_limit) + _folded("Memory as a table, in GiB", memory_table(chosen)),
        "step": step_picture(chosen),
        "doubts": _doubts(chosen, errors, found.memory_limit),
        "front": front_chart(found, marked),
        "jobs": _jobs(found.front),
        "stragglers": _study(study) if study is not None else "",
        "layout": escape(write_layout(job.layout)),
        "directory": escape(str(directory)),
        "commands": "\n".join(map(_unbroken, commands(chosen, directory))),
        "count": escape(count_text(found)),
    }
    return fill_template("treadle.planner", parts)


def _words(job: Job) -> str:
    """Return how a job uses the GPUs, in words."""
    cuts = [f"a pipeline of {job.pp} ranks" + (f" with {job.vpp} stages each" if job.vpp > 1 else "")]
    cuts = cuts if job.pp > 1 else ["no pipeline"]
    cuts += [f"tensors over {job.tp} GPUs"] if job.tp > 1 else []
    cuts += [f"sequences over {job.cp} GPUs"] if job.cp > 1 else []
    cuts += [f"experts over {job.ep} GPUs"] if job.ep > 1 else []
    return ", ".join([*cuts, counted(job.dp, "replica")])


_SHARDED = {
    "none": "the optimizer whole on each replica",
    "optimizer": "the optimizer sharded over replicas",
    "gradients": "optimizer and gradients sharded over replicas (ZeRO-2)",
    "parameters": "parameters, gradients and optimizer sharded over replicas (FSDP)",
}


def _choice(job: Job) -> str:
    """Return the rest of a job in words: its schedule, its micro-batches, and what it does to save memory."""
    batches = f"{job.num_microbatches:,} micro-batches of {counted(job.micro_batch_size, 'sequence')} a replica"
    saved = [f"{recomputed_text(job)} recomputed"] if job.recompute else []
    moved = "all saved activations" if job.offload == OFFLOADED else f"what {' and '.join(job.offload)} saves"
    saved += [f"{moved} offloaded to the host"] if job.offload else []
    kept = ", ".join(saved) or "nothing recomputed or offloaded"
    order = family(job.schedule)
    named = [f"schedule {order.name}: {order.summary}"] if job.pp > 1 or order.overlapped else []
    sharded = [_SHARDED[job.sharding]] if job.dp > 1 else []
    words = "; ".join([*named, batches, *sharded, kept])
    return f"{words[0].upper()}{words[1:]}."


def _figures(chosen: PlannedStep, errors: RunErrors, limit: int) -> str:
    """Return the figures that a payer asks for, each with its range where published runs give one."""
    job, low, high = chosen.estimate.job, errors.low, errors.high
    days, hours, tokens = chosen.days, chosen.gpu_hours, show_count(chosen.num_tokens)
    speed, mfu = chosen.tokens_per_s_per_gpu, chosen.mfu
    step = chosen.step_s
    figures = (
        ("step", f"{step:.3f}", "s", f"{_seconds(step * low)} to {_seconds(step * high)} s"),
        (f"time for {tokens} tokens", f"{days:,.1f}", "days", f"{days * low:,.1f} to {days * high:,.1f} days"),
        (f"cost of {tokens} tokens", f"{hours:,.0f}", "GPU-hours", f"{hours * low:,.0f} to {hours * high:,.0f}"),
        ("throughput", f"{speed:,.0f}", "tokens/s/GPU", f"{speed / high:,.0f} to {speed / low:,.0f}"),
        (f"MFU in {job.precision}", f"{mfu:.1%}", "", f"{mfu / high:.1%} to {mfu / low:.1%}"),
        ("memory", f"{chosen.estimate.memory_bytes / GIB:.1f}", "GiB", f"of {limit / GIB:.1f} GiB a GPU"),
    )
    return "".join(
        f"<div><dt>{what}</dt><dd><b>{value} <small>{unit}</small></b><span>{span}</span></dd></div>"
        for what, value, unit, span in figures
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:,.0f}"


def _backing(errors: RunErrors) -> str:
    return f"Ranges hold 80 % of runs like it ({errors.like}: {errors.runs:,} published runs); steps alone."


def _facts(chosen: PlannedStep) -> str:
    facts = {
        "batch": batch_text(chosen.estimate.job),
        "idle": f"{chosen.metrics.idle_share:.1%} of the step, mean over ranks",
        "exposed communication": f"{chosen.exposed_share:.1%} of the step",
        **({"pinned host memory": host_text(chosen)} if chosen.estimate.job.offload else {}),
        "verified": "clean" if chosen.report.clean else "with findings",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())


def _why(found: SearchResult, marked: Mapping[str, JobEstimate]) -> str:
    """Return the reason for the choice, and the jobs that stand beside it."""
    reason = found.reason or f"the fastest job that fits ({count_text(found)})"
    refused = "without offload" in beside_texts(found) and found.without_offload is None
    lost = " Nothing fits without offload." if refused else ""
    sentence = f"<p>It is {escape(reason)}.{lost}</p>"
    if len(marked) == 1:
        return sentence
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{escape(describe(each.job))}</td><td>{each.step_s:.3f} s</td>'
        f"<td>{each.memory_bytes / GIB:.1f} GiB</td></tr>"
        for name, each in marked.items()
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "job", "step", "memory"))
    table = f'<table class="rows beside"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return sentence + table


def _marked(found: SearchResult) -> dict[str, JobEstimate]:
    """Return the chosen job and those that stand beside it, by what each is."""
    marked = {"chosen": found.best}
    if found.fastest.job != found.best.job:
        marked["fastest"] = found.fastest
    plain = found.without_offload
    if plain is not None and plain.job not in (found.best.job, found.fastest.job):
        marked["without offload"] = plain
    return marked


def _alternatives(others: Sequence[Alternative], errors: RunErrors, best_bytes: int) -> str:
    """Return the best other value of each knob as bars, and all values folded."""
    if not others:
        return "<p>The search was narrowed to one value of every setting.</p>"
    nearest = list({other.knob: other for other in reversed(others)}.values())[::-1]
    made = alternative_bars(nearest, errors.pair, best_bytes)
    note = f"Within {errors.pair:.1%}, the shaded band, published runs do not separate two jobs."
    if any(other.slower is not None and other.slower < 0 for other in others):
        note += " Hollow bars: faster."
    rest = ""
    if len(nearest) < len(others):
        rest = _folded(f"All {len(others)} changes", alternative_bars(others, errors.pair, best_bytes))
    return f'{made}<p class="note">{note}</p>{rest}'


def _doubts(chosen: PlannedStep, errors: RunErrors, limit: int) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(doubt.source)}</th><td>{"yes" if doubt.covered else "no"}</td>'
        f"<td>{escape(doubt.text)}</td></tr>"
        for doubt in doubts(chosen, errors, limit)
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("source", "in the range", "what is known"))
    table = f'<table class="rows doubts"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return _interval(chosen.step_s, errors) + table


def _interval(step_s: float, errors: RunErrors) -> str:
    """Return the range of the step as a bar, from its low end to its high one, with the predicted step marked."""
    low, high = step_s * errors.low, step_s * errors.high
    at = (step_s - low) / (high - low) * 100 if high > low else 50.0
    return (
        f'<div class="interval" style="--at:{min(max(at, 0.0), 100.0):.2f}%"><span>{_seconds(low)} s</span>'
        f'<span class="range"><b>predicted {step_s:.3f} s</b></span><span>{_seconds(high)} s</span></div>'
    )


def _jobs(front: Sequence[JobEstimate]) -> str:
    shown, rest = front[:_FRONT_ROWS], front[_FRONT_ROWS:]
    return _job_table(shown) + (_folded(f"{len(rest)} more of the front", _job_table(rest)) if rest else "")


def _job_table(jobs: Iterable[JobEstimate]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(describe(each.job))}</th><td>{each.step_s:.3f} s</td>'
        f"<td>{each.memory_bytes / GIB:.1f} GiB</td></tr>"
        for each in jobs
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("job", "step", "memory"))
    return f'<table class="rows jobs"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _study(study: StragglerStudy) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(row.name)}</th>'
        + "".join(f"<td>{escape(show_time(row.clock, ticks))}</td>" for ticks in (row.base, row.median))
        + "".join(f"<td>+{row.slowdown(share):.1%}</td>" for share in QUANTILES.values())
        + "</tr>"
        for row in study.rows
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("schedule", "step without", "median with", *QUANTILES))
    title = escape(f"{study.stragglers}, {study.num_draws} draws: {study_text(study)}")
    return (
        f"<section><h2>Slow GPUs</h2><p>{title}</p>"
        f'<div class="scroll"><table class="rows numbers"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></section>"
    )


def _unbroken(line: str) -> str:
    """Return a line whose words stay whole where they fit: a browser breaks them after hyphens."""
    return " ".join(f"<span>{escape(word)}</span>" for word in line.split(" "))


def _folded(title: str, html: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{html}</details>"
