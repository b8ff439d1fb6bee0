"""The loop of a targeted plan: in each step a bucket goes out and another one comes in, both at once.

A bucket is sent from the H2D buffer that it was packed into; one that stays on its device is loaded from there. What
comes in goes into an IPC buffer, is loaded while the next step runs, and sent on from there where its route goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from treadle.dist.streams import Download, upload
from treadle.ir.program import NEVER
from treadle.update.memory.copying import finish_copies
from treadle.update.rank.bucket_loop import BucketLoop, Fill
from treadle.weights.update_plan import UpdatePlan


class Hop(NamedTuple):
    """One end of a bucket's hop: the rank at the other end, and this rank's IPC buffer; NEVER: where it was packed."""

    bucket: int
    peer: int
    ipc: int


class LoopStep(NamedTuple):
    """What a rank sends and what it receives at once; one bucket twice where it stays on the device."""

    out: Hop | None
    into: Hop | None

    @property
    def buckets(self) -> set[int]:
        """The numbers of both."""
        return {hop.bucket for hop in self if hop is not None}


def steps_of(plan: UpdatePlan, rank: int) -> list[LoopStep]:
    """Return a rank's steps in their order."""
    hops = plan.hops
    mine = np.flatnonzero((hops.sender == rank) | (hops.receiver == rank))
    columns = (hops.step, hops.bucket, hops.sender, hops.receiver, hops.held, hops.into)
    found: dict[tuple[int, int], list[Hop | None]] = {}
    for step, bucket, sender, receiver, held, into in zip(*(column[mine].tolist() for column in columns), strict=True):
        stays = sender == receiver  # before what moves in this step
        both = found.setdefault((step, bucket - len(plan.buckets) if stays else 0), [None, None])
        if sender == rank:
            both[0] = Hop(bucket, receiver, held)
        if receiver == rank:
            both[1] = Hop(bucket, sender, into)
    return [LoopStep(*both) for _, both in sorted(found.items())]


class TargetedLoop(BucketLoop):
    """Moves the buckets that this rank sends or receives. `ahead`: it packs in a thread, ahead of its sends."""

    ahead = True

    @cached_property
    def _steps(self) -> list[LoopStep]:
        return steps_of(self.shares.plan, self.rank)

    def _bytes_of(self, step: LoopStep) -> int:
        return sum(self.shares.plan.buckets[number].size_bytes for number in step.buckets)

    @property
    def size_bytes(self) -> int:
        """Bytes of all buckets that this rank sees, those that it sends on twice."""
        return sum(map(self._bytes_of, self._steps))

    def run(self, fill: Fill, loads: bool, progress: Callable[[int], None]) -> None:
        """Move all buckets, until the worker has loaded its part."""
        if self.ahead and self.own:
            self._pack_ahead(fill, alone=False)
        filled: dict[int, int] = {}
        try:
            for step in self._steps:
                out, into = step
                stays = out is not None and out.peer == self.rank
                self.where.bucket = min(step.buckets)
                if into is not None and not stays:
                    self._await_one(filled.get(into.ipc, -1))
                at = self._held(fill, out) if out is not None else -1
                if self.delta_bytes is not None:
                    self._exchange_sizes(step)
                if stays:
                    assert out is not None
                    finish_copies(self.device)  # no wait for a message comes before the worker reads it
                    self._load(out.bucket, at)
                    if self._packed is None:
                        self._await_one(out.bucket)
                else:
                    self._move(step, at)
                if into is not None and not stays:
                    self._load(into.bucket, into.ipc)
                    filled[into.ipc] = into.bucket
                progress(self._bytes_of(step))
            self._await_loaded(len(self.shares.plan.buckets))
            self._note_fills()
        finally:
            if self._packed is not None:
                self._packed.stop()

    def _await_one(self, number: int) -> None:
        """Wait until the worker has loaded a bucket."""
        while number in self._waiting:
            self._await_next()

    def _held(self, fill: Fill, out: Hop) -> int:
        """Return the buffer that has a bucket to send, counted over IPC and then H2D buffers."""
        return out.ipc if out.ipc != NEVER else len(self.ipc) + self._pack(fill, out.bucket)

    def _pack(self, fill: Fill, number: int) -> int:
        """Return the H2D buffer that has the bucket."""
        if self._packed is not None:
            while (held := self._packed.oldest) >= 0:  # by buckets that stay here, until they are loaded
                self._await_one(held)
            return self._packed.next(number, self.deadline_s)
        at = self.shares.plan.buckets[number].round % len(self.h2d)
        self._timed(fill)(self.h2d[at], number)
        return at

    def _move(self, step: LoopStep, held: int) -> None:
        """Send one bucket and receive another."""
        out, into = step
        start = perf_counter_ns()
        comes = self.ipc[into.ipc].tensor[: self._size(into.bucket)] if into is not None else None
        goes = (*self.ipc, *self.h2d)[held].tensor[: self._size(out.bucket)] if out is not None else None
        self._exchange(step, goes, comes)
        times = start, perf_counter_ns()
        if out is not None:
            self.times.send[out.bucket] = times
            if self._packed is not None:
                self._packed.done(out.bucket)
        if into is not None:
            self.times.recv[into.bucket] = times

    def _exchange(self, step: LoopStep, goes: torch.Tensor | None, comes: torch.Tensor | None) -> None:
        """Send of one bucket and receive of another, as one call where the backend has such calls."""
        works, (out, into) = list[Any](), step
        together = getattr(self.group, "supports_coalescing", False) and out is not None and into is not None
        if together:
            self.group._start_coalescing()
        if into is not None:
            works.append(self.group.recv([comes], self.place(into.peer), 0))
        if out is not None:
            works.append(self.group.send([goes], self.place(out.peer), 0))
        if together:
            works = [self.group._end_coalescing()]
        for work in works:
            self.wait(work)

    def _exchange_sizes(self, step: LoopStep) -> None:
        """Send and receive the sizes of changed elements, before these."""
        assert self.delta_bytes is not None
        out, into = step
        goes = comes = None
        if out is not None:
            if out.ipc == NEVER:
                self._sizes[out.bucket] = self.delta_bytes(out.bucket)
            goes = upload([self._sizes[out.bucket]], torch.int64, self.device)
            if out.peer == self.rank:
                return
        if into is not None:
            comes = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._exchange(step, goes, comes)
        if into is not None:
            assert comes is not None
            self._sizes[into.bucket] = Download(comes).tolist()[0]
