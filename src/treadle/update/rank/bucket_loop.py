"""The bucket loop: each bucket is packed by its source, broadcast into the IPC buffers, and loaded by the workers.

While a worker loads bucket i from one IPC buffer, bucket i + 1 is broadcast into the other. A source with an H2D buffer
packs its next bucket meanwhile, in a thread of its own; on a device, on a stream of its own, for which the broadcast
waits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from time import perf_counter_ns
from typing import Any, Protocol

import torch
import torch.distributed as dist

from treadle.dist.device import device_of
from treadle.dist.streams import DeviceStream, Download, streams_of, upload
from treadle.host.pressure import short_of_cores
from treadle.update.memory.ipc_buffers import Buffer
from treadle.update.protocol.update_messages import Move, Moved
from treadle.update.rank.shares import Shares
from treadle.update.rank.worker_client import WorkerClient
from treadle.weights.buffer_sizes import aligned
from treadle.wire.errors import WireError


class Fill(Protocol):
    """Fills a buffer with a bucket of which this rank is the source."""

    def __call__(self, buffer: Buffer, number: int) -> None:
        """Put bucket `number` and its digests into the buffer; on a device, on this thread's current stream."""
        ...


@dataclass
class BucketTimes:
    """When this rank's ops of each bucket ran: (start, end) in nanoseconds of the host's monotonic clock."""

    h2d: dict[int, tuple[int, int]] = field(default_factory=dict)
    broadcast: dict[int, tuple[int, int]] = field(default_factory=dict)
    reload: dict[int, tuple[int, int]] = field(default_factory=dict)
    send: dict[int, tuple[int, int]] = field(default_factory=dict)
    recv: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Where:
    """How far a loop has come, for error messages. `on_worker`: it waits for the worker."""

    bucket: int = -1
    on_worker: bool = False


