"""Weight updates, as an update rank sees them.

    updater = Updater(directory, ledger=state_directory)          # on every rank, beside its worker
    done = updater.update(Source.of(model.state_dict()), version=7)

All ranks call the same methods in the same order. An attempt either commits on all workers or raises UpdateError on
every rank that lives, and can be tried again unless a rank was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from treadle.dist.clock import clock_offset
from treadle.ir.trace import Trace
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.coordinator.coordinator import Coordinator
from treadle.update.errors import UpdateError, failure
from treadle.update.memory.host import Buffer, HostBuffer
from treadle.update.options import UpdateOptions
from treadle.update.protocol.control import Kind
from treadle.update.protocol.record import MOST
from treadle.update.rank.attempt_run import AttemptRun
from treadle.update.rank.broadcast import Broadcasts, Buckets
from treadle.update.rank.bucket_loop import BucketTimes
from treadle.update.rank.coordinator_client import CoordinatorClient
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.measured import noted, trace_of
from treadle.update.rank.plans import Plans
from treadle.update.rank.rendezvous import Rendezvous
from treadle.update.rank.shares import Shares
from treadle.update.rank.source import Source
from treadle.update.rank.worker_client import WorkerClient
from treadle.wire.seal import read_key

HOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Updated:
    """What came of an attempt that committed. `seconds` are by phase, `rollbacks` what the worker has done so far."""

    version: int
    epoch: int
    size_bytes: int
    rollback_bytes: int
    rollbacks: int
    seconds: dict[str, float]
    notes: tuple[str, ...]
    shares: Shares | None = field(repr=False, default=None)
    times: BucketTimes | None = field(repr=False, default=None)


class Updater:
    """One rank's end. `ledger` is a directory that lasts, used by rank 0, where the coordinator is.

    Where update ranks are on several hosts, all need the same `key`, a file that only its owner can read; `address` is
    where they reach rank 0, if that is not the address from which it reaches torch's store.
    `takeover`: workers that belong to another log are taken over from it; for a log that is lost. If this log is new,
    it commits to the version that they serve, and they go on. `new_set`: the workers are a new set; members of the log
    that have no rank are closed where they can be reached, and taken for ended otherwise.
    `say` hears what people want to know before it happens; `progress` bytes done and bytes in all.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ledger: Path,
        key: Path | None = None,
        address: str | None = None,
        options: UpdateOptions | None = None,
        device: torch.device | None = None,
        takeover: bool = False,
        new_set: bool = False,
        say: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.options = options if options is not None else UpdateOptions()
        self.device = device if device is not None else torch.device("cpu")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.directory, self.takeover, self.new_set = directory, takeover, new_set
        self.say, self.progress = say, progress
        self.post = Inbox()
        self.plans = Plans(self.options.memory)
        rendezvous = Rendezvous(directory, read_key(key) if key is not None else None, address)
        self.broadcasts = Broadcasts(rendezvous.name, self.rank, self.world, self.options.deadline_s, self.device)
        self.post.on_bad = self._break_off
        self.ipc: list[Buffer] = []
        self.h2d: list[Buffer] = []
        self.attempt: AttemptRun | None = None
        self.turn: int | None = None
        """Which blocks were compared last; from the first attempt's number on, so that the next process goes on."""
        self._talk: Buckets | None = None
        self._coordinator: Coordinator | None = None
        if self.rank == 0:
            self._coordinator = rendezvous.host(
                lambda door: Coordinator(door, CommitLog(ledger), self.world, self.options.phase_s)
            )
        self.member = CoordinatorClient(rendezvous, self.rank, self.world, self.post, self.options)
        self.beside = WorkerClient(directory, self.rank, self.post, self._worker_lost)

    def __enter__(self) -> Updater:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(
        self, source: Source, version: int, *, changed: Collection[str] | None = None, base: int | None = None
    ) -> Updated:
        """Brings a version to all workers. With `changed` and `base`, only those tensors, where all serve `base`."""
        if not 1 <= version <= MOST:
            raise ValueError(f"versions are numbers from 1 to {MOST}, got {version}")
        names = tuple(sorted(changed)) if changed is not None else None
        return self._run("update", version, source, names, base)

    def recover(self, source: Source | None = None, version: int = 0) -> Updated:
        """Brings the committed version to workers that do not serve it: from their peers, which go on serving.

        Where peers do not have it, a `source` that still has that `version` does.
        """
        if (source is None) != (version == 0):
            given = "a version and no source" if source is None else "a source and no version"
            raise ValueError(
                f"recover() takes the version from workers that serve it, recover(source, version=7) from a source "
                f"that has it; got {given}"
            )
        return self._run("recover", version, source, None, None)

    def _run(
        self, kind: Kind, version: int, source: Source | None, changed: tuple[str, ...] | None, base: int | None
    ) -> Updated:
        if self.member.lost:
            text = f"lost before this attempt: {self.member.why_lost}; start the update ranks again"
            raise failure(0, self.member.name, "enter", text)
        self.post.start()
        self.attempt = attempt = AttemptRun(self, kind, version, source, changed, base)
        began = time.perf_counter()
        try:
            done = attempt.run()
        except BaseException as error:
            known = attempt.fail(error)
            self._break_off()
            if self.broadcasts.made == 0 and self.broadcasts.drop():  # what may still be written to is not used again
                self._free_buffers()
            if not isinstance(error, Exception):
                raise
            raise known from error
        finally:
            self.attempt = None
        done.seconds["total"] = time.perf_counter() - began
        return done

    def trace(self, done: Updated) -> Trace:
        """What the last update did, on all ranks, who all ask for it: the Program that was planned, with its times."""
        if done.shares is None or done.times is None:
            raise ValueError(f"nothing moved for version {done.version}, so there is no trace of it")
        if self._talk is None:
            self._talk = self.broadcasts.make("trace")
        circle = self._talk
        own = noted(done.times, len(done.shares.plan.buckets))
        own[own >= 0] += clock_offset(circle, self.device)
        gathered = circle.all_gather(torch.from_numpy(own).to(self.device))
        about = f"update to version {done.version}, measured"
        return trace_of(done.shares.plan, [times.cpu().numpy() for times in gathered], about)

    def _break_off(self) -> None:
        """Nobody is in the communicator before an attempt has its number."""
        if self.attempt is not None and self.attempt.epoch:
            self.broadcasts.break_off()

    def _worker_lost(self, text: str) -> None:
        """Told from the thread that hears the worker: the thread that updates may be waiting elsewhere."""
        name = self.beside.name
        self.beside.drop()
        attempt = self.attempt
        if attempt is not None and attempt.epoch:
            self.member.report(failure(attempt.epoch, name, attempt.phase, f"lost: {text}", attempt.bucket).fault)

    def buffers(self, shares: Shares) -> None:
        """Makes sure of buffers of the plan's number and size; they stay for the next update."""
        self.ipc = self._fit(self.ipc, shares.plan.num_ipc, shares.buffer_bytes)
        self.h2d = self._fit(self.h2d, shares.plan.num_h2d, shares.buffer_bytes)

    def _fit(self, held: list[Buffer], num: int, size_bytes: int) -> list[Buffer]:
        if len(held) >= num and all(buffer.size_bytes >= size_bytes for buffer in held[:num]):
            return held
        while held:
            held.pop().close()
        if self.device.type == "cuda":
            from treadle.update.memory.cuda import CudaBuffer  # only where there is a GPU

            return [CudaBuffer.make(size_bytes, self.device) for _ in range(num)]
        return [HostBuffer.make(size_bytes) for _ in range(num)]

    def _free_buffers(self) -> None:
        for buffer in (*self.ipc, *self.h2d):
            buffer.close()
        self.ipc, self.h2d = [], []

    @property
    def free_bytes(self) -> int:
        """For buffers, on this rank's device."""
        if self.options.memory is not None:
            return min(self.options.memory.free)
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else HOST_BYTES

    def close(self) -> None:
        """Lets go of the worker, which goes on serving, and of the other ranks."""
        self.beside.drop()
        self.member.close()
        self.broadcasts.drop()
        self._free_buffers()
        if self._coordinator is not None:
            self._coordinator.close()


__all__ = ["UpdateError", "Updated", "Updater"]
