"""Buffers of a GPU by CUDA IPC, with the calls of torch replaced: handles name GPUs by UUID, one for each mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.update.memory import cuda
from treadle.update.memory.cuda import CudaBuffer, CudaMemory
from treadle.update.memory.ipc_buffers import memory_of
from treadle.update.protocol.update_messages import Map, Status
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.worker_client import WorkerClient

RANK_SEES = ["GPU-a", "GPU-b", "GPU-c"]
WORKER_SEES = ["GPU-c"]
SIZE_BYTES = 64


class Calls:
    """torch's calls: `_shared` numbers its handles, `_opened` notes them and the index they were opened at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[tuple[int, bytes]] = []
        self.num_shared = self.num_collected = 0
        self.index = 2
        for name in ("_shared", "_opened", "_collect"):
            monkeypatch.setattr(cuda, name, getattr(self, name))
        monkeypatch.setattr(cuda, "_uuids", lambda: RANK_SEES)

    kind = b"c"
    """torch 2.13, CUDACachingAllocator.cpp, shareIpcHandle: SHAREABLE_HANDLE_VERSION, ShareableHandleType, the rest."""

    def _shared(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        self.num_shared += 1
        return (
            self.index,
            b"\x02" + self.kind + b"handle",
            tensor.numel(),
            0,
            b"counter %d" % self.num_shared,
            0,
            b"",
            False,
        )

    def _opened(self, index: int, rest: tuple[Any, ...]) -> torch.Tensor:
        self.opened.append((index, rest[3]))
        return torch.zeros(rest[1], dtype=torch.uint8)

    def _collect(self) -> None:
        self.num_collected += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def buffer() -> CudaBuffer:
    return CudaBuffer(torch.zeros(SIZE_BYTES, dtype=torch.uint8))


def test_a_gpu_is_found_by_its_uuid(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, fd = buffer().share()
    assert fd is None
    monkeypatch.setattr(cuda, "_uuids", lambda: WORKER_SEES)
    (mapped,) = CudaMemory().map([handle], [], [SIZE_BYTES - 4])
    assert calls.opened == [(0, b"counter 1")]  # the rank's GPU 2 is the worker's 0
    assert mapped.size_bytes == SIZE_BYTES - 4
    mapped.close()
    assert calls.num_collected == 1


def test_a_gpu_that_the_worker_does_not_see_is_named(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.index = 1
    handle, _ = buffer().share()
    monkeypatch.setattr(cuda, "_uuids", lambda: WORKER_SEES)
    with pytest.raises(ValueError, match=r"are on GPU GPU-b, the worker's process sees 0: GPU-c; make .* visible"):
        CudaMemory().map([handle], [], [SIZE_BYTES])
    monkeypatch.setattr(cuda, "_uuids", list)
    with pytest.raises(ValueError, match="sees none"):
        CudaMemory().map([handle], [], [SIZE_BYTES])


def test_a_buffer_that_is_too_small_is_refused(calls: Calls) -> None:
    handle, _ = buffer().share()
    with pytest.raises(ValueError, match=f"is said to have {SIZE_BYTES + 1} bytes, its memory has {SIZE_BYTES}"):
        CudaMemory().map([handle], [], [SIZE_BYTES + 1])
    assert not calls.opened


def test_an_expandable_segment_is_refused(calls: Calls) -> None:
    calls.kind = b"e"
    with pytest.raises(ValueError, match=r"expandable segment .* PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"):
        buffer().share()


def test_each_mapping_has_a_handle_of_its_own(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts users in a file for each handle: a worker that reconnects must not count down an earlier one's."""
    client = WorkerClient(Path("nowhere"), 0, Inbox(), lambda name, text: None)
    sent: list[Map] = []
    monkeypatch.setattr(client, "send", lambda message, fds=(): sent.append(message))
    monkeypatch.setattr(client, "expect", lambda kind, deadline_s: Status(0, 1, "lapsed", None, 0, 0))
    both = [buffer(), buffer()]
    client.map(both, "cuda", 1.0)
    client.map(both, "cuda", 1.0)
    assert len(sent) == 1, "the worker has these"
    client._mapped = ()  # as a new connection has it
    client.map(both, "cuda", 1.0)
    handles = [handle for message in sent for handle in message.handles]
    assert len(set(handles)) == len(handles) == 4
    assert [message.device for message in sent] == ["cuda", "cuda"]


def test_a_device_without_buffers_is_named() -> None:
    with pytest.raises(ValueError, match="buffers can be on cpu, cuda, got 'mps'; give the Updater one of these"):
        memory_of("mps")
