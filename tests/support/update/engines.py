"""A plain engine that notes what it is told, a worker around it, and small layouts."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.patience import PATIENT_S, SOON_S
from treadle.update import Plain, UpdateOptions
from treadle.update.memory.host import HostBuffer
from treadle.update.protocol.update_messages import Begin, Finish, Grant, Map, Move, TakePlan
from treadle.update.rank.shares import Shares
from treadle.update.worker.arrived_boxes import Leaving
from treadle.update.worker.worker import Worker
from treadle.weights.buffer_sizes import Memory
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.weights.update_plan import plan_update

SMALL = Memory(1 << 20, least_bytes=4096)


OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)


def whole(shapes: dict[str, tuple[int, ...]], ranks: int, dtype: str = "float32") -> Holding:
    tensors = {name: Tensor(name, shape, dtype) for name, shape in shapes.items()}
    pieces = tuple(Piece(name, Box.whole(shape)) for name, shape in shapes.items())
    return Holding(tensors, (pieces,) * ranks)


def state(shapes: dict[str, tuple[int, ...]], version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in shapes.items()}


class Noting(Plain):
    """A plain engine that notes how it was closed, and whether it served while it was exported."""

    late = False

    def __init__(self) -> None:
        super().__init__({"w": torch.zeros(4)})
        self.closes: list[tuple[str, float]] = []
        self.given: list[bool] = []

    def close(self, how: str, deadline_s: float) -> str | None:
        self.closes.append((how, deadline_s))
        return super().close(how, deadline_s)

    def export(self, leaving: Leaving) -> str | None:
        self.given.append(self.gate.version is not None)
        return super().export(leaving)

    def open(self, version: int) -> str | None:
        super().open(version)
        return "not started within 40 s" if self.late else None


def plan_of(adapter: Plain, ranks: int = 1) -> TakePlan:
    wants = adapter.layout()
    have = Holding({tensor.name: tensor for tensor in wants.tensors}, (wants.pieces,) * ranks)
    return Shares(plan_update(have, have, SMALL)).of_worker(0, exports=False)


def begin(epoch: int, version: int, plan: TakePlan) -> Begin:
    return Begin(epoch, version, plan.digest, "host", "drain", 1.0, partial=False)


def served(engine: Noting, spill: Path | None = None) -> tuple[Worker, TakePlan]:
    """A worker that serves version 1 by attempt 1."""
    worker, plan = Worker(engine, 0, spill), plan_of(engine)
    worker.handle(plan)
    bring_first(worker, plan)
    return worker, plan


def bring_first(worker: Worker, plan: TakePlan, to: str = "serving") -> None:
    """Bring version 1 to a worker by attempt 1, until it is in the state `to`."""
    buffer = HostBuffer.make(1 << 16)
    assert buffer.fd is not None
    worker.map(Map((buffer.size_bytes,)), [os.dup(buffer.fd)])
    move = Move(1, plan.digest, 0, 0, out=False, checked=False)
    for message in (begin(1, 1, plan), move, Finish(1), Grant(1, 1, (1,))):
        if worker.state != to:
            worker.handle(message)


def eventually(so: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON_S
    while not so() and time.monotonic() < until:
        time.sleep(0.005)
    return so()


def out_of_descriptors(real: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    """`socket.accept` that fails once for each entry of `times`, as where a process has too many files open."""

    def accepting(*args: Any) -> Any:
        connection, peer = real(*args)
        if times:
            times.pop()
            connection.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return connection, peer

    return accepting
