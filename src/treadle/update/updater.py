"""Weight updates, as an update rank sees them.

    updater = Updater(directory, ledger=state_directory)          # on every rank, beside its worker
    done = updater.update(Source.of(model.state_dict()), version=7)

Ranks that hold weights and ranks that speak for workers may be the same, as here, or two sets of any sizes: a rank
without a worker makes its updater with `worker=None`, a rank without weights gives no source (`None`).

All ranks call the same methods in the same order. An attempt either commits on all workers or raises UpdateError on
every rank that lives, and can be tried again unless a rank was lost. `AttemptRun.run` has it step by step.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from treadle.dist.clock import clock_offset
from treadle.dist.rank_world import RankWorld
from treadle.dist.streams import HOST_MEMORY
from treadle.host.errors import named
from treadle.ir.trace import Trace
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.coordinator.coordinator_thread import Coordinator
from treadle.update.errors import UpdateError, failure
from treadle.update.protocol.control import Asked
from treadle.update.protocol.record import MOST
from treadle.update.rank.attempt_device import own_device
from treadle.update.rank.attempt_run import AttemptRun
from treadle.update.rank.broadcast import Broadcasts, Buckets
from treadle.update.rank.context import RankContext, UpdateRequest
from treadle.update.rank.coordinator_client import CoordinatorClient
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.lease_keeper import LeaseKeeper
from treadle.update.rank.measured_update import noted, trace_of
from treadle.update.rank.plans import Plans
from treadle.update.rank.rank_buffers import RankBuffers
from treadle.update.rank.rendezvous import Rendezvous
from treadle.update.rank.source import WeightSource
from treadle.update.rank.worker_client import WorkerClient
from treadle.update.update_options import UpdateOptions
from treadle.update.updated import Updated
from treadle.weights.tensor_boxes import is_text
from treadle.wire.seal import read_key


class Updater:
    """Brings versions to workers, from one update rank; all calling ranks make theirs in the same order.

    Args:
        directory: The directory of the workers' sockets on this host, of mode 0700.
        worker: The number of the worker for which this rank speaks, None for none; by default the rank's own number.
        ledger: A directory that lasts, for the commit log; needed on rank 0, which runs the coordinator.
        key: A file that only its owner can read, the same on all ranks; needed where ranks are on several hosts.
        address: The address at which other hosts reach rank 0; by default the one from which it reaches torch's store.
        options: How updates are done, the same on all ranks.
        device: The device of the buffers, of one type on all ranks that give one. By default that of the worker's
            weights, or, without a worker, of what is sent.
        takeover: Take the workers over that ranks speak for: they are the set. They may belong to another log, which is
            lost; a new log commits to the version that they all serve, and they go on serving it. The caller vouches
            that other members of the log have ended: if they live, they serve an old version.
        world: The update ranks that call; by default those of torch's process group. Where agents join
            (`treadle.update.agent`), one that rank 0 opens at a fixed port (`treadle.dist.rank_world.RankWorld.host`).
        agents: How many agents must have joined before the first update. Used on rank 0.
        say: Called with a line for people before something costly happens.
        progress: Called with bytes broadcast so far and bytes in all.

    """

    def __init__(
        self,
        directory: Path,
        *,
        ledger: Path | None = None,
        worker: int | Literal["rank"] | None = "rank",
        key: Path | None = None,
        address: str | None = None,
        options: UpdateOptions | None = None,
        device: torch.device | None = None,
        takeover: bool = False,
        world: RankWorld | None = None,
        agents: int = 0,
        say: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        options = options if options is not None else UpdateOptions()
        world = world if world is not None else RankWorld.of_torch()
        self.rank, self.world = world.rank, world.size
        worker = self.rank if worker == "rank" else worker
        self.takeover = takeover
        self.attempt: AttemptRun | None = None
        self._running = threading.Lock()
        self._trace_group: Buckets | None = None
        self._calls = 0
        rendezvous, inbox = Rendezvous(directory, address, world, options), Inbox()
        with rendezvous.published():
            rendezvous.key = read_key(key) if key is not None else None
            self.coordinator = self._host(rendezvous, ledger, agents)
            client = CoordinatorClient(rendezvous, self.rank, self.world, inbox, options)
        self.context = RankContext(
            self.rank,
            directory,
            options,
            device if device is None else own_device(device),
            inbox,
            client,
            WorkerClient(directory, worker, inbox, self._worker_lost) if worker is not None else None,
            Plans(options.memory),
            Broadcasts(rendezvous.name, world, options.deadline_s),
            RankBuffers(HOST_MEMORY),
            say,
            progress,
        )
        inbox.on_bad = self._break_off
        if worker is not None and options.lease_s is not None:
            keeper = LeaseKeeper(directory, worker, self.rank, options.lease_s, client.report_status)
            self.context.keeper, client.granted = keeper, keeper.take

    @property
    def options(self) -> UpdateOptions:
        """How the next attempt is done; assign the same on all ranks. The coordinator's deadline and leases stay."""
        return self.context.options

    @options.setter
    def options(self, options: UpdateOptions) -> None:
        self.context.options = options

    def _host(self, rendezvous: Rendezvous, ledger: Path | None, agents: int) -> Coordinator | None:
        """On rank 0, start the coordinator."""
        if self.rank != 0:
            return None
        if ledger is None:
            raise ValueError("update rank 0 runs the coordinator and needs ledger=, a directory that lasts")
        made: Coordinator = rendezvous.host(
            lambda listener: Coordinator(listener, CommitLog(ledger), self.world, rendezvous.options, agents)
        )
        return made

    def __enter__(self) -> Updater:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(
        self,
        source: WeightSource | None,
        version: int,
        *,
        changed: Collection[str] | None = None,
        base: int | None = None,
    ) -> Updated:
        """Bring a version to all workers.

        Args:
            source: This rank's part of the weights, None where it has none. Its elements must not change until this
                returns or raises.
            version: A number from 1 that is above the committed one.
            changed: Names of the tensors that differ from version `base`; only they move, where all workers serve
                `base` and their engines can load a part. Otherwise all tensors move, and `notes` has the reason.
            base: The version that `changed` is against.

        Raises:
            UpdateError: on every rank that lives. Its `committed` is whether the version was decided before.

        """
        number, before = _version("version", version), _version("base", base) if base is not None else None
        names = _names(changed) if changed is not None else None
        return self._run(UpdateRequest(Asked("update", number, before, names, self.takeover, self.options), source))

    def recover(self, source: WeightSource | None = None, version: int = 0) -> Updated:
        """Bring the committed version to workers that do not serve it, from peers, which go on serving.

        Where no peer can export it, give a `source` that still has that `version`.
        """
        number = _version("version", version) if isinstance(version, bool) or version != 0 else 0
        if (source is None) != (number == 0):
            given = "a version and no source" if source is None else "a source and no version"
            raise ValueError(
                f"recover() takes the version from workers that serve it, recover(source, version=7) from a source "
                f"that has it; got {given}"
            )
        asked = Asked("recover", number, takeover=self.takeover, options=self.options)
        return self._run(UpdateRequest(asked, source))

    def attend(self, timeout_s: float) -> Updated | None:
        """Take part in the next attempt that an agent is called to; None where no call comes in time."""
        call = self.context.coordinator.next_call(self._calls, timeout_s)
        if call is None:
            return None
        self._calls = call.number
        self.context.options = call.asked.options
        return self._run(UpdateRequest(call.asked, call=call.number))

    def report(self) -> None:
        """Report how the worker stands, between attempts: the coordinator brings it up to date where that is needed."""
        worker, client = self.context.worker, self.context.coordinator
        worker.connect(self.rank, self.options.meet_s)
        client.report_status(worker.settled_in(self.options.meet_s))

    def _run(self, request: UpdateRequest) -> Updated:
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "this updater is in an update or recovery already, which another thread or a callback began; call one "
                "after the other, in the same order on all ranks"
            )
        try:
            return self._attempt(request)
        finally:
            self._running.release()

    def _attempt(self, request: UpdateRequest) -> Updated:
        context = self.context
        if context.coordinator.lost:
            text = f"lost before this attempt: {context.coordinator.why_lost}; start the update ranks again"
            raise failure(0, context.coordinator.name, "enter", text)
        attempt: AttemptRun | None
        known: UpdateError | None
        self.attempt = attempt = AttemptRun(context, request)
        began = time.perf_counter()
        try:
            done = attempt.run()
        except BaseException as error:
            try:
                known = attempt.fail(error)
            finally:
                self._break_off()
                if context.broadcasts.made == 0 and context.broadcasts.drop():  # a stuck one may still write to them
                    context.buffers.free()
            if not isinstance(error, Exception):
                raise
            raise known from error
        finally:
            self.attempt = attempt = known = None  # the error's traceback holds this frame
            context.buffers.end_update()
        done.seconds["total"] = time.perf_counter() - began
        return done

    def trace(self, done: Updated) -> Trace:
        """The planned Program of an update with the times of all ranks, on one clock. All ranks call this together."""
        if done.shares is None or done.times is None:
            raise ValueError(f"nothing moved for version {done.version}, so there is no trace of it")
        cast = self.context.broadcasts.cast
        if any(rank >= self.world for rank in cast):
            raise ValueError("agents keep no times of an update, so there is no trace of one that they took part in")
        if self._trace_group is None:
            self._trace_group = self.context.broadcasts.make_control("trace")
        group = self._trace_group
        own = noted(done.times, len(done.shares.plan.buckets))
        own[own >= 0] += clock_offset(group)
        gathered = group.all_gather(torch.from_numpy(own))
        about = f"update to version {done.version}, measured"
        return trace_of(done.shares.plan, [times.numpy() for times in gathered], about)

    def _break_off(self) -> None:
        """End waits in the process group. Before the attempt has its number nobody is in it."""
        attempt = self.attempt
        if attempt is not None and attempt.epoch:
            self.context.broadcasts.break_off()

    def _worker_lost(self, name: str, text: str) -> None:
        """Report a lost worker at once, from the thread that reads from it: the updating thread may wait elsewhere."""
        attempt = self.attempt
        if attempt is not None and attempt.epoch and attempt.state.speaks:
            fault = failure(attempt.epoch, name, attempt.phase, f"lost: {text}", attempt.bucket).fault
            self.context.coordinator.report(fault)

    def close(self) -> None:
        """Disconnect from the worker, which goes on serving, and from the other ranks. May be called again."""
        if self.context.keeper is not None:
            self.context.keeper.close()
        if self.context.own_worker is not None:
            self.context.own_worker.drop()
        self.context.coordinator.close()
        self.context.broadcasts.drop()
        if self._trace_group is not None:
            self._trace_group.close()
        self.context.buffers.free()
        if self.coordinator is not None:
            self.coordinator.close()


def _version(name: str, given: object) -> int:
    """A version as a message holds it. Raises ValueError for what is no whole number of that range."""
    try:
        number = operator.index(given) if not isinstance(given, bool) else 0  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= MOST:
        raise ValueError(f"{name} is a whole number from 1 to {MOST}, got {named(given)}")
    return number


def _names(changed: Collection[str]) -> tuple[str, ...]:
    """Return the names of tensors, in order. Raises ValueError where they are none."""
    if isinstance(changed, str | bytes):
        raise ValueError(f"changed is a collection of tensor names, got {named(changed)}; give [{changed!r}]")
    names = list(changed)
    for name in names:
        if not isinstance(name, str) or not is_text(name):
            raise ValueError(f"changed has names of tensors, text without surrogates, got {named(name)}")
    return tuple(sorted(names))


__all__ = ["UpdateError", "Updated", "Updater"]
