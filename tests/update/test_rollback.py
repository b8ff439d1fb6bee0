"""Memory of a worker: the rollback copy on a full disk, what a control group has left, buffers, copies."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.support.update.engines import Noting, served
from treadle.update.memory.box_columns import BoxColumns, PlacedBox
from treadle.update.memory.copying import copy_hashed, digest
from treadle.update.memory.host import HostBuffer
from treadle.update.protocol.update_messages import Begin, Refused
from treadle.update.worker.rollback_store import RollbackStore, left_in_group
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


def test_files_that_were_read_do_not_count_as_used(tmp_path: Path) -> None:
    assert left_in_group(tmp_path) is None
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 600\nactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert left_in_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert left_in_group(tmp_path) == 700
    (tmp_path / "memory.current").write_text("2000\n")
    assert left_in_group(tmp_path) == 0


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
