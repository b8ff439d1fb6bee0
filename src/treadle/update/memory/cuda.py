"""IPC buffers on a GPU, by CUDA IPC. Written without a GPU to run it on."""

from __future__ import annotations

import msgspec
import torch

from treadle.update.memory.host import Raw


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    """The arguments with which torch opens another process's memory: plain numbers and bytes."""

    device: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class CudaBuffer:
    """GPU memory shared by two processes."""

    fd: int | None = None

    def __init__(self, tensor: torch.Tensor, handle: bytes) -> None:
        self.size_bytes, self.tensor, self.handle = tensor.numel(), tensor, handle

    @classmethod
    def make(cls, size_bytes: int, device: torch.device) -> CudaBuffer:
        """Allocate a buffer, with a handle to send."""
        tensor = torch.zeros(max(1, size_bytes), dtype=torch.uint8, device=device)
        shared = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return cls(tensor, msgspec.msgpack.encode(_Handle(*shared)))

    @classmethod
    def map(cls, handle: bytes, size_bytes: int) -> CudaBuffer:
        """Map a buffer that another process made. Raises ValueError where it is too small."""
        shared = msgspec.msgpack.decode(handle, type=_Handle)
        if shared.storage_bytes < size_bytes:
            raise ValueError(f"the buffer is said to have {size_bytes} bytes, its memory has {shared.storage_bytes}")
        storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(shared))
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size_bytes]
        return cls(tensor, b"")

    @property
    def raw(self) -> Raw:
        """A copy of the bytes on the host. Digests are made there, so checks copy each bucket back once."""
        return self.tensor.cpu().numpy()

    def close(self) -> None:
        """Release the buffer; its memory is freed when the other process has, too."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
