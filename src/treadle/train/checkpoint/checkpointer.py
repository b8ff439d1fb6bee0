"""Saves a run's state while it goes on, and loads it on any layout."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful

from treadle.host.errors import TreadleError, named
from treadle.runtime import Pipeline
from treadle.train.checkpoint import on_disk
from treadle.train.checkpoint.checkpoint_needs import forms_in, unmet, unneeded
from treadle.train.checkpoint.lock import DirectoryLock, token_in
from treadle.train.checkpoint.metadata_reader import CheckpointReader
from treadle.train.checkpoint.on_disk import DamagedError, Manifest
from treadle.train.checkpoint.planners import PartCopies, PartLoadPlanner, PartSavePlanner, shared_out, wrapped
from treadle.train.checkpoint.tensor_parts import State
from treadle.train.checkpoint.writing import PublishingWriter


class SaveError(TreadleError, RuntimeError):
    """A checkpoint was not saved. Those before it are as they were."""


class Checkpointer:
    """Checkpoints of a run in a directory that all ranks see. Every rank calls every method, in the same order.

    One run at a time has the directory: the first rank locks it until `close`, or until its process ends.

    Args:
        directory: Where checkpoints are; it is made.
        pipe: The pipeline whose ranks save and load.
        keep: How many complete checkpoints stay; older ones are removed once a newer is complete.
        every: A checkpoint is due every so many steps; 0 for never.
        timeout_s: How long ranks wait for each other's writes.
        say: Called on the first rank with a line: a save that failed, a damaged checkpoint that was skipped.

    Raises:
        ValueError: On all ranks: another run has the directory, or ranks do not see the same one.

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
        say: Callable[[str], Any] = print,
    ) -> None:
        if keep < 1 or every < 0:
            raise ValueError(f"keep is 1 or more, and every 0 (never) or more, got keep={keep}, every={every}")
        self.directory, self._keep, self._every = Path(directory), keep, every
        self._group = _make_group(pipe, timeout_s)
        self._is_first = dist.get_rank(self._group) == 0
        self._say: Callable[[str], Any] = say if self._is_first else _nothing
        self._lock: DirectoryLock | None = None
        try:
            self._claim()
        except ValueError:
            dist.destroy_process_group(self._group)
            raise
        self._pipe = pipe
        self._saving: Future[Any] | None = None
        self._step = 0
        self._intact: set[int] = set()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after so many steps. Reports a save that has failed since."""
        if self._saving is not None and self._saving.done():
            self._report_failure()
        return self._every > 0 and step > 0 and step % self._every == 0

    def save(self, step: int, state: Stateful, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the state and return; a thread writes it. Waits for the save before, if that is not done.

        A save that failed is reported (`say`), and what it wrote is removed; the next one is tried as any other.

        Args:
            step: The checkpoint's number, such as how many steps were done. One of this number is replaced.
            state: What has `state_dict()`, a `ShardedOptimizer`.
            extra: What else the run has to remember, once for all ranks: what JSON can hold. That of the first rank
                counts.

        """
        self._report_failure()
        if not 0 <= step < 10**12:
            raise ValueError(f"a checkpoint's step is from 0 on, got {named(step)}")
        path = on_disk.directory_of(self.directory, step)
        writer = PublishingWriter(path, _as_json(extra or {}), step=step, keep=self._keep, say=self._say)
        self._intact.discard(step)
        saving = async_save(
            wrapped(self._written_here(_state_of(state))),
            storage_writer=writer,
            planner=PartSavePlanner(),
            process_group=self._group,
            async_stager=PartCopies(),
        )
        assert isinstance(saving, Future), "the copy is made before it returns"
        self._saving, self._step = saving, step

    def _written_here(self, parts: State) -> State:
        """Return the parts that this rank writes: replicas hold the same parameters, and divide them."""
        listed = [[name, part.offset, part.size_bytes] for name, part in parts.items()]
        rows, own = self._pipe.gather_over_replicas(listed)
        held = [[(name, tuple(offset), size_bytes) for name, offset, size_bytes in row] for row in rows]
        mine = shared_out(held)[own]
        return {name: part for name, part in parts.items() if name in mine}

    def wait(self) -> None:
        """Wait until the last save is complete: on the disk, and visible.

        Raises:
            SaveError: It failed. The checkpoints before it are as they were.

        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            path = on_disk.directory_of(self.directory, self._step)
            shutil.rmtree(on_disk.partial_of(path), ignore_errors=True)
            raise SaveError(
                f"the checkpoint of step {self._step} in {self.directory} is not complete, and will not be loaded: "
                f"{_in_a_line(error)}; {self._complete()}"
            ) from error

    def latest(self) -> int | None:
        """Return the step of the newest intact checkpoint; None if there is no checkpoint at all.

        Every file is read and held to the digest that was taken when it was written, by each rank a share of them.
        A newer checkpoint that is damaged is skipped, which is reported (`say`).

        Raises:
            ValueError: There are checkpoints, and none is intact.

        """
        self.wait()
        steps: list[int] = self._from_first(on_disk.found_steps(self.directory) if self._is_first else [])
        skipped: list[str] = []
        for step in reversed(steps):
            reason = self._damage(step)
            if reason is None:
                for line in skipped:
                    self._say(f"{line}; the checkpoint before it is taken")
                return step
            skipped.append(f"the checkpoint of step {step} in {self.directory} is damaged, and skipped: {reason}")
        if skipped:
            raise ValueError(
                f"no checkpoint in {self.directory} is intact; {'; '.join(skipped)}; move the directory away to start "
                "without them"
            )
        return None

    def load(self, step: int, state: Stateful) -> dict[str, Any]:
        """Read a checkpoint into the state, whatever layout saved it.

        Returns:
            The `extra` that was saved with it.

        Raises:
            ValueError: On all ranks, if it is not complete, is damaged, or has not the tensors that this run has. The
                state is as it was, unless reading it failed in its midst.

        """
        self.wait()
        path, parts = on_disk.directory_of(self.directory, step), _state_of(state)
        damage = None if step in self._intact else self._damage(step)
        if damage is not None:
            raise ValueError(f"the checkpoint {path} is not loaded: {damage}; {self._complete()}")
        reader = CheckpointReader(path)
        have, reason = _forms(reader)
        self._refuse(path, reason if reason is not None else unmet(have, parts), have, parts)
        try:
            load(wrapped(parts), storage_reader=reader, planner=PartLoadPlanner(), process_group=self._group)
        except CheckpointException as error:
            raise ValueError(f"the checkpoint {path} cannot be read: {_in_a_line(error)}") from error
        state.load_state_dict(parts)
        return on_disk.read_manifest(self.directory, step).extra

    def close(self) -> None:
        """Wait for the last save and give back directory and group; every rank calls it before the world is destroyed.

        Raises:
            SaveError: The last save failed.

        """
        try:
            self.wait()
        finally:
            self.release()
            dist.destroy_process_group(self._group)

    def release(self) -> None:
        """Let another run have the directory."""
        if self._lock is not None:
            self._lock.release()

    def _claim(self) -> None:
        """Lock the directory on the first rank, and refuse ranks that see another one under its name."""
        told: tuple[str | None, str] = (None, "")
        if self._is_first:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = DirectoryLock(self.directory)
                told = self._lock.token, socket.gethostname()
            except (ValueError, OSError) as error:
                told = None, str(error)
        token, text = self._from_first(told)
        if token is None:
            raise ValueError(text)
        other = None if token_in(self.directory) == token else f"rank {dist.get_rank()} on {socket.gethostname()}"
        others = [each for each in self._gathered(other) if each is not None]
        if others:
            self.release()
            raise ValueError(
                f"{self.directory} is not shared between nodes: {others[0]} does not see what the first rank writes on "
                f"{text}; give --checkpoint.directory or --output a path that all nodes share"
            )
        if self._lock is not None and self._lock.missing is not None:
            self._say(f"{self.directory} cannot be locked ({self._lock.missing}): start no second run there")

    def _report_failure(self) -> None:
        try:
            self.wait()
        except SaveError as error:
            self._say(str(error))

    def _complete(self) -> str:
        steps = ", ".join(map(str, on_disk.complete_steps(self.directory))) or "none"
        return f"complete are the steps {steps}"

    def _damage(self, step: int) -> str | None:
        """Return on all ranks what is damaged in a checkpoint. Each reads a share of its files."""
        rank, size, reason = dist.get_rank(self._group), dist.get_world_size(self._group), None
        try:
            manifest: Manifest = on_disk.read_manifest(self.directory, step)
            on_disk.check_files(self.directory, manifest, sorted(manifest.files)[rank::size])
        except DamagedError as error:
            reason = str(error)
        reasons = [each for each in self._gathered(reason) if each is not None]
        if not reasons:
            self._intact.add(step)
            self._note_missing_digests(manifest)
        return next(iter(reasons), None)

    def _note_missing_digests(self, manifest: Manifest) -> None:
        if not manifest.has_digests:
            self._say(
                f"the checkpoint of step {manifest.step} in {self.directory} has no digests, as an earlier version of "
                "Treadle wrote it: its files have the sizes that were written, and damage within them is not noticed; "
                "the next save has digests"
            )

    def _from_first(self, value: Any) -> Any:
        told = [value]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        return told[0]

    def _gathered(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, value, group=self._group)
        return told

    def _refuse(self, path: Path, reason: str | None, have: Mapping[str, str], need: State) -> None:
        """Raise on all ranks if one has a reason, or none needs a tensor that the checkpoint has."""
        told = self._gathered((reason, list(need)))
        reasons = [f"{each} (rank {number})" for number, (each, _) in enumerate(told) if each is not None]
        why = reasons[0] if reasons else unneeded(have, {name for _, names in told for name in names})
        if why is not None:
            raise ValueError(f"the checkpoint {path} is not loaded: {why}")


def _forms(reader: CheckpointReader) -> tuple[dict[str, str], str | None]:
    """Return what tensors a checkpoint has, or why its metadata, which are as they were written, cannot be read."""
    try:
        return forms_in(reader.read_metadata()), None
    except Exception as error:  # whatever another version's classes are
        return {}, f"its {on_disk.METADATA} cannot be read here: {named(error)}"


def _in_a_line(error: BaseException) -> str:
    """Return what an error says; of one that torch gathered, what the first rank that has one says."""
    where = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items())
        where = f" (rank {rank})"
    return (" ".join(str(error).split()) or type(error).__name__) + where


def _nothing(line: str) -> None:
    """Say nothing: the first rank does."""


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
