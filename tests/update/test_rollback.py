"""Memory of a worker: the rollback copy on a full disk, workers that share a limit, buffers, copies."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.memory_group import memory_group
from tests.support.patience import PATIENT_S
from tests.support.update.engines import Noting, served
from tests.support.update.workers import resident_bytes
from treadle.update.memory.box_columns import BoxColumns, PlacedBox
from treadle.update.memory.copying import copy_hashed, digest
from treadle.update.memory.host import HostBuffer
from treadle.update.protocol.update_messages import Begin, Refused
from treadle.update.worker import rollback_store
from treadle.update.worker.rollback_store import RollbackStore
from treadle.weights.tensor_boxes import Box

ALL = Box((0,), (1 << 16,))
BOXES = BoxColumns([PlacedBox("w", ALL, "float32", 0, ALL)])


def test_a_disk_that_is_full_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length)
        blocks.append(os.fstat(fd).st_blocks)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    store = RollbackStore(tmp_path)
    assert store.reserve(BOXES) is None
    assert blocks[0] * 512 >= 1 << 18  # no holes
    ((_, kept),) = store.leaving
    kept[:] = 1

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    told = RollbackStore(tmp_path).reserve(BOXES)
    assert told is not None
    assert f"{1 << 18} bytes of disk in {tmp_path}" in told
    assert "No space left" in told
    assert "rollback='host'" in told

    engine = Noting()
    worker, plan = served(engine, tmp_path)
    on_disk = Begin(2, 2, plan.digest, "disk", "drain", 1.0, partial=False)
    refused = worker.handle(on_disk)
    assert isinstance(refused, Refused)
    assert refused.code == "memory"
    assert (worker.state, engine.gate.version) == ("serving", 1)


def test_workers_of_a_host_see_what_the_others_took(tmp_path: Path) -> None:
    """Three at once in a control group that has memory for one copy. All of them would pass a look at the beginning."""
    with memory_group(1536 << 20) as group:
        if group is None:
            pytest.skip("no control group with a limit of its own can be made here")
        takers = [start_taker(group, 768 << 20) for _ in range(3)]
        assert [read_line(taker) for taker in takers] == ["up\n"] * 3
        for taker in takers:
            assert taker.stdin is not None
            taker.stdin.write("go\n")
            taker.stdin.flush()
        ends = [read_line(taker) for taker in takers]  # all hold what they took
        for taker in takers:
            taker.communicate(timeout=PATIENT_S)
        assert [taker.returncode for taker in takers] == [0, 0, 0], "none was killed for want of memory"
    assert sum("filled" in end for end in ends) <= 1
    refused = [end for end in ends if "filled" not in end]
    assert all(f"needs {768 << 20} bytes of host memory until commit" in end for end in refused), ends
    assert any(re.search(r"when [1-9]\d+ were taken, \d+ were left", end) for end in refused), ends


def start_taker(group: Path, size_bytes: int) -> subprocess.Popen[str]:
    """A process of a group that reserves a copy of so many bytes, and fills it."""

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-c", f"from tests.update.test_rollback import take; take({size_bytes})"]
    return subprocess.Popen(command, preexec_fn=enter, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(taker: subprocess.Popen[str]) -> str:
    assert taker.stdout is not None
    return taker.stdout.readline()


def take(size_bytes: int) -> None:
    store, box = RollbackStore(None), Box((0,), (size_bytes,))
    say("up")
    sys.stdin.readline()
    refusal = store.reserve(BoxColumns([PlacedBox("w", box, "uint8", 0, box)]))
    if refusal is None:
        ((_, kept),) = store.leaving
        kept[:] = 1
    say(refusal if refusal is not None else "filled")
    sys.stdin.read()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def test_a_copy_that_loses_the_race_for_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([1 << 40] * 3)
    monkeypatch.setattr(rollback_store, "unused_bytes", lambda: next(left, 1 << 20))
    box, store, before = Box((0,), (256 << 20,)), RollbackStore(None), resident_bytes()[0]
    told = store.reserve(BoxColumns([PlacedBox("w", box, "uint8", 0, box)]))
    assert told is not None
    assert f"when {48 << 20} were taken, {1 << 20} were left" in told
    assert (store.held_bytes, resident_bytes()[0] - before < 24 << 20) == (0, True)
    left = iter([1 << 40])
    assert store.reserve(BOXES) is None


def test_a_buffer_of_nothing_and_one_that_is_closed_twice() -> None:
    buffer = HostBuffer.make(0)
    assert buffer.fd is not None
    mapped = HostBuffer.map(os.dup(buffer.fd), buffer.size_bytes)
    for one in (buffer, mapped):
        one.close()
        one.close()


@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3)])
def test_copies_of_any_shape(shape: tuple[int, ...]) -> None:
    source, target = torch.full(shape, 7.0), torch.zeros(shape)
    assert copy_hashed(target, source) == digest(source)
    assert torch.equal(source, target)
