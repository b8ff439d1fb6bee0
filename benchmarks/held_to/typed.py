"""Published runs as a person types them: `treadle plan` with a run's sizes, precision, schedule, recomputation and CUDA
graphs, as its recipe names them, and nothing else.

Gradients, layout and whatever else a recipe sets are those that the command takes by itself; `differences` counts them.
Where the command refuses a run for its memory, it is typed again with --gradients bf16, as the error proposes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from typer.testing import CliRunner

from held_to.printed import Row
from treadle.cli.app import app
from treadle.estimate import Job, ModelShape, load_model
from treadle.fields.input_files import toml_value
from treadle.ir.blocks import parse_layout
from treadle.planner.job_estimate import estimate_candidate
from treadle.planner.space import Candidate

_GIVEN = ("cuda_graph", "sharding")
"""Fields that are typed where a run differs from the command's default."""


class TypedPlan(NamedTuple):
    """A command and what it printed; `job` is None where it refused."""

    command: tuple[str, ...]
    job: Job | None
    step_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    like: str = ""


def command_of(job: Job) -> tuple[str, ...]:
    """Return the options that a person types for a job."""
    sizes = {"tp": job.tp, "cp": job.cp, "pp": job.pp, "micro-batch-size": job.micro_batch_size}
    sizes |= {"ep": job.ep} if job.model.is_moe else {}
    sizes |= {"vpp": job.vpp} if job.vpp > 1 else {}
    given = {field: getattr(job, field) for field in _GIVEN if getattr(job, field) != getattr(Job, field)}
    options = {
        "model": _model_name(job.model),
        "cluster": f"{job.cluster.gpu}:{job.cluster.num_gpus}",
        "precision": job.precision,
        "tokens-per-batch": job.global_batch_size * job.seq_len,
        "seq-len": job.seq_len,
        **sizes,
        "schedule": job.schedule,
        "recompute": ",".join(job.recompute) or "no",
        **{field.replace("_", "-"): value for field, value in given.items()},
    }
    return tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))


@cache
def _model_name(model: ModelShape) -> str:
    """Return a preset's name, or a file of the model."""
    try:
        if load_model(model.name) == model:
            return model.name
    except ValueError:
        pass
    file = Path(mkdtemp()) / f"{model.name.replace(' ', '_')}.toml"
    defaults = ModelShape("", 64, 1, 1, 1)
    given = {each.name: getattr(model, each.name) for each in fields(model) if each.name not in ("name", "source")}
    lines = [f"{name} = {toml_value(value)}" for name, value in given.items() if value != getattr(defaults, name)]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return str(file)


@cache
def typed_plan(job: Job) -> TypedPlan:
    """Type the command of a job, a second time with BF16 gradients where it does not fit otherwise."""
    plain = command_of(job)
    for words in (plain, (*plain, "--gradients", "bf16")):
        done = CliRunner().invoke(app, ("plan", *words, "--json"))
        if done.exit_code == 0:
            chosen = json.loads(done.stdout)["chosen"]
            if not chosen["offload"]:
                return _printed(words, job, chosen)
    return TypedPlan(plain, None)


def _printed(words: tuple[str, ...], job: Job, chosen: dict[str, Any]) -> TypedPlan:
    given = {each.name: chosen[each.name] for each in fields(Job) if each.name in chosen and each.name != "layout"}
    given |= {"recompute": tuple(chosen["recompute"]), "offload": (), "layout": parse_layout(chosen["layout"])}
    found, errors = Job(job.model, job.cluster, **given), chosen["uncertainty"]
    return TypedPlan(words, found, chosen["step_s"], errors["low_s"], errors["high_s"], errors["like"])


def step_with(job: Job, like: Job) -> float:
    """Return the step that the command prints with the constants of another job's cluster, cut for them."""
    cluster = replace(job.cluster, efficiency=like.cluster.efficiency)
    candidate = Candidate(replace(job, cluster=cluster, layout=None), balanced=True)
    return estimate_candidate(candidate).simulated_whole().step_s


def differences(rows: Iterable[Row]) -> dict[str, int]:
    """Return in how many rows each field of the planned job differs from the run's."""
    found: Counter[str] = Counter()
    for row in rows:
        plan = typed_plan(row.job)
        if plan.job is not None:
            names = (each.name for each in fields(Job) if each.name not in ("model", "cluster"))
            found.update(name for name in names if getattr(plan.job, name) != getattr(row.job, name))
    return dict(found)
