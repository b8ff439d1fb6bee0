"""Communicators: torch's backends, made by their members only, connected at once, closed and aborted.

They are made as `init_process_group` and `new_group` make theirs (`_new_process_group_helper`), without the group of
the world around them:

| gained | the same calls in |
|---|---|
| made by two neighbours of a pipeline in any order; `new_group` is called by the whole world, and with \
`use_local_synchronization` names a group by the number of groups its rank has | torch's `_dist2.py`, `_nccl_factory`: \
options, constructor, `eager_connect_single_device`; run by `test_dist2.py`, `ProcessGroupNCCLTest.test_new_group` |
| a priority and a number of thread blocks for each | torch's `test_c10d_nccl.py`, \
`test_pass_nccl_options_high_priority_stream` and `test_pass_nccl_options_config` |
| members that are in no world together, as agents of an update | vLLM's \
`stateless_init_torch_distributed_process_group`, connected by use; torchft's `ProcessGroupNCCL`, non-blocking |
| aborts that name the lost rank, under a watchdog that leaves the process alone | torch's `test_c10d_nccl.py`, \
`test_error_detection_and_propagation`: the constructor with `TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, `get_error`, `abort` |
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store, _get_default_store

from treadle.dist.backends import CPU, FAKE, GLOO, NCCL, backend_of
from treadle.dist.streams import streams_of

NEVER = timedelta(days=365)
"""The timeout of a device's own communicators. They count from the launch of an op, not from the begin of its wait, so
an op after a long step would be late: the device's `catch_up` and the watch judge lateness instead."""

WATCHED_HERE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""The watchdog of a communicator, which reads the environment where it is made (ProcessGroupNCCL's constructor).

By default, and as torchrun sets them, the first two end the process about a second after a peer has died, before the
lost rank can be named; the last would have every wait block the thread that launches. Not undone here: with
TORCH_NCCL_DESYNC_DEBUG or TORCH_DISTRIBUTED_DEBUG=DETAIL the constructor turns the first on again."""

_environment = threading.Lock()


class Communicator(Protocol):
    """The methods used of a communicator: torch's process groups and their backends both have them."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Launch a send."""
        ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Launch a receive."""
        ...

    def allreduce(self, tensors: list[Tensor], opts: Any = ..., /) -> dist.Work:
        """Launch a reduction."""
        ...

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = ..., /) -> dist.Work:
        """Launch a reduce-scatter of equal parts."""
        ...

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], opts: Any = ..., /) -> dist.Work:
        """Launch an all-gather."""
        ...

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> dist.Work:
        """Launch an all-gather into one tensor."""
        ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], /
    ) -> dist.Work:
        """Launch an all-to-all of rows."""
        ...

    def abort(self) -> None:
        """Aborts pending communication, where the backend can."""
        ...

    def shutdown(self) -> None:
        """End the communicator, where the backend needs the call."""
        ...


@dataclass(frozen=True)
class Traffic:
    """What a communicator is for. It matters where communication takes a part of the device it computes on.

    `urgent`: its kernels go before those of compute streams. `max_ctas`: the most thread blocks of a kernel, which
    stay occupied while it waits for its peer; None leaves it to the backend. NCCL_MAX_CTAS overrides it.
    """

    urgent: bool = False
    max_ctas: int | None = None


CHANNEL = Traffic(urgent=True, max_ctas=4)
"""Messages between stages: receives are posted ahead and wait, so they must leave the device to computation."""

EXCHANGE = Traffic(urgent=True, max_ctas=16)
"""Rows between experts: computation waits for them."""

REDUCTION = Traffic()
"""Gradients, after everything else."""


def make_communicator(
    name: str,
    ranks: list[int],
    rank: int,
    deadline: timedelta,
    device: torch.device | None = None,
    *,
    traffic: Traffic = REDUCTION,
    backend: str | None = None,
    store: Store | None = None,
) -> Communicator:
    """Make a communicator of `ranks` for tensors of `device`, and connect it. All of them make it under one name.

    Without a device it is for control messages, from CPU to CPU. `backend` is that of the world for the device, and
    `store` the world's, if not given.
    """
    whole = store if store is not None else _get_default_store()
    store, at = PrefixStore(f"treadle/{name}", whole), ranks.index(rank)
    backend = backend if backend is not None else backend_of(device if device is not None else CPU)
    if backend == FAKE:
        fake: Communicator = dist.new_group(ranks, timeout=deadline, use_local_synchronization=True)
        return fake
    if backend == GLOO:
        gloo: Communicator = dist.ProcessGroupGloo(store, at, len(ranks), deadline)  # type: ignore[assignment]
        return _seen(gloo, name, device)
    assert device is not None, "control goes over gloo"
    made = _nccl(store, ranks, at, name, traffic) if backend == NCCL else _other(backend, store, at, len(ranks))
    connect(made, device)
    return _seen(made, name, device)


def _seen(made: Communicator, name: str, device: torch.device | None) -> Communicator:
    """Return the communicator as the device's streams want it to be used."""
    streams = streams_of(device) if device is not None else None
    seen: Communicator = made if streams is None else streams.communicator(made, name)
    return seen


def _nccl(store: PrefixStore, ranks: list[int], at: int, name: str, traffic: Traffic) -> Communicator:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=traffic.urgent)
    options._timeout, options.global_ranks_in_group, options.group_name = NEVER, ranks, GroupName(name)
    options.config.blocking = 1  # NCCL's default: ProcessGroupNCCL::useNonblocking lets it go before the environment
    if traffic.max_ctas is not None:
        options.config.max_ctas = traffic.max_ctas
    with _watched_here():
        made: Communicator = dist.ProcessGroupNCCL(store, at, len(ranks), options)  # type: ignore[assignment]
    return made


