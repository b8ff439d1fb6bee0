"""The loop of a targeted plan: in each step a bucket goes out and another one comes in, both at once.

A bucket is sent from the H2D buffer that it was packed into; one that stays on its device is loaded from there. What
comes in goes into the IPC buffers in turn, and is loaded while the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from treadle.update.rank.bucket_loop import BucketLoop, Fill
from treadle.weights.bucket_stream import matched_steps
from treadle.weights.update_plan import UpdatePlan


def steps_of(plan: UpdatePlan, rank: int) -> list[tuple[int | None, int | None]]:
    """What a rank sends and what it receives in each of its steps; one bucket twice where it stays on the device."""
    steps = matched_steps([b.source for b in plan.buckets], [b.dests[0] for b in plan.buckets])
    mine: dict[tuple[int, int], list[int | None]] = {}
    for number, (bucket, step) in enumerate(zip(plan.buckets, steps, strict=True)):
        if bucket.source == bucket.dests[0] == rank:
            mine[step, number - len(steps)] = [number, number]  # before what moves in this step
        elif bucket.source == rank:
            mine.setdefault((step, 0), [None, None])[0] = number
        elif bucket.dests[0] == rank:
            mine.setdefault((step, 0), [None, None])[1] = number
    return [(out, into) for _, (out, into) in sorted(mine.items())]


class TargetedLoop(BucketLoop):
    """Moves the buckets that this rank sends or receives. `ahead`: it packs in a thread, ahead of its sends."""

    ahead = True

    def run(self, fill: Fill, loads: bool, progress: Callable[[int], None]) -> None:
        """Move all buckets, until the worker has loaded its part."""
        if self.ahead and self.own:
            self._pack_ahead(fill, alone=False)
        came: list[int] = []
        sent = 0
        try:
            for out, into in steps_of(self.shares.plan, self.rank):
                self.where.bucket = number = out if out is not None else into if into is not None else -1
                at = -1
                if into is not None and into != out and len(came) >= len(self.ipc):
                    self._await_loaded(came[-len(self.ipc)])
                if out is not None:
                    at = self._pack(fill, out, sent)
                    sent += 1
                if self.delta_bytes is not None:
                    self._exchange_sizes(out, into)
                if out == into:
                    assert out is not None
                    self._load(out, len(self.ipc) + at)
                    if self._packed is None:
                        self._await_loaded(out)
                else:
                    self._move(out, at, into, len(came) % len(self.ipc))
                if into is not None and into != out:
                    self._load(into, len(came) % len(self.ipc))
                    came.append(into)
                progress(self.shares.plan.buckets[number].size_bytes)
            self._await_loaded(len(self.shares.plan.buckets))
            self._note_fills()
        finally:
            if self._packed is not None:
                self._packed.stop()

    def _pack(self, fill: Fill, number: int, sent: int) -> int:
        """Return the H2D buffer that has the bucket."""
        if self._packed is not None:
            while (held := self._packed.oldest) >= 0:  # by buckets that stay here, until they are loaded
                self._await_loaded(held)
            return self._packed.next(number, self.deadline_s)
        at = sent % len(self.h2d)
        self._timed(fill)(self.h2d[at], number)
        return at

    def _move(self, out: int | None, packed: int, into: int | None, free: int) -> None:
        """Send one bucket and receive another."""
        start = perf_counter_ns()
        comes = self.ipc[free].tensor[: self._size(into)] if into is not None else None
        goes = self.h2d[packed].tensor[: self._size(out)] if out is not None else None
        self._exchange(out, goes, into, comes)
        times = start, perf_counter_ns()
        if out is not None:
            self.times.send[out] = times
            if self._packed is not None:
                self._packed.done(out)
        if into is not None:
            self.times.recv[into] = times

    def _exchange(
        self, out: int | None, goes: torch.Tensor | None, into: int | None, comes: torch.Tensor | None
    ) -> None:
        """Send of one bucket and receive of another, as one call where the backend has such calls."""
        works, buckets = list[Any](), self.shares.plan.buckets
        together = getattr(self.group, "supports_coalescing", False) and out is not None and into is not None
        if together:
            self.group._start_coalescing()
        if into is not None:
            works.append(self.group.recv([comes], self.place(buckets[into].source), 0))
        if out is not None:
            works.append(self.group.send([goes], self.place(buckets[out].dests[0]), 0))
        if together:
            works = [self.group._end_coalescing()]
        for work in works:
            self.wait(work)

    def _exchange_sizes(self, out: int | None, into: int | None) -> None:
        """Send and receive the sizes of changed elements, before these."""
        assert self.delta_bytes is not None
        goes = comes = None
        if out is not None:
            self._sizes[out] = self.delta_bytes(out)
            goes = torch.tensor([self._sizes[out]], dtype=torch.int64, device=self.device)
        if out == into:
            return
        if into is not None:
            comes = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._exchange(out, goes, into, comes)
        if into is not None:
            assert comes is not None
            self._sizes[into] = int(comes)
