"""IPC buffers on a GPU, by CUDA IPC. The one file that asks `torch.cuda`: handles and UUIDs have no other form.

A handle names its GPU by UUID: the index that one process has for a GPU may be another GPU's in the next. torch counts
the process that a handle is sent to in a file, once a handle, so each process, and each new mapping, gets one of its
own; two that map one handle would count down twice, and the memory could be freed under the second.

Buffers are in a pool of their own (`torch.cuda.MemPool`): a handle opens the whole segment of the allocator that a
tensor is in, and a segment of the trainer's pool stays with the trainer's process when the tensor is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

_EXPANDABLE = b"e"
"""The kind of a handle, after the byte of its form: 'c' for cudaMalloc (torch 2.13, CUDACachingAllocator.cpp,
`ShareableHandleType`)."""


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    """The arguments with which torch opens another process's memory, with a UUID in place of the GPU's index."""

    gpu: str
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class CudaBuffer:
    """GPU memory shared by two processes."""

    def __init__(self, tensor: torch.Tensor, pool: Any = None) -> None:
        self.size_bytes, self.tensor, self._pool = tensor.numel(), tensor, pool

    def share(self) -> tuple[bytes, int | None]:
        """A new handle; the process that maps it counts as one more user of the memory."""
        index, *rest = _shared(self.tensor)
        if rest[0][1:2] == _EXPANDABLE:
            raise ValueError(
                "the buffers are in an expandable segment of torch's allocator, which another process cannot open in "
                "every container; start update ranks that have a worker with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        return msgspec.msgpack.encode(_Handle(_uuids()[index], *rest)), None

    def close(self) -> None:
        """Release the buffer; its memory is freed when the processes that mapped it have released it, too."""
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        _collect()
        self._pool = None  # its segments go back to the driver


class CudaMemory:
    """GPU memory, handed over by CUDA IPC handles."""

    def make(self, size_bytes: int, device: torch.device) -> CudaBuffer:
        """Allocate a buffer."""
        pool, tensor = _in_pool(max(1, size_bytes), device)
        return CudaBuffer(tensor, pool)

    def map(self, handles: Sequence[bytes], fds: list[int], sizes_bytes: Sequence[int]) -> list[CudaBuffer]:
        """Map a handle for each size. Raises ValueError where a GPU is not visible or memory is too small."""
        visible = _uuids()
        mapped = []
        for handle, size_bytes in zip(handles, sizes_bytes, strict=True):
            shared = msgspec.msgpack.decode(handle, type=_Handle)
            if shared.storage_bytes < size_bytes:
                raise ValueError(
                    f"the buffer is said to have {size_bytes} bytes, its memory has {shared.storage_bytes}"
                )
            index = index_of(shared.gpu, visible)
            tensor = _opened(index, msgspec.structs.astuple(shared)[1:])
            mapped.append(CudaBuffer(tensor[:size_bytes]))
        return mapped

    def name(self, device: torch.device) -> str:
        """Return the UUID of a GPU."""
        return _uuids()[device.index if device.index is not None else torch.cuda.current_device()]

    def find(self, name: str) -> torch.device:
        """Return the GPU with a UUID. Raises ValueError where this process does not see it."""
        return torch.device("cuda", index_of(name, _uuids(), "the worker's weights are", "the update rank"))

    def free_bytes(self, device: torch.device) -> int | None:
        """Bytes that the GPU has free, for all processes."""
        return torch.cuda.mem_get_info(device)[0]


def index_of(
    gpu: str, visible: Sequence[str], what: str = "the update rank's buffers are", who: str = "the worker"
) -> int:
    """Return the index that this process has for the GPU with a UUID. Raises ValueError where it does not see it."""
    if gpu not in visible:
        seen = ", ".join(f"{index}: {uuid}" for index, uuid in enumerate(visible)) or "none"
        raise ValueError(
            f"{what} on GPU {gpu}, {who}'s process sees {seen}; make that GPU visible to it (CUDA_VISIBLE_DEVICES), or "
            "start the update rank with the GPUs of the worker"
        )
    return visible.index(gpu)


# ---- calls of torch, each in a function of its own -------------------------------------------------------------------


def _in_pool(size_bytes: int, device: torch.device) -> tuple[Any, torch.Tensor]:
    """Return a new pool, and a tensor in it."""
    with torch.cuda.device(device):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            return pool, torch.zeros(size_bytes, dtype=torch.uint8, device=device)


def _uuids() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def _shared(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the index of a tensor's GPU and the rest of a new handle."""
    shared: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return shared


def _opened(index: int, rest: tuple[Any, ...]) -> torch.Tensor:
    """Another process's bytes, on the GPU with that index here."""
    storage = torch.UntypedStorage._new_shared_cuda(index, *rest)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _collect() -> None:
    """Free memory that no process has mapped any more, and torch's counter files without users."""
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
