"""The trainers, each with what it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from treadle.estimate import Cluster, Job, ModelShape, load_model
from treadle.estimate.model_shape import PRESETS
from treadle.fields.nearest import hint
from treadle.trainers import automodel, bridge, megatron, titan
from treadle.trainers.job_description import Described, ReadJob, job_of


@dataclass(frozen=True)
class TrainerFormat:
    """A trainer. Settings are options or entries of its configuration, by the names that it gives them."""

    name: str
    title: str
    suffix: str
    """Of the file that launches or configures it."""

    names: Mapping[str, str]
    """Its settings for fields of Job and ModelShape."""

    read: Callable[[str], Described | None]
    """What a text describes, or None where it is not of this trainer."""

    settings: Callable[[Job], Mapping[str, str]]
    """The settings of a job; a ValueError where the trainer cannot run it."""

    launch: Callable[[Job], str]
    """The text of the file."""

    names_model: bool = False
    """The file names its model, and has no sizes of it."""

    shardings: tuple[str, ...] = ()
    """What it shards; empty where it is as a search has it."""

    resolve: Callable[[Described, str, int], None] | None = None
    """Completes a description by the model's blocks and the number of GPUs."""

    @property
    def even_stages(self) -> bool:
        """True if a search gives it stages that are even in layers only."""
        return bool(self.shardings)

    def runs(self, job: Job) -> bool:
        """Return True if the trainer can run a job."""
        try:
            self.settings(job)
        except ValueError:
            return False
        return True


def _trainer(name: str, suffix: str, module: ModuleType) -> TrainerFormat:
    return TrainerFormat(name, module.TITLE, suffix, module.NAMES, module.read, module.settings, module.launch)


def _of_torch(name: str, suffix: str, module: ModuleType) -> TrainerFormat:
    """Return a trainer that names its model, whose layers decide the stages."""
    return replace(_trainer(name, suffix, module), names_model=True, shardings=module.SHARDINGS, resolve=module.resolve)


TRAINERS = {
    each.name: each
    for each in (
        _trainer("megatron", ".sh", megatron),
        _trainer("bridge", ".yaml", bridge),
        _of_torch("automodel", ".yaml", automodel),
        _of_torch("torchtitan", ".sh", titan),
    )
}


def trainer(name: str) -> TrainerFormat:
    """Return a trainer by name.

    Raises:
        ValueError: there is none of this name.

    """
    found = TRAINERS.get(name)
    if found is None:
        raise ValueError(f"a trainer is {', '.join(TRAINERS)}, got {name!r}{hint(name, list(TRAINERS))}")
    return found


def read_job(path: str | Path, cluster: Cluster, model: ModelShape | None = None) -> ReadJob:
    """Read a trainer's configuration as a job on a cluster.

    Args:
        path: a log, a launch script, or a configuration.
        cluster: what it runs on.
        model: instead of the file's, or where the file only names one.

    Raises:
        ValueError: no trainer's configuration was recognised, a size is missing, or sizes do not divide.

    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    for each in TRAINERS.values():
        found = each.read(text)
        if found is not None:
            shape = model or _shape(found, file)
            if each.resolve is not None:
                each.resolve(found, shape.blocks, cluster.num_gpus)
            job = job_of(found, shape, cluster, each.names, each.title)
            return ReadJob(job, each.name, tuple(found.unread), found.num_read, tuple(found.notes))
    raise ValueError(
        f"{file} has no configuration of {', '.join(each.title for each in TRAINERS.values())}; give a log with "
        "Megatron-LM's arguments, a launch script, or a trainer's YAML or JSON"
    )


def _shape(found: Described, file: Path) -> ModelShape:
    if not found.shape and (PRESETS / f"{found.model}.toml").is_file():
        return load_model(found.model)
    if not found.shape:
        raise ValueError(
            f"{file} names its model ({found.model or 'no name'}) and has no sizes of it; add --model with a preset, "
            "or its config.json"
        )
    return ModelShape(found.model or file.stem, **found.shape)
