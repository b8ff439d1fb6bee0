"""torch's backend for NCCL without a GPU: ranks are threads that meet at the store which the backend was given."""

from __future__ import annotations

import os
import threading
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.support.doubles import double_of

UNDEFINED = -(1 << 31)
"""NCCL_CONFIG_UNDEF_INT."""


class ErrorType(Enum):
    """torch 2.13 Backend.hpp:24-32: as `get_error` returns them."""

    SUCCESS = 0
    COMM_ERROR = 2


@double_of("torch.distributed.ProcessGroupNCCL.Options")
class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        """torch 2.13 ProcessGroupNCCL.hpp:512-549: a config in which nothing is set, so that NCCL's defaults hold."""
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(blocking=UNDEFINED, max_ctas=UNDEFINED)
        self._timeout: Any = None
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


@double_of("torch.distributed.ProcessGroupNCCL", own=("_meet",))
class Nccl:
    """A rank's backend. `calls` are those of all, in their order."""

    Options = Options
    calls: ClassVar[list[str]] = []

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        """torch 2.12 ProcessGroupNCCL.cpp:953-1096: makes no communicator; reads the watchdog's settings."""
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.settings = {name: os.environ.get(name) for name in _READ}
        self.connected = self.initialized = self.ended = False
        self.released = threading.Event()
        self.error = ErrorType.SUCCESS

    def _meet(self, what: str) -> None:
        """Return when all ranks have called it, as NCCL's calls on a whole communicator do."""
        self.store.add(what, 1)
        while self.store.add(what, 0) < self.size and not self.released.wait(0.001):
            pass

    def eager_connect_single_device(self, device: torch.device) -> None:
        """torch 2.12 ProcessGroupNCCL.cpp:1098-1104, NCCLUtils.cpp:81-105: a blocking communicator is initialized when
        all peers have come; a non-blocking one returns at once, and is initialized where it is used next.
        """
        assert device.index is not None
        blocking = self._is_blocking()
        if blocking:
            self._meet("connect")
        else:
            self.store.add("connect", 1)
        self.connected, self.initialized = True, blocking

    def _is_blocking(self) -> bool:
        """torch 2.12 ProcessGroupNCCL.cpp:1106-1140: the option, then the environment, else blocking."""
        if self.options.config.blocking != UNDEFINED:
            return bool(self.options.config.blocking)
        return os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") != "1"

    def _is_initialized(self) -> bool:
        """torch 2.12 ProcessGroupNCCL.cpp:1161-1174: returns the flag, and asks nobody: only a use sets it."""
        return self.initialized

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """torch 2.12 NCCLUtils.cpp:140-170: the first use of a communicator waits until it is ready."""
        self._meet("connect" if self.connected else "first use")
        self.connected = self.initialized = True
        return SimpleNamespace(wait=lambda: True)

    def _group_start(self) -> None:
        """torch 2.13 ProcessGroupNCCL.hpp:922: begins a group of calls of this thread."""
        self.calls.append("start")

    def _group_end(self) -> None:
        """torch 2.13 ProcessGroupNCCL.hpp:924: ends the group of calls of this thread."""
        self.calls.append("end")

    def abort(self) -> None:
        """torch 2.12 ProcessGroupNCCL.cpp:1553-1577: ends what is waited for, and waits for no peer."""
        self.calls.append(f"abort {self.options.group_name}")
        self.ended = True
        self.released.set()

    def shutdown(self) -> None:
        """torch 2.12 ProcessGroupNCCL.cpp:1586-1634: finalizes, which waits for what the peers have to do, too."""
        self.calls.append(f"shutdown {self.options.group_name}")
        self._meet("finalize")
        self.ended = True

    def get_error(self) -> ErrorType:
        """torch 2.12 ProcessGroupNCCL.cpp:1176-1179: the error that the watchdog has found."""
        return self.error

    def __del__(self) -> None:
        """torch 2.12 ProcessGroupNCCL.cpp:1637-1688: aborts where nothing ended it, and joins threads."""
        if not self.ended:
            self.calls.append(f"destructor aborts {self.options.group_name}")


_READ = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_BLOCKING_WAIT")