@contextmanager
def _watched_here() -> Iterator[None]:
    """Set WATCHED_HERE for the communicators made in the block: those of others keep their settings."""
    with _environment:
        before = {name: os.environ.get(name) for name in WATCHED_HERE}
        os.environ.update(WATCHED_HERE)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _other(backend: str, store: PrefixStore, at: int, size: int) -> Communicator:
    """Make a communicator of torch's XCCL, or of a backend that was registered with torch."""
    made: Communicator
    if backend == "xccl":
        xccl: Any = dist.ProcessGroupXCCL  # in torch's builds for XPUs
        options = xccl.Options()
        options._timeout = NEVER
        made = xccl(store, at, size, options)
        return made
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None or plugin.extended_api:
        raise ValueError(
            f"the process group's backend {backend!r} is none that a Pipeline can make groups of; gloo, nccl, xccl and "
            "backends registered by torch.distributed.Backend.register_backend without extended_api are"
        )
    made = plugin.creator_fn(store, at, size, NEVER)
    return made


def connect(communicator: Any, device: torch.device) -> None:
    """Connect a communicator to its peers now: in a step it would wait while receives of others hold the device.

    It blocks until all of them have come, as in `init_process_group(device_id=)`, so the caller is a thread that may
    be left behind. A message then uses this connection instead of another for each pair.
    """
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    communicator.eager_connect_single_device(torch.device(device.type, index))


class ClosedCommunicator:
    """Replaces a closed communicator, so that nothing keeps the communicator itself alive."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} on a communicator that is closed; make a new Pipeline")


CLOSED: Communicator = ClosedCommunicator()


def of_device(communicator: Communicator) -> bool:
    """True for communicators with threads and memory of a device. gloo's end with the last reference to them."""
    return communicator is not CLOSED and not isinstance(communicator, (dist.ProcessGroupGloo, dist.ProcessGroup))


def close_communicator(communicator: Communicator) -> None:
    """End a communicator's threads and give back its memory."""
    if of_device(communicator):
        communicator.shutdown()


def error_of(communicator: Communicator) -> str | None:
    """Return the error that a communicator has met, by its backend's name, or None."""
    if not of_device(communicator) or not hasattr(communicator, "get_error"):
        return None
    with suppress(RuntimeError):  # the backend does not tell
        name = str(communicator.get_error().name)
        return name if name != "SUCCESS" else None
    return None


class JointAbort:
    """Aborts communicators together, in a thread of its own: the call may wait for the device, and hang.

    One after the other would deadlock: an abort waits for the device, where the kernel of another communicator spins
    that is not aborted yet.
    """

    def __init__(self, communicators: Iterable[Communicator]) -> None:
        self._communicators = [each for each in communicators if of_device(each)]
        self._thread: threading.Thread | None = None
        if self._communicators:
            self._thread = threading.Thread(target=self._run, name="treadle abort", daemon=True)
            self._thread.start()

    def ended(self, deadline_s: float) -> bool:
        """Wait for the abort; False if it has not ended within the deadline."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        first: Any = next((each for each in self._communicators if hasattr(each, "_group_start")), None)
        if first is not None:
            first._group_start()
        try:
            for communicator in self._communicators:
                communicator.abort()
        finally:
            if first is not None:
                first._group_end()
