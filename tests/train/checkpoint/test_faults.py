"""Checkpoints that were cut off, damaged, or are another run's: none is loaded, and none harms the next."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import refusal
from tests.support.ranks import check, run_ranks
from tests.train.checkpoint.states import Box, make_pipe
from treadle.train.checkpoint import Checkpointer, SaveError, State, TensorPart, complete_steps, on_disk
from treadle.train.checkpoint.lock import DirectoryLock, token_in
from treadle.train.checkpoint.on_disk import Manifest

POINTS = 12
"""More moments than a save has: before each write is brought to the disk, each rename, and after all of them."""


def kill_at(point: int) -> None:
    """End this process by SIGKILL before the call number `point` that brings something to the disk or renames it."""
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def before(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return before

    for name in ("fsync", "replace", "rename"):
        setattr(os, name, counted(getattr(os, name)))


def save_and_die(rank: int, world: int, victim: int, point: int, directory: Path) -> str:
    """A complete checkpoint of step 1, and one of step 2 that a rank dies of."""
    pipe = make_pipe(world)
    checkpoints = Checkpointer(directory, pipe=pipe, keep=1)
    checkpoints.save(1, Box(1.0, rank, world))
    checkpoints.wait()
    dist.barrier()
    if rank == victim:
        kill_at(point)
    checkpoints.save(2, Box(2.0, rank, world))
    try:
        checkpoints.wait()
    except SaveError as error:
        return str(error)
    return "complete"


def go_on(rank: int, directories: list[Path]) -> list[int]:
    """What a new run finds in each directory; it loads that, and saves the next."""
    pipe = make_pipe(1)
    found = []
    for directory in directories:
        checkpoints, box = Checkpointer(directory, pipe=pipe, keep=1), Box(0.0, 0, 1)
        latest = checkpoints.latest()
        assert latest is not None
        checkpoints.load(latest, box)
        assert box.holds(latest, rank)
        checkpoints.save(3, Box(3.0, rank, 1))
        assert checkpoints.latest() == 3
        left = sorted(path.name for path in directory.iterdir())
        assert left == ["lock", "step-00000003"], "nothing is left of what was cut off"
        checkpoints.close()
        found.append(latest)
    pipe.close()
    return found


@pytest.mark.slow
def test_a_save_that_is_killed_at_any_moment_is_complete_or_not_there(tmp_path: Path) -> None:
    directories = [tmp_path / str(point) for point in range(POINTS)]

    def killed(point: int) -> int:
        (outcome,) = run_ranks(1, save_and_die, 1, 0, point + 1, directories[point])
        assert outcome.ok or outcome.exitcode == -signal.SIGKILL, str(outcome)
        return outcome.exitcode

    with ThreadPoolExecutor(2) as threads:
        exitcodes = list(threads.map(killed, range(POINTS)))
    num_killed = exitcodes.index(0)
    assert num_killed >= 9, "data, metadata, manifest, directories, and three renames"
    assert exitcodes == [-signal.SIGKILL] * num_killed + [0] * (POINTS - num_killed)
    assert list((directories[0] / "step-00000002.partial").iterdir()), "the write had begun"
    (found,) = check(run_ranks(1, go_on, directories))
    assert found == sorted(found), "once visible, always"
    assert set(found) == {1, 2}


@pytest.mark.slow
def test_a_rank_that_dies_while_it_writes_leaves_no_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_and_die, 2, 1, 1, tmp_path)
    assert second.exitcode == -signal.SIGKILL
    assert first.ok, str(first)
    assert first.value is not None
    assert "the checkpoint of step 2" in first.value
    assert "is not complete, and will not be loaded" in first.value
    assert complete_steps(tmp_path) == [1]


def save_some(rank: int, directory: Path) -> list[str]:
    world = dist.get_world_size()
    pipe = make_pipe(world)
    checkpoints = Checkpointer(directory, pipe=pipe, keep=2, every=2)
    assert [step for step in range(7) if checkpoints.due(step)] == [2, 4, 6]
    box = Box(1.0, rank, world)
    for step in (1, 2, 3):
        checkpoints.save(step, box, {"step": step, "rank": rank})
        box.whole += 1  # the copy was made before
        box.run += 1
    assert checkpoints.latest() == 3
    assert checkpoints.load(2, box) == {"step": 2, "rank": 0}
    assert box.holds(2.0, rank)
    checkpoints.save(3, box)
    said = [refusal(partial(checkpoints.load, step, box)) for step in (1, 7)]
    for other in (Longer(0.0, rank, world), Shorter(0.0, rank, world), Wider(0.0, rank, world)):
        said.append(refusal(partial(checkpoints.load, 3, other)))
    said.append(refusal(lambda: checkpoints.save(4, box, {"rng": b"00"})))
    said.append(refusal(lambda: checkpoints.save(4, box, {"ids": {1: 2}})))
    said.append(refusal(lambda: checkpoints.save(-1, box)))
    checkpoints.save(3, box)
    checkpoints.close()
    assert on_disk.read_manifest(directory, 3) == Manifest(3, ANY, {})
    pipe.close()
    return said


class Longer(Box):
    """Rank 1 needs a tensor that the checkpoint lacks."""

    def state_dict(self) -> State:
        more = {"whole_2": TensorPart.whole(torch.zeros(2))} if dist.get_rank() == 1 else {}
        return {**super().state_dict(), **more}


class Shorter(Box):
    def state_dict(self) -> State:
        return {name: part for name, part in super().state_dict().items() if name != "whole"}


class Wider(Box):
    def state_dict(self) -> State:
        return {**super().state_dict(), "whole": TensorPart.whole(torch.zeros(3, 5, dtype=torch.float64))}


@pytest.mark.slow
def test_checkpoints_are_kept_and_those_of_other_states_refused(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for said in check(run_ranks(2, save_some, saved)):
        assert (
            "step-00000001 is not loaded: manifest.json: No such file or directory; complete are the steps" in said[0]
        )
        assert "complete are the steps 2, 3" in said[1]
        assert "it has no whole_2; the nearest it has is whole (rank 1)" in said[2]
        assert "it has whole, which no rank of this run has" in said[3]
        assert "it has whole as [3, 4] float32, needed as [3, 5] float64 (rank 0)" in said[4]
        assert "extra['rng'] is bytes" in said[5]
        assert "extra['ids'] is dict" in said[6]
        assert "from 0 on, got int -1" in said[7]
    assert complete_steps(saved) == [2, 3]
    shutil.copytree(saved / "step-00000003", saved / "step-00000004.partial")
    assert complete_steps(saved) == [2, 3]


def claim(rank: int, directory: Path) -> list[str]:
    """What ranks are refused that have a directory each, or the directory of another run, and how one is freed."""
    pipe, said = make_pipe(2), list[str]()
    own = directory / f"of rank {rank}"
    own.mkdir()
    refused = [refusal(lambda: Checkpointer(own, pipe=pipe)), refusal(lambda: Checkpointer(own, pipe=pipe))]
    first = Checkpointer(directory / "shared", pipe=pipe, say=said.append)
    first.save(1, Box(1.0, rank, 2))
    first.wait()
    refused.append(refusal(lambda: Checkpointer(directory / "shared", pipe=pipe)))
    first.directory = first.directory if rank == 0 else own  # as if it had been mounted over
    first.save(2, Box(2.0, rank, 2))
    try:
        first.close()
    except SaveError as error:
        refused.append(str(error))
    second = Checkpointer(directory / "shared", pipe=pipe)
    assert second.latest() == 1
    second.close()
    pipe.close()
    return [*refused, *said]


@pytest.mark.slow
def test_a_directory_is_one_for_all_ranks_and_of_one_run(tmp_path: Path) -> None:
    for unshared, again, locked, not_seen in check(run_ranks(2, claim, tmp_path)):
        assert unshared == again, "a refused run holds no lock"
        assert "is not shared between nodes: rank 1 on " in unshared
        assert "give --checkpoint.directory or --output a path that all nodes share" in unshared
        assert re.search(r"shared is in use by another run \(process \d+ on .*, since 20.*\); end that run, or", locked)
        assert "the checkpoint of step 2 in " in not_seen
        assert "__1_0.distcp, which other ranks have written to" in not_seen
        assert "the directory is not shared between nodes" in not_seen
    assert complete_steps(tmp_path / "shared") == [1]


def hold_and_die(rank: int, directory: Path) -> None:
    DirectoryLock(directory)
    held = DirectoryLock(directory / "held")
    assert held.missing is None
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lock_goes_with_its_process_and_with_its_object(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    (outcome,) = run_ranks(1, hold_and_die, tmp_path)
    assert outcome.exitcode == -signal.SIGKILL, str(outcome)
    for directory in (tmp_path, tmp_path / "held"):
        lock = DirectoryLock(directory)
        assert token_in(directory) == lock.token
        with pytest.raises(ValueError, match=f"in use by another run .process {os.getpid()} on "):
            DirectoryLock(directory)
        lock.release()
        assert DirectoryLock(directory).token != lock.token


LIMIT_BYTES = 1000
"""Of a file, below what a rank writes."""


@contextmanager
def full_disk() -> Iterator[None]:
    """Have the kernel refuse longer files, as a disk does that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_and_go_on(rank: int, directory: Path) -> list[str]:
    """Rank 1 cannot write steps 2 and 4."""
    pipe, said, raised = make_pipe(2), list[str](), list[str]()
    checkpoints = Checkpointer(directory, pipe=pipe, keep=3, every=2, say=said.append)
    checkpoints.save(1, Box(1.0, rank, 2))
    for step in (2, 4):
        checkpoints.wait()
        dist.barrier()
        with full_disk() if rank == 1 else nullcontext():
            checkpoints.save(step, Box(float(step), rank, 2))
            futures.wait([cast("futures.Future[Any]", checkpoints._saving)])
        if step == 2:
            assert checkpoints.due(step), "it reports what failed, and what is due stays so"
            assert len(said) == (rank == 0)
            assert not list(directory.glob("*.partial"))
            dist.barrier()  # or another rank's next save would be seen
            checkpoints.save(3, Box(3.0, rank, 2))
    try:
        checkpoints.close()
    except SaveError as error:
        raised.append(str(error))
    pipe.close()
    return said + raised


@pytest.mark.slow
def test_a_save_that_fails_is_reported_in_a_line_and_the_next_is_tried(tmp_path: Path) -> None:
    (second, fourth), (alone,) = check(run_ranks(2, fail_and_go_on, tmp_path))
    assert alone == fourth
    for step, line, complete in ((2, second, "1"), (4, fourth, "1, 3")):
        assert f"the checkpoint of step {step} in {tmp_path} is not complete, and will not be loaded: " in line
        assert line.endswith(f"File too large (rank 1); complete are the steps {complete}")
        assert "\n" not in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-00000001", "step-00000003"]
