"""Trainers on torch.distributed.pipelining and FSDP: the schedules they run, and what no job of theirs has."""

from __future__ import annotations

import re

from treadle.estimate import Job
from treadle.schedules import known

CLASSES = {
    found[1]: each.name
    for each in known().values()
    for trainer in each.trainers
    if (found := re.match(r"torch \(Schedule(\w+)", trainer)) is not None
}
"""Schedules by torch's class, without `Schedule`."""

_ALLOWED = {
    "etp": (1,),
    "precision": ("bf16",),
    "offload": ((),),
    "gradient_bytes": (4,),
    "moment_bytes": (4,),
    "saved": ("bf16",),
    "dispatch": ("bf16",),
    "recompute_layers": (0,),
}


def class_of(schedule: str) -> str:
    """Return torch's name of a schedule."""
    return next(name for name, each in CLASSES.items() if each == schedule)


def schedule_of(name: str, title: str, setting: str) -> str:
    """Return the schedule of torch's name, in any case and with underscores.

    Raises:
        ValueError: it is none of those.

    """
    found = {each.lower(): schedule for each, schedule in CLASSES.items()}.get(name.replace("_", "").lower())
    if found is None:
        raise ValueError(f"{title}: {setting} is {', '.join(CLASSES)}, got {name!r}")
    return found


def lacking(job: Job, shardings: tuple[str, ...]) -> str | None:
    """Return what such trainers cannot run of a job, or None."""
    if job.schedule not in CLASSES.values():
        return f"it runs {', '.join(sorted(CLASSES.values()))}, got {job.schedule}"
    if job.recompute not in ((), ("full",)):
        return f"activation checkpointing is of whole layers or none, got {'+'.join(job.recompute)}"
    for name, allowed in _ALLOWED.items():
        if getattr(job, name) not in allowed:
            return f"{name} is {allowed[0] or 'none'}, got {getattr(job, name)}"
    if job.sharding not in shardings:
        return f"what replicas divide is {' or '.join(shardings)}, got {job.sharding}; add --sharding {shardings[0]}"
    return None
