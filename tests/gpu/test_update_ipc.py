"""Buffers of updates between two processes on a real GPU, by CUDA IPC."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.patience import HUNG_S
from treadle.update.memory.cuda import CudaMemory

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"
)

SIZE_BYTES = 1 << 20


def worker(pipe: Connection) -> None:
    """Maps what comes, adds one to each byte, and unmaps."""
    while (handle := pipe.recv()) is not None:
        (mapped,) = CudaMemory().map([handle], [], [SIZE_BYTES])
        mapped.tensor += 1
        torch.cuda.synchronize()
        mapped.close()
        pipe.send("done")


def test_a_worker_writes_into_the_rank_s_buffer_each_time_it_maps_it() -> None:
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs,), daemon=True)
    process.start()
    try:
        buffer = CudaMemory().make(SIZE_BYTES, torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
        for turn in (1, 2, 3):
            pipe.send(buffer.share()[0])
            assert pipe.poll(HUNG_S)
            assert pipe.recv() == "done"
            assert bool((buffer.tensor == turn).all())
        pipe.send(None)
        process.join(HUNG_S)
        buffer.close()
    finally:
        process.kill()
        process.join()