class BucketLoop:
    """Moves one attempt's buckets on one rank. `compare(buffer, bucket)` sees each bucket of another rank.

    `place` has each rank's number in the group, which is of the ranks of the attempt alone.

    Whole buckets have the plan's sizes. Of a delta `delta_bytes` gives those of this rank's buckets, once they are
    encoded, and ranks exchange sizes before a bucket moves.
    """

    def __init__(
        self,
        shares: Shares,
        rank: int,
        epoch: int,
        device: torch.device,
        *,
        ipc: Sequence[Buffer],
        h2d: Sequence[Buffer],
        worker: WorkerClient | None,
        group: Any,
        place: Callable[[int], int],
        wait: Callable[[Any], None],
        deadline_s: float,
        checked: bool,
        stream: DeviceStream | None = None,
        compare: Callable[[Buffer, int], None] | None = None,
    ) -> None:
        self.shares, self.rank, self.epoch, self.device = shares, rank, epoch, device
        self.clock = device_of(device, timedelta(seconds=deadline_s))
        self.ipc, self.h2d, self.worker, self.group, self.place, self.wait = ipc, h2d, worker, group, place, wait
        self.deadline_s, self.checked = deadline_s, checked
        self.times, self.where = BucketTimes(), Where()
        self.own = [i for i, bucket in enumerate(shares.plan.buckets) if bucket.source == rank]
        self._waiting: deque[int] = deque()
        self._filled: dict[int, tuple[Any, Any]] = {}
        self._packed: _Packed | None = None
        self._stream = stream
        self._compare = compare
        self.delta_bytes: Callable[[int], int] | None = None
        self._sizes: dict[int, int] = {}
        self._arrived: tuple[Buffer, int] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all buckets that this rank sees."""
        return sum(bucket.size_bytes for bucket in self.shares.plan.buckets)

    def run(self, fill: Fill, loads: bool, progress: Callable[[int], None]) -> None:
        """Move all buckets, until the worker has loaded its part; `loads`: it has one."""
        plan = self.shares.plan
        if self.h2d and self.own:
            self._pack_ahead(fill, alone=len(self.h2d) == 1)
        try:
            for number, bucket in enumerate(plan.buckets):
                self._await_loaded(number - plan.num_ipc)
                self.where.bucket = number
                self._learn_sizes(number)
                start, at = self._place(number, fill)
                self._broadcast((*self.ipc, *self.h2d)[at], number)
                self.times.broadcast[number] = start, perf_counter_ns()
                if loads and plan.taken(self.rank, number):
                    self._load(number, at)
                elif self._packed is not None:
                    self._packed.done(number)
                if bucket.source != self.rank:
                    self._arrived = self.ipc[at], number
                if plan.num_ipc == 1:
                    self._look()
                progress(bucket.size_bytes)
            self._look()
            self._await_loaded(len(plan.buckets))
            self._note_fills()
        finally:
            if self._packed is not None:
                self._packed.stop()

    def _pack_ahead(self, fill: Fill, *, alone: bool) -> None:
        rounds = [self.shares.plan.buckets[number].round for number in self.own] if alone else None
        self._packed = _Packed(self.h2d, self.own, self._timed(fill), self.device, rounds, self._stream)

    def _place(self, number: int, fill: Fill) -> tuple[int, int]:
        """When the broadcast begins, and the index of its buffer, counted over IPC and then H2D buffers.

        A source broadcasts from its H2D buffer, and its own worker loads from there, which saves a copy.
        """
        bucket, at = self.shares.plan.buckets[number], number % self.shares.plan.num_ipc
        if self._packed is not None and self._packed.held_over(bucket.round):
            self._await_loaded(self._packed.last)
            self._packed.turn(bucket.round)
        if bucket.source != self.rank:
            return perf_counter_ns(), at
        if self._packed is not None:
            packed = self._packed.next(number, self.deadline_s)
            return perf_counter_ns(), len(self.ipc) + packed
        self._timed(fill)(self.ipc[at], number)
        return perf_counter_ns(), at

    def _timed(self, fill: Fill) -> Fill:
        """The same, with its start and end noted on the device's clock: on a stream a fill ends after its call."""

        def timed(buffer: Buffer, number: int) -> None:
            start = self.clock.now()
            fill(buffer, number)
            self._filled[number] = start, self.clock.now()

        return timed

    def _note_fills(self) -> None:
        """Convert the fills' times, now that all have ended."""
        self.clock.catch_up()
        for number, noted in self._filled.items():
            start, end = self.clock.nanoseconds(list(noted))
            self.times.h2d[number] = start, end

    def _broadcast(self, buffer: Buffer, number: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.place(self.shares.plan.buckets[number].source), 0
        work = self.group.broadcast([buffer.tensor[: self._size(number)]], options)
        self._look()
        self.wait(work)

    def _size(self, number: int) -> int:
        """Bytes of a bucket as it moves, with its digests if they are checked."""
        table, delta_bytes = self.shares.tables[number], self._sizes.get(number)
        if delta_bytes is not None:
            return aligned(delta_bytes) + table.end_bytes - table.offset_bytes if self.checked else delta_bytes
        return table.end_bytes if self.checked else self.shares.plan.buckets[number].size_bytes

    def _learn_sizes(self, number: int) -> None:
        """Gather the sizes of the changed elements of a round, before its first bucket moves."""
        if self.delta_bytes is None or number in self._sizes:
            return
        buckets = self.shares.plan.buckets
        alike = takewhile(lambda at: buckets[at].round == buckets[number].round, range(number, len(buckets)))
        numbers = list(alike)
        own = [self.delta_bytes(at) if buckets[at].source == self.rank else 0 for at in numbers]
        sizes = upload(own, torch.int64, self.device)
        self.wait(self.group.allreduce([sizes]))
        self._sizes.update(zip(numbers, Download(sizes).tolist(), strict=True))

    def total_bytes(self) -> int:
        """Return the bytes of changed elements that all ranks have sent. All ranks call this together."""
        buckets = self.shares.plan.buckets
        own = sum(size * buckets[at].times for at, size in self._sizes.items() if buckets[at].source == self.rank)
        total = upload([own], torch.int64, self.device)
        self.wait(self.group.allreduce([total]))
        return int(Download(total).tolist()[0])

    def _look(self) -> None:
        """Compare the bucket before with this rank's own weights, while the next one is broadcast.

        With two IPC buffers its memory is overwritten only by the bucket after the next.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is not None and self._compare is not None:
            self._compare(*arrived)

    def _load(self, number: int, at: int) -> None:
        assert self.worker is not None
        moved = self.epoch, self.shares.name(self.rank), number, at
        self.worker.send(Move(*moved, out=False, checked=self.checked, delta_bytes=self._sizes.get(number, 0)))
        self._waiting.append(number)

    def _await_loaded(self, last: int) -> None:
        """Wait until the worker has loaded the buckets up to this one."""
        while self._waiting and self._waiting[0] <= last:
            self._await_next()

    def _await_next(self) -> None:
        assert self.worker is not None
        self.where.bucket, self.where.on_worker = self._waiting[0], True
        loaded = self.worker.expect(Moved, self.deadline_s, self.epoch)
        number = self._waiting.popleft()
        _compare_bucket(loaded, number)
        self.times.reload[number] = loaded.start_ns, loaded.end_ns
        if self._packed is not None:
            self._packed.done(number)
        self.where.on_worker = False


def _compare_bucket(answer: Moved, number: int) -> None:
    if answer.bucket != number:
        raise WireError(f"{type(answer).__name__} of bucket {answer.bucket} came for bucket {number}")


class _Packed:
    """Packs a rank's buckets in turn into its H2D buffers, in a thread, ahead of their broadcasts.

    A lone buffer, with the `rounds` of its buckets, is filled when their round begins, as planned: copies and
    broadcasts then do not share links. Another is filled again as soon as its bucket was broadcast and loaded. On a
    device the thread has a `stream`, which begins after what the calling thread's stream was told so far: that may
    still write the source's weights.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        own: Sequence[int],
        fill: Fill,
        device: torch.device,
        rounds: Sequence[int] | None = None,
        stream: DeviceStream | None = None,
    ) -> None:
        self._buffers, self._alone, self._round = buffers, rounds is not None, 0
        self._rounds = deque(rounds or ())
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[int, Any] | Exception] = queue.SimpleQueue()
        self._used: dict[int, int] = {}
        self._device, self._streams = device, streams_of(device)
        self._launching: AbstractContextManager[Any] = nullcontext()
        if self._streams is not None:
            assert stream is not None
            stream.wait_event(self._streams.event(device))
            self._launching = self._streams.on(stream)
        if self._alone:
            self.turn(0)
        else:
            for at in range(len(buffers)):
                self._free.put(at)
        self._thread = threading.Thread(target=self._run, args=(own, fill), name="treadle h2d", daemon=True)
        self._thread.start()

    def _run(self, own: Sequence[int], fill: Fill) -> None:
        with self._launching:
            for number in own:
                at = self._free.get()
                if at is None:
                    return
                try:
                    fill(self._buffers[at], number)
                except Exception as error:  # raised where the bucket is needed
                    self._full.put(error)
                    return
                self._full.put((at, self._streams.event(self._device) if self._streams is not None else None))

    @property
    def last(self) -> int:
        """The last bucket whose buffer is in use, -1 if none is."""
        return max(self._used, default=-1)

    @property
    def oldest(self) -> int:
        """The first bucket whose buffer is in use, -1 while another buffer is free."""
        return min(self._used) if len(self._used) == len(self._buffers) else -1

    def next(self, number: int, deadline_s: float) -> int:
        """Wait for this bucket's turn to be packed, on a device in the current stream; the index of its buffer."""
        try:
            packed = self._full.get(timeout=deadline_s)
        except queue.Empty:
            late = f"this rank did not pack bucket {number} within {deadline_s:g} s{short_of_cores()}"
            raise RuntimeError(late) from None
        if isinstance(packed, Exception):
            raise packed
        at, ready = packed
        if self._streams is not None:
            self._streams.current(self._device).wait_event(ready)
        self._used[number] = at
        return at

    def done(self, number: int) -> None:
        """A bucket was broadcast, and loaded by this rank's worker if it takes any of it: its buffer is free."""
        if number in self._used and not self._alone:
            self._free.put(self._used.pop(number))

    def held_over(self, number: int) -> bool:
        """Return whether round `number` is a new one, and a lone buffer waits for it."""
        return self._alone and number != self._round

    def turn(self, number: int) -> None:
        """Round `number` begins: nothing reads the lone buffer any more."""
        self._round = number
        self._used.clear()
        if self._rounds and self._rounds[0] == number:
            self._rounds.popleft()
            self._free.put(0)

    def stop(self) -> None:
        """End the thread; waits for the bucket that is being packed."""
        self._free.put(None)
        self._thread.join()


def exporting(
    worker: WorkerClient, plan: str, epoch: int, buffers: Sequence[Buffer], deadline_s: float, checked: bool
) -> Fill:
    """A `Fill` that has the worker export its own weights into the buffer."""

    def fill(buffer: Buffer, number: int) -> None:
        at = next(i for i, own in enumerate(buffers) if own is buffer)
        asked = Move(epoch, plan, number, at, out=True, checked=checked)
        _compare_bucket(worker.ask(asked, Moved, deadline_s), number)

    return fill
