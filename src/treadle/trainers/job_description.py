"""A trainer's configuration as it was read: the fields of a Job, and the settings that the estimate leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from treadle.estimate import Cluster, Job, ModelShape
from treadle.passes.cut import cut_evenly
from treadle.schedules import family

EFFECTS = ("step", "memory", "step and memory", "unknown")


class Unread(NamedTuple):
    """A setting that the estimate does not follow."""

    setting: str
    value: str
    matters: str
    """To the step, to memory, to both, or unknown."""


@dataclass
class Described:
    """What a file says, in the words of Job and ModelShape."""

    shape: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelShape; empty where the file names its model only."""

    model: str = ""
    """The name of the model in the file."""

    job: dict[str, Any] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    num_read: int = 0
    """Settings that touch the step or memory and are in the estimate."""

    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReadJob:
    """A job with the trainer whose configuration it was read from."""

    job: Job
    trainer: str
    unread: tuple[Unread, ...] = ()
    num_read: int = 0
    notes: tuple[str, ...] = ()


def job_of(found: Described, shape: ModelShape, cluster: Cluster, names: Mapping[str, str], title: str) -> Job:
    """Return the job that was described, with its layers on stages as its trainer puts them.

    Raises:
        ValueError: sizes do not divide, or the trainer's schedule cannot run them; in the words of the trainer.

    """
    given = dict(found.job)
    layout = given.pop("layout", None)
    sizes = {name: given.get(name, 1) for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch_size")}
    cut = sizes["tp"] * sizes["cp"] * sizes["pp"]
    if cluster.num_gpus % cut == 0:
        given.setdefault("global_batch_size", sizes["micro_batch_size"] * (cluster.num_gpus // cut))
    for name, size, of, whole in _divisions(sizes, given, shape, cluster, has_layout=layout is not None):
        if whole % size:
            raise ValueError(
                f"{title}: {_named(of, names)} ({whole:,}) is not divisible by {_named(name, names)} ({size:,})"
            )
    try:
        job = Job(shape, cluster, **given)
        family(job.schedule).size(job.pp, job.vpp, job.num_microbatches)
    except ValueError as error:
        raise ValueError(f"{title}: {error}") from None
    stages = layout or (cut_evenly(shape.blocks, job.num_stages))
    if len(stages) != job.num_stages:
        raise ValueError(
            f"{title}: {names.get('layout', 'the layout')} has {len(stages)} stages, and "
            f"{_named('pp x vpp', names)} are {job.num_stages}"
        )
    return replace(job, layout=stages)


def _divisions(
    sizes: Mapping[str, int], given: Mapping[str, Any], shape: ModelShape, cluster: Cluster, *, has_layout: bool
) -> list[tuple[str, int, str, int]]:
    """Return what has to divide what."""
    cut = sizes["tp"] * sizes["cp"] * sizes["pp"]
    checks = [("tp x cp x pp", cut, "the world size", cluster.num_gpus)]
    if cluster.num_gpus % cut == 0:
        dp = cluster.num_gpus // cut
        batch = sizes["micro_batch_size"] * dp
        checks.append(("micro_batch_size", batch // dp * dp, "global_batch_size", given["global_batch_size"]))
        checks += [("ep x etp", sizes["ep"] * sizes["etp"], "tp x cp x dp", cluster.num_gpus // sizes["pp"])]
    checks.append(("tp", sizes["tp"], "num_attention_heads", shape.num_attention_heads))
    if shape.is_moe:
        checks.append(("ep", sizes["ep"], "num_experts", shape.num_experts))
    if not has_layout:
        checks.append(("pp x vpp", sizes["pp"] * sizes["vpp"], "num_hidden_layers", shape.num_hidden_layers))
    if sizes["cp"] > 1:
        checks.append(("2 x cp", 2 * sizes["cp"], "seq_len", given.get("seq_len", Job.seq_len)))
    return checks


def _named(text: str, names: Mapping[str, str]) -> str:
    """Return an expression of Job's names with the trainer's: tp x pp."""
    words = (names.get(word, word) for word in text.split())
    named = " ".join(words)
    return f"{named} x data parallelism" if text == "micro_batch_size" else named
