"""Saves a run's state while it goes on, and loads it on any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful

from treadle.host.errors import named
from treadle.runtime import Pipeline
from treadle.train.checkpoint import files
from treadle.train.checkpoint.needs import forms_in, unmet, unneeded
from treadle.train.checkpoint.parts import State
from treadle.train.checkpoint.planners import PartCopies, PartLoadPlanner, PartSavePlanner, wrapped
from treadle.train.checkpoint.writing import PublishingWriter


class Checkpointer:
    """Checkpoints of a run in a directory that all ranks see. Every rank calls every method, in the same order.

    Args:
        directory: Where checkpoints are; it is made.
        pipe: The pipeline whose ranks save and load.
        keep: How many complete checkpoints stay; older ones are removed once a newer is complete.
        every: A checkpoint is due every so many steps; 0 for never.
        timeout_s: How long ranks wait for each other's writes.

    Example:
        `optimizer` is a `ShardedOptimizer` of the pipeline `pipe`.

        checkpoints = Checkpointer("run/checkpoints", pipe=pipe, keep=2, every=100)
        latest = checkpoints.latest()
        extra = checkpoints.load(latest, optimizer) if latest is not None else {"seen": 0}
        for step in range(latest or 0, steps):
            ...
            if checkpoints.due(step + 1):
                checkpoints.save(step + 1, optimizer, {"seen": seen})
        checkpoints.close()

    """

    def __init__(
        self,
        directory: str | Path,
        *,
        pipe: Pipeline,
        keep: int = 2,
        every: int = 0,
        timeout_s: float = 1800.0,
    ) -> None:
        if keep < 1 or every < 0:
            raise ValueError(f"keep is 1 or more, and every 0 (never) or more, got keep={keep}, every={every}")
        self.directory, self._keep, self._every = Path(directory), keep, every
        self.directory.mkdir(parents=True, exist_ok=True)
        self._group = _make_group(pipe, timeout_s)
        self._saving: Future[Any] | None = None
        self._step = 0

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after so many steps."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def save(self, step: int, state: Stateful, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the state and return; a thread writes it. Waits for the save before, if that is not done.

        Args:
            step: The checkpoint's number, such as how many steps were done. One of this number is replaced.
            state: What has `state_dict()`, a `ShardedOptimizer`.
            extra: What else the run has to remember, once for all ranks: what JSON can hold. That of the first rank
                counts.

        Raises:
            RuntimeError: The save before this one failed.

        """
        self.wait()
        if not 0 <= step < 10**12:
            raise ValueError(f"a checkpoint's step is from 0 on, got {named(step)}")
        writer = PublishingWriter(files.directory_of(self.directory, step), _as_json(extra or {}), self._keep)
        saving = async_save(
            wrapped(_state_of(state)),
            storage_writer=writer,
            planner=PartSavePlanner(),
            process_group=self._group,
            async_stager=PartCopies(),
        )
        assert isinstance(saving, Future), "the copy is made before it returns"
        self._saving, self._step = saving, step

    def wait(self) -> None:
        """Wait until the last save is complete: on the disk, and visible.

        Raises:
            RuntimeError: It failed. The checkpoints before it are as they were.

        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except Exception as error:
            raise RuntimeError(
                f"the checkpoint of step {self._step} in {self.directory} is not complete, and will not be loaded: "
                f"{error}"
            ) from error

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, as the first rank sees it; None if there is none."""
        self.wait()
        told: list[int | None] = [next(reversed(files.complete_steps(self.directory)), None)]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        return told[0]

    def load(self, step: int, state: Stateful) -> dict[str, Any]:
        """Read a checkpoint into the state, whatever layout saved it.

        Returns:
            The `extra` that was saved with it.

        Raises:
            ValueError: On all ranks, if it is not complete, or has not the tensors that this run has. The state is as
                it was.

        """
        self.wait()
        path, parts = files.directory_of(self.directory, step), _state_of(state)
        manifest = files.read_manifest(path)
        have = _forms(path) if manifest is not None else {}
        reason = unmet(have, parts) if have else self._incomplete()
        self._refuse(path, reason, have, parts)
        assert manifest is not None, "else all ranks refuse"
        load(
            wrapped(parts), storage_reader=FileSystemReader(path), planner=PartLoadPlanner(), process_group=self._group
        )
        state.load_state_dict(parts)
        extra: dict[str, Any] = manifest["extra"]
        return extra

    def close(self) -> None:
        """Wait for the last save and give back the group; every rank calls it before the world is destroyed."""
        self.wait()
        dist.destroy_process_group(self._group)

    def _incomplete(self) -> str:
        steps = ", ".join(map(str, files.complete_steps(self.directory))) or "none"
        return f"it is not there, or a file of it is missing or cut off; complete are the steps {steps}"

    def _refuse(self, path: Path, reason: str | None, have: Mapping[str, str], need: State) -> None:
        """Raise on all ranks if one has a reason, or none needs a tensor that the checkpoint has."""
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, (reason, list(need)), group=self._group)
        reasons = [f"{each} (rank {number})" for number, (each, _) in enumerate(told) if each is not None]
        why = reasons[0] if reasons else unneeded(have, {name for _, names in told for name in names})
        if why is not None:
            raise ValueError(f"the checkpoint {path} is not loaded: {why}")


def _forms(path: Path) -> dict[str, str]:
    """Return what tensors a checkpoint has; none if its metadata cannot be read."""
    try:
        return forms_in(FileSystemReader(path).read_metadata())
    except Exception:  # whatever unpickling a damaged file does
        return {}


def _make_group(pipe: Pipeline, timeout_s: float) -> dist.ProcessGroup:
    """Make a group of the pipeline's ranks for saving: its thread must not meet a step's communication."""
    ranks = sorted(rank for row in pipe.position.ranks for rank in row)
    part = len(ranks) != dist.get_world_size()
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=part)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group


def _state_of(state: Stateful) -> State:
    if not isinstance(state, Stateful):
        raise TypeError(
            f"the state is what has state_dict() and load_state_dict(), such as a ShardedOptimizer, got {named(state)}"
        )
    return state.state_dict()


def _as_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what will be read again; refuse what JSON would lose."""
    for name, value in extra.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same or not isinstance(name, str):
            raise ValueError(
                f"extra[{name!r}] is {named(value)}, which JSON does not give back as it was; use numbers, strings, "
                "lists, and dicts with strings as keys"
            )
    return dict(extra)
