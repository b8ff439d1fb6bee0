"""One attempt on one update rank: phase by phase, each agreed on by all ranks before the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from treadle.update.coordinator.coordinator import HEAR_S
from treadle.update.errors import UpdateError, failure
from treadle.update.protocol import rank
from treadle.update.protocol.catalogue import layout_digest
from treadle.update.protocol.control import Enter, Fault, Go, Kind, Layouts, Phase, Sides
from treadle.update.protocol.messages import (
    Abort,
    Begin,
    Begun,
    Commit,
    Finish,
    Prepared,
    Settle,
    Status,
    Wants,
)
from treadle.update.protocol.rank import Action, AskWorker, AttemptDone, RankState, TellCoordinator, Work
from treadle.update.rank.broadcast import BroadcastError
from treadle.update.rank.bucket_loop import BucketLoop, giving
from treadle.update.rank.comparing import SourceComparison, comparison
from treadle.update.rank.packing import Packer
from treadle.update.rank.plans import UnplannableError
from treadle.update.rank.shares import Shares
from treadle.update.rank.source import Source
from treadle.update.rank.worker_client import WorkerRefusedError, blame, dismiss
from treadle.wire.errors import PeerGoneError, WireError

if TYPE_CHECKING:
    from treadle.update.updater import Updated, Updater

FAREWELL_S = 3.0
"""How long a failed attempt waits for its worker to go back; it goes on by itself after that."""

EXPLAIN_S = 1.5
"""How long a rank whose broadcast broke off waits to be told why."""

_NOTHING = Wants((), ())


class AttemptRun:
    """Runs once, as `protocol/rank.py` decides. `timed_out`: a wait for the worker did."""

    def __init__(
        self,
        updater: Updater,
        kind: Kind,
        version: int,
        source: Source | None,
        changed: tuple[str, ...] | None,
        base: int | None,
    ) -> None:
        self.u, self.kind, self.source = updater, kind, source
        self.changed, self.base = changed, base
        self.options, self.member, self.beside = updater.options, updater.member, updater.beside
        self.state = RankState(updater.rank, updater.options, version=version)
        self.member.begin()
        self.timed_out = False
        self.seconds: dict[str, float] = {}
        self.status: Status | None = None
        self.stream: BucketLoop | None = None
        self._has = source.has if source is not None else _NOTHING
        self._wants = _NOTHING
        self._shares: Shares | None = None
        self._kept = 0

    @property
    def epoch(self) -> int:
        """The attempt's number, 0 before it has one."""
        return self.state.epoch

    @property
    def phase(self) -> Phase:
        """Where this rank is."""
        return self.state.phase

    @property
    def bucket(self) -> int:
        """Where it is, -1 outside of loading."""
        return self.stream.where.bucket if self.stream is not None and self.phase == "load" else -1

    def run(self) -> Updated:
        """All phases."""
        from treadle.update.updater import Updated

        with self._in("enter"):
            action: Action
            self.state, action = self._say(TellCoordinator(self._enter(), (Go,)))
        while not isinstance(action, AttemptDone):
            with self._in(self.phase):
                if isinstance(action, TellCoordinator):
                    self.state, action = self._say(action)
                elif isinstance(action, AskWorker):
                    self.state, action = rank.answered(self.state, self._ask(action.message))
                else:
                    self.state, action = rank.worked(self.state, self._work(action))
        assert self.status is not None
        if self._shares is None:
            assert self.status.version is not None
            return Updated(self.status.version, self.epoch, 0, 0, self.status.rollbacks, self.seconds, ())
        assert self.state.layouts is not None
        assert self.stream is not None
        shares, why = self._shares, self.state.layouts.why
        return Updated(
            self.state.version,
            self.epoch,
            sum(bucket.size_bytes for bucket in shares.plan.buckets),
            self._kept,
            self.status.rollbacks,
            self.seconds,
            (*shares.plan.notes, *([why] if why else [])),
            shares,
            self.stream.times,
        )

    # ---- what a rank does --------------------------------------------------------------------------------------------

    def _enter(self) -> Enter:
        """Meets the worker. A rank that cannot enters too, so that all ranks hear of it together."""
        deadline_s, fault = self.options.deadline_s, None
        try:
            self.beside.connect(self.u.rank, deadline_s)
            self.status = self.beside.settled_in(deadline_s)
            self._wants = self.beside.wants(deadline_s)
        except (UpdateError, WorkerRefusedError, WireError, OSError) as error:
            if self.u.post.bad is not None:
                raise
            if isinstance(error, TimeoutError):
                self.beside.drop()  # its answer, when it comes, is not to be taken for another
            fault = blame(error, 0, self.beside.name, "enter", -1).fault
        names = self.kind, self.state.version, self.base, self.changed
        layouts = layout_digest(self._has), layout_digest(self._wants)
        mine = self.beside.gives, self.u.broadcasts.made
        vouched = self.u.takeover, self.u.new_set
        return Enter(self.u.rank, *names, *layouts, self.status, *mine, fault, *vouched)

    def _say(self, say: TellCoordinator) -> rank.Step:
        self.member.send(say.message, self.phase)
        return rank.heard(self.state, self.member.hear(say.answers, self.phase))

    def _ask(self, message: Settle | Begin | Finish | Commit) -> Status | Begun | Prepared:
        """The worker's answer."""
        options = self.options
        if isinstance(message, Begin):
            begun = self.beside.ask(message, Begun, options.phase_s)
            self._kept = begun.rollback_bytes
            if begun.rollback_bytes:
                self.u.say(
                    f"worker {self.u.rank} keeps {begun.rollback_bytes} bytes ({options.rollback}) until version "
                    f"{message.version} is committed"
                )
            return begun
        if isinstance(message, Finish):
            return self.beside.ask(message, Prepared, options.deadline_s)
        within_s = options.phase_s if isinstance(message, Settle) else options.deadline_s
        self.status = self.beside.ask(message, Status, within_s)
        return self.status

    def _work(self, work: Work) -> Any:
        """What this rank does by itself."""
        if work.what == "dismiss":
            assert self.state.go is not None
            return dismiss(self.u.directory, work.about, self.state.go, self.options)
        if work.what == "describe":
            asked = self._has if work.about.has else None, self._wants if work.about.wants else None
            return Sides(self.epoch, self.u.rank, self.u.free_bytes, *asked)
        assert self.state.layouts is not None
        if work.what == "plan":
            self._shares = self._plan(self.state.layouts)
            return self._shares.digest
        assert self._shares is not None
        self._load(self.state.layouts, self._shares)
        return None

    def _plan(self, layouts: Layouts) -> Shares:
        try:
            shares = self.u.plans.of(layouts)
        except WireError as error:
            raise failure(self.epoch, self.member.name, "plan", str(error)) from error
        except UnplannableError as error:
            raise failure(self.epoch, error.who, "plan", str(error)) from error
        self.u.buffers(shares)
        gives = self.u.rank in layouts.holds
        self.beside.take_plan(shares.of_worker(self.u.rank, gives=gives), self.options.deadline_s)
        device = self.u.device.index or 0 if self.u.device.type == "cuda" else -1
        self.beside.map([*self.u.ipc, *self.u.h2d], device, self.options.deadline_s)
        return shares

    def _load(self, layouts: Layouts, shares: Shares) -> None:
        group: Any = self.u.broadcasts.circle(layouts.circle, self.u.post).communicator
        assert self.u.broadcasts.waiter is not None
        compared = self._comparison(layouts, shares)
        self.stream = BucketLoop(
            shares,
            self.u.rank,
            self.epoch,
            ipc=self.u.ipc,
            h2d=self.u.h2d[: shares.plan.num_h2d],
            beside=self.beside,
            group=group,
            wait=self.u.broadcasts.waiter.wait,
            deadline_s=self.options.deadline_s,
            checked=self.options.checked,
            compare=compared.look if compared is not None else None,
        )
        if layouts.holds:
            waits = self.options.deadline_s, self.options.checked
            fill = giving(self.beside, shares, self.epoch, self.u.ipc, *waits)
        else:
            assert self.source is not None
            fill = Packer(shares, self.source, checked=self.options.checked).fill
        total, done = sum(bucket.size_bytes for bucket in shares.plan.buckets), 0

        def progress(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            self.u.progress(done, total)

        self.stream.run(fill, self.state.loads, progress)
        different = compared.refusal(layouts.version) if compared is not None else None
        if different is not None:
            raise failure(self.epoch, different[0], "load", different[1])

    def _comparison(self, layouts: Layouts, shares: Shares) -> SourceComparison | None:
        """With the weights of this rank; workers that give hold one committed version."""
        self.u.turn = self.u.turn + 1 if self.u.turn is not None else self.epoch
        source = self.source if not layouts.holds else None
        return comparison(shares.plan, source, self.u.rank, self.options.compare_sources, self.u.turn)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        """Around a phase: takes its time, and what its waits raise becomes the fault that all will hear of."""
        began = time.perf_counter()
        try:
            yield
        except (PeerGoneError, TimeoutError, WorkerRefusedError, WireError) as error:
            self.timed_out = self.timed_out or isinstance(error, TimeoutError)
            raise self._blame(error) from error
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def _blame(self, error: Exception) -> UpdateError:
        made = blame(error, self.epoch, self.beside.name, self.phase, self.bucket)
        if made.corrupt and self.stream is not None:
            source = self.stream.shares.plan.buckets[self.bucket].source
            return failure_at_source(made, source)
        return made

    # ---- failure -----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> UpdateError:
        """What all ranks raise; the worker is told what became of it, if that is known.

        Once this rank has voted, only the coordinator's word is known: without it the worker stays prepared.
        """
        known, told = self._explain(error), self.member.stop is not None
        word = rank.farewell(self.state, told=told, committed=known.committed)
        with suppress(Exception):  # a worker that is gone or hangs: it will learn in the next attempt
            if word == "commit":
                self.beside.ask(Commit(self.epoch, self.state.version), Status, FAREWELL_S, heed=False)
            elif word == "abort":
                self.beside.send(Abort(self.epoch))
                if not self.timed_out:  # one that hangs was waited for already
                    self._farewell()
        if self.timed_out:
            self.beside.drop()  # it goes back when it finds itself alone; what it answers is not for another question
        if not self.state.in_doubt(told=told):
            return known
        text = (
            f"{known.text}; whether version {self.state.version} is committed is not known here, and the worker stays "
            "closed until the next attempt tells it"
        )
        return failure(self.epoch, known.who, known.phase, text, known.bucket)

    def _farewell(self) -> None:
        """Reads what the worker still has to say until it has gone back; lets go of one that does not."""
        until = time.monotonic() + FAREWELL_S
        try:
            while True:
                left = max(0.0, until - time.monotonic())
                answer = self.u.post.wait("worker", left, heed=False)
                if isinstance(answer, Status):
                    return
        except (PeerGoneError, TimeoutError):
            self.beside.drop()

    def _explain(self, error: BaseException) -> UpdateError:
        post = self.u.post
        broke_off = isinstance(error, RuntimeError) and not isinstance(error, UpdateError)
        if post.bad is None and broke_off:
            post.wait_bad(EXPLAIN_S)  # a broadcast breaks off before the news of why has come
        if post.bad is None:
            if isinstance(error, UpdateError):
                fault = error.fault
            else:
                text, waited = f"{type(error).__name__}: {error}", isinstance(error, BroadcastError)
                who = f"update rank {self.u.rank}"
                fault = Fault(self.epoch, who, self.phase, self.bucket, text, waited=waited)
            if self.epoch:
                self.member.report(fault)
            return post.wait_bad(EXPLAIN_S + HEAR_S) or UpdateError(fault, committed=self.state.decided)
        bad, cut_off = post.bad, self.member.lost and self.member.stop is None
        if cut_off or (bad.phase == "finish" and bad.bucket < 0 and self.phase == "load"):
            # Whoever ended did not say where it was; where it left this rank is the next best.
            here = failure(self.epoch, bad.who, self.phase, bad.text, self.bucket)
            return UpdateError(here.fault, committed=bad.committed or self.state.decided)
        return bad


def failure_at_source(error: UpdateError, source: int) -> UpdateError:
    """The same, naming where the bytes came from."""
    fault = error.fault
    text = f"{fault.text} (update rank {source})"
    return UpdateError(type(fault)(fault.epoch, fault.who, fault.phase, fault.bucket, text, fault.corrupt))
