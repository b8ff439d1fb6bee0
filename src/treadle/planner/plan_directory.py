"""The directory of a plan as a target: schedule.txt, costs.toml, and in plan.toml how the schedule is lowered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from treadle.costs import load_costs
from treadle.estimate import Job
from treadle.fields.fields import Fields
from treadle.fields.input_files import read_text, read_toml, toml_value
from treadle.fields.kinds import Flag, ListOf, Number, OneOf, Text, ValueKind
from treadle.files import parse_any
from treadle.ir.blocks import parse_layout, write_layout
from treadle.lowering.options import PARTS, WHOLE_CELLS, LoweringOptions
from treadle.planner.job_estimate import JobEstimate, describe
from treadle.planner.structure import columns
from treadle.step import Step

SCHEDULE, COSTS, OPTIONS = "schedule.txt", "costs.toml", "plan.toml"
"""The files of a plan that other commands read."""

_TIED = ((0, -1),)
"""Embedding and head share a parameter."""

_KINDS: dict[str, ValueKind] = {
    "layout": Text(),
    "by_layer": Flag(),
    "moe": Flag(),
    "padded": Flag(),
    "recompute": ListOf(OneOf(PARTS)),
    "offload": Flag(),
    "tied": Flag(),
    "ep": Number(1, whole=True),
    "dp": Number(1, whole=True),
}
"""The entries of plan.toml; they have the names of a command's options."""


def is_plan(path: Path) -> bool:
    """Return True for a directory that `treadle plan --files` wrote."""
    return (path / OPTIONS).is_file()


def options_toml(estimate: JobEstimate) -> str:
    """Return plan.toml: the options with which every command lowers the schedule as the plan does."""
    job, options, (ep, dp) = estimate.job, estimate.structure.options, columns(estimate.job)
    values = {name: getattr(replace(options, ep=ep, dp=dp), name) for name in _KINDS if name not in ("layout", "tied")}
    given = {name: value for name, value in values.items() if value != getattr(WHOLE_CELLS, name)}
    given |= {"tied": True} if options.tied else {}
    lines = [
        f"# {job.model.name} on {job.cluster.name}: {describe(job)}",
        f"# How {SCHEDULE} is lowered. Every command that takes a schedule takes this directory.",
        *(f"# {line}" for line in _mesh_notes(job)),
        f"layout = {toml_value(write_layout(estimate.structure.blocks, dense=True))}",
        *(f"{name} = {toml_value(value)}" for name, value in given.items()),
    ]
    return "\n".join(lines) + "\n"


def _mesh_notes(job: Job) -> list[str]:
    """Say what `ep` and `dp` count where that is not the job's EP and DP."""
    ep, dp = columns(job)
    notes = [f"ep counts the TP{job.tp} groups that EP{job.ep} spans"] if job.model.is_moe and ep != job.ep else []
    if dp > 1 and dp != job.dp:
        notes.append("dp is expert data parallelism" if job.model.is_moe else f"dp is DP{job.dp} x CP{job.cp}")
    return notes


def read_plan(directory: str | Path) -> Step:
    """Read a directory that `treadle plan --files` wrote.

    Returns:
        The step of the plan: its schedule, costs and options.

    Raises:
        ValueError: a file is missing or holds something else; the message names file and field.

    """
    place = Path(directory)
    schedule = parse_any(read_text(place / SCHEDULE), str(place / SCHEDULE))
    return Step(schedule, load_costs(str(place / COSTS)), _read_options(place / OPTIONS), name=str(directory))


def _read_options(path: Path) -> LoweringOptions:
    fields = Fields(str(path), "", read_toml(path).table)
    fields.expect(("layout",), tuple(_KINDS))
    given = {name: fields.get(name, _KINDS[name]) for name in fields.content}
    try:
        given["blocks"] = parse_layout(given.pop("layout"))
        given["recompute"] = tuple(given.get("recompute", ()))
        given["tied"] = _TIED if given.get("tied", False) else ()
        return LoweringOptions(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
