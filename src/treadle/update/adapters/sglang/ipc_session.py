"""The sockets over which checkpoint-engine's workers read weights: one REQ socket for each rank of the engine.

    we send                              each rank answers
    the handle of a buffer               b"", or a traceback as text; it is told b"" and ends then
    a list of tensors in the buffer      b"" when they are loaded, or a traceback as text
    ... more lists
    None                                 b"" when it has let the buffer go
    None                                 b"" after its post hook
    an exception                         nothing: it raises it, and the server reports a failure

Everything sent is a pickle, which the engine loads; nothing is unpickled here. Sockets are paths in a directory of mode
0700, so that no other user's process can stand in for one side.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import zmq

from treadle.host.sockets import own_directory

_LOOK_MS = 100


class SessionError(RuntimeError):
    """A rank of the engine failed, or did not answer."""


@dataclass(frozen=True)
class EngineBuffer:
    """Bytes on the device of one rank of the engine, and the function and arguments by which the rank maps them."""

    tensor: torch.Tensor
    handle: tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


def gpu_buffers(devices: Iterable[int], size_bytes: int) -> dict[str, EngineBuffer]:
    """Make a buffer on each GPU of a server, by the name that SGLang has for the GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    made = {}
    handle_of: Callable[[torch.Tensor], Any] = reduce_tensor
    for device in devices:
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
        made[f"GPU-{torch.cuda.get_device_properties(device).uuid}"] = EngineBuffer(tensor, handle_of(tensor))
    return made


class IpcSession:
    """One load: from the handles of buffers to the end of post hooks. Closing it unfinished breaks it off.

    Args:
        directory: Where sockets are.
        buffers: A buffer for each rank, by the name of its device.
        deadline_s: Seconds of each answer.
        over: Returns why the server's call has ended, if it has; asked while an answer is waited for.

    """

    def __init__(
        self,
        directory: Path,
        buffers: Mapping[str, EngineBuffer],
        deadline_s: float,
        over: Callable[[], str | None],
    ) -> None:
        own_directory(directory, "others could send weights to the engine")
        self._buffers, self._deadline_s, self._over = dict(buffers), deadline_s, over
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._paths: list[Path] = []
        self._is_open = True
        self.handles: dict[str, str] = {}
        for name in buffers:
            path = directory / f"{secrets.token_hex(8)}.ipc"
            socket = self._context.socket(zmq.REQ)
            socket.linger = 1000  # the last exception still goes out
            socket.bind(f"ipc://{path}")
            self._sockets[name], self.handles[name] = socket, f"ipc://{path}"
            self._paths.append(path)

    @property
    def buffer_bytes(self) -> int:
        """The size of the smallest buffer."""
        return min(buffer.tensor.numel() for buffer in self._buffers.values())

    def begin(self) -> None:
        """Send the handles. The server's call must be under way, in another thread."""
        errors = self._exchange({name: buffer.handle for name, buffer in self._buffers.items()})
        if errors:
            for name in errors:  # such a rank waits for one word more
                self._sockets[name].send(b"")
            raise SessionError(_told("cannot map the buffer", errors))

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors, which fit into the buffers together, and have all ranks load them."""
        places, offset = [], 0
        for name, tensor in tensors:
            places.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset})
            for buffer in self._buffers.values():
                view = buffer.tensor[offset : offset + size_of(tensor)].view(tensor.dtype).view(tensor.shape)
                view.copy_(tensor)
            offset += room_of(tensor)
        for buffer in self._buffers.values():
            if buffer.tensor.device.type == "cuda":
                torch.cuda.synchronize(buffer.tensor.device)
        errors = self._exchange(dict.fromkeys(self._sockets, places))
        if errors:
            raise SessionError(_told("did not load weights", errors))

    def finish(self) -> None:
        """Have ranks let buffers go and run their post hooks, whose failures they do not report."""
        for what in ("did not let the buffer go", "did not finish"):
            errors = self._exchange(dict.fromkeys(self._sockets))
            if errors:
                raise SessionError(_told(what, errors))
        self._is_open = False

    def close(self) -> None:
        """Close the sockets. Ranks that still read raise an exception, and hold torn weights then."""
        if self._is_open:
            self._is_open = False
            for socket in self._sockets.values():
                with contextlib.suppress(zmq.ZMQError):  # the rank owes an answer, and will not read
                    socket.send_pyobj(RuntimeError("the update was broken off"), zmq.NOBLOCK)
        for socket in self._sockets.values():
            socket.close()
        self._context.term()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _exchange(self, messages: Mapping[str, Any]) -> dict[str, str]:
        """Send each rank its message and wait for all answers; return the tracebacks among them."""
        for name, message in messages.items():
            self._sockets[name].send_pyobj(message)
        until = time.monotonic() + self._deadline_s
        errors: dict[str, str] = {}
        for name in messages:
            answer = self._answer(name, until)
            if answer:
                errors[name] = answer.decode(errors="replace")
        return errors

    def _answer(self, name: str, until: float) -> bytes:
        socket = self._sockets[name]
        while not socket.poll(_LOOK_MS):
            ended = self._over()
            if ended is not None and not socket.poll(_LOOK_MS):
                raise SessionError(f"the engine's call ended before {name} answered: {ended}")
            if time.monotonic() > until:
                raise SessionError(f"{name} has not answered within {self._deadline_s:g} s")
        return socket.recv()


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def room_of(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a buffer: the next one is aligned for any dtype."""
    return -(-size_of(tensor) // 256) * 256


def _told(what: str, errors: Mapping[str, str]) -> str:
    last = {name: text.strip().splitlines()[-1] for name, text in errors.items()}
    return "; ".join(f"{name} {what}: {text}" for name, text in last.items())
