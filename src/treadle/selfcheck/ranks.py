"""Runs a function on real processes that share a process group, one device each."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from treadle.selfcheck.check_report import FailedError, SkippedError
from treadle.selfcheck.setup import Setup

PRELOAD = ["treadle.selfcheck.ranks", "treadle.runtime", "treadle.moe", "treadle.update.updater"]
"""What the forkserver imports once for all ranks. Nothing here starts a device: a fork could not use it."""

LOST = "read the first error above: the others are those of ranks that waited for the one that failed"


def run_ranks(
    setup: Setup,
    num_ranks: int,
    run: Callable[..., Any],
    *args: Any,
    beside: Callable[..., None] | None = None,
) -> list[Any]:
    """Return `run(setup, rank, *args)` of each of `num_ranks` processes in one group.

    `beside(setup, rank, *args)` runs in as many processes more, without a group, until all ranks have ended.

    Raises:
        FailedError: A rank raised, died, or did not end in time. No process outlives the call.

    """
    setup.need_ranks(num_ranks)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _context()
    ranks: list[tuple[Any, Any]] = []
    others: list[Any] = []
    try:
        for rank in range(num_ranks if beside is not None else 0):
            task = pickle.dumps((beside, (setup, rank, *args)))
            others.append(context.Process(target=_other_main, args=(task,), daemon=True))
            others[-1].start()
        for rank in range(num_ranks):
            here, there = context.Pipe(duplex=False)
            task = pickle.dumps((run, (setup, rank, *args)))
            process = context.Process(target=_rank_main, args=(setup, rank, num_ranks, store.port, task, there))
            ranks.append((process, here))
            process.start()
            there.close()
        return _gather(ranks, time.monotonic() + 2 * setup.deadline_s)
    finally:
        for process in (*(process for process, _ in ranks), *others):
            if process.pid is not None:
                process.kill()
                process.join()


def _context() -> Any:
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _gather(ranks: Sequence[tuple[Any, Any]], until_s: float) -> list[Any]:
    """Return the values of all ranks, or raise the error of the first one to fail."""
    waiting = {here: rank for rank, (_, here) in enumerate(ranks)}
    values: dict[int, Any] = {}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, until_s - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, sorted(waiting.values())))
            raise FailedError(f"ranks {late} have not ended in time", "the machine is overloaded, or hangs")
        for here in ready:
            rank = waiting.pop(here)
            try:
                error, values[rank] = pickle.loads(here.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):  # it ended before it had told, or while it told
                ranks[rank][0].join()
                raise FailedError(f"rank {rank} ended with exit code {ranks[rank][0].exitcode}", LOST) from None
            if error is not None:
                raise error
    return [values[rank] for rank in range(len(ranks))]


def _rank_main(setup: Setup, rank: int, world: int, port: int, task: bytes, there: Any) -> None:
    def tell(error: Exception | None, value: Any = None) -> None:
        there.send_bytes(pickle.dumps((error, value)))  # by `send`, tensors would stay in this process's memory

    _begin()
    try:
        run, args = pickle.loads(task)
        if setup.kind != "cpu":
            torch.accelerator.set_device_index(rank)
        store = TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=setup.deadline_s)
        dist.init_process_group(setup.world_backend, store=store, rank=rank, world_size=world, timeout=timeout)
        value = run(*args)
        dist.destroy_process_group()
        tell(None, value)
    except (FailedError, SkippedError) as error:
        tell(error)
    except BaseException as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        tell(FailedError(f"rank {rank}: {said}", LOST))
        raise


def _other_main(task: bytes) -> None:
    _begin()
    run, args = pickle.loads(task)
    run(*args)


def _begin() -> None:
    """End with the process that checks; all ranks are on this host, and share its cores."""
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks for the address of the machine's name
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")  # else a rank that ends at once fails those still connecting


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
