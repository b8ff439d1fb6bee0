"""One attempt on one update rank: phase by phase, each agreed on by all ranks before the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from weft.update.beside import RefusedError, blame
from weft.update.broadcasts import Broken
from weft.update.catalogue import layout_digest
from weft.update.comparing import Comparison, comparison
from weft.update.coordinator import HEAR_S
from weft.update.errors import UpdateError, failure
from weft.update.layout import Unplannable
from weft.update.packing import Packer
from weft.update.shares import Shares
from weft.update.source import Source
from weft.update.stream import Stream, giving
from weft.update.wire.control import Agreed, Enter, Fault, Go, Kind, Layouts, Phase, Proceed, Send, Settled, Sides
from weft.update.wire.errors import Gone, WireError
from weft.update.wire.messages import (
    Abort,
    Begin,
    Begun,
    Commit,
    Finish,
    GetStatus,
    Prepared,
    Settle,
    Status,
    Wants,
)

if TYPE_CHECKING:
    from weft.update.updater import Updated, Updater

FAREWELL_S = 3.0
"""How long a failed attempt waits for its worker to go back; it goes on by itself after that."""

EXPLAIN_S = 1.5
"""How long a rank whose broadcast broke off waits to be told why."""

_NOTHING = Wants((), ())


class Attempting:
    """Runs once. `voted`: this rank's worker is prepared and the coordinator knows; `decided`: it was committed.

    `timed_out`: a wait for the worker did.
    """

    def __init__(
        self,
        updater: Updater,
        kind: Kind,
        version: int,
        source: Source | None,
        changed: tuple[str, ...] | None,
        base: int | None,
    ) -> None:
        self.u, self.kind, self.version, self.source = updater, kind, version, source
        self.changed, self.base = changed, base
        self.options, self.member, self.beside = updater.options, updater.member, updater.beside
        self.epoch = 0
        self.member.begin()
        self.phase: Phase = "enter"
        self.voted = self.decided = self.began = self.loads = self.timed_out = False
        self.seconds: dict[str, float] = {}
        self.status: Status | None = None
        self.stream: Stream | None = None

    @property
    def bucket(self) -> int:
        """Where it is, -1 outside of loading."""
        return self.stream.where.bucket if self.stream is not None and self.phase == "load" else -1

    def run(self) -> Updated:
        """All phases."""
        from weft.update.updater import Updated

        layouts = self._meet()
        if layouts is None:
            assert self.status is not None
            assert self.status.version is not None
            return Updated(self.status.version, self.epoch, 0, 0, self.status.rollbacks, self.seconds, ())
        self.loads, self.version = self.u.rank in layouts.loads, layouts.version
        shares = self._plan(layouts)
        notes = (*shares.plan.notes, *([layouts.why] if layouts.why else []))
        kept = self._begin(layouts, shares) if self.loads else 0
        self._agree("begin")
        self._load(layouts, shares)
        if self.loads:
            with self._in("finish"):
                self.beside.ask(Finish(self.epoch), Prepared, self.options.deadline_s)
        self._vote()
        if self.loads:
            with self._in("open"):
                commit = Commit(self.epoch, layouts.version)
                self.status = self.beside.ask(commit, Status, self.options.deadline_s)
        self._agree("open")
        assert self.status is not None
        assert self.stream is not None
        moved = sum(bucket.size_bytes for bucket in shares.plan.buckets)
        return Updated(
            layouts.version,
            self.epoch,
            moved,
            kept,
            self.status.rollbacks,
            self.seconds,
            notes,
            shares,
            self.stream.times,
        )

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _meet(self) -> Layouts | None:
        """All ranks are here, all workers know what is committed, all layouts are known."""
        deadline_s = self.options.deadline_s
        has = self.source.has if self.source is not None else _NOTHING
        with self._in("enter"):
            wants, fault = _NOTHING, None
            try:
                self.beside.connect(self.u.rank, deadline_s)
                self.status = self.beside.ask(GetStatus(), Status, deadline_s)
                wants = self.beside.wants(deadline_s)
            except (UpdateError, RefusedError, WireError, OSError) as error:
                if self.u.post.bad is not None:
                    raise
                if isinstance(error, TimeoutError):
                    self.beside.drop()  # its answer, when it comes, is not to be taken for another
                fault = blame(error, 0, self.beside.name, "enter", -1).fault
            names = self.kind, self.version, self.base, self.changed
            layouts = layout_digest(has), layout_digest(wants)
            mine = self.beside.gives, self.u.broadcasts.made
            self.member.send(Enter(self.u.rank, *names, *layouts, self.status, *mine, fault), "enter")
            go = self.member.hear(Go, "enter")
        self.epoch = go.epoch
        with self._in("settle"):
            settle = Settle(go.epoch, go.committed, go.epochs, self.options.close, self.options.drain_s)
            self.status = self.beside.ask(settle, Status, self.options.phase_s)
            self.began = True
            self.member.send(Settled(self.epoch, self.u.rank, self.status), "settle")
            answer = self.member.hear(Send | Layouts | Proceed, "settle")  # type: ignore[arg-type]
        if isinstance(answer, Send):
            with self._in("layout"):
                asked = has if answer.has else None, wants if answer.wants else None
                self.member.send(Sides(self.epoch, self.u.rank, self.u.free_bytes, *asked), "layout")
                answer = self.member.hear(Layouts | Proceed, "layout")  # type: ignore[arg-type]
        return answer if isinstance(answer, Layouts) else None

    def _plan(self, layouts: Layouts) -> Shares:
        with self._in("plan"):
            try:
                shares = self.u.plans.of(layouts)
            except WireError as error:
                raise failure(self.epoch, self.member.name, "plan", str(error)) from error
            except Unplannable as error:
                raise failure(self.epoch, error.who, "plan", str(error)) from error
            self.u.buffers(shares)
            gives = self.u.rank in layouts.holds
            self.beside.take_plan(shares.of_worker(self.u.rank, gives=gives), self.options.deadline_s)
            device = self.u.device.index or 0 if self.u.device.type == "cuda" else -1
            self.beside.map([*self.u.ipc, *self.u.h2d], device, self.options.deadline_s)
            self._agree("plan", shares.digest)
        return shares

    def _begin(self, layouts: Layouts, shares: Shares) -> int:
        with self._in("begin"):
            options = self.options
            begin = Begin(
                self.epoch,
                layouts.version,
                shares.digest,
                options.rollback,
                options.close,
                options.drain_s,
                options.checked,
                layouts.only is not None,
            )
            begun = self.beside.ask(begin, Begun, options.phase_s)
        if begun.rollback_bytes:
            self.u.say(
                f"worker {self.u.rank} keeps {begun.rollback_bytes} bytes ({options.rollback}) until version "
                f"{layouts.version} is committed"
            )
        return begun.rollback_bytes

    def _load(self, layouts: Layouts, shares: Shares) -> None:
        with self._in("load"):
            group: Any = self.u.broadcasts.circle(layouts.circle, self.u.post).group
            assert self.u.broadcasts.waiter is not None
            compared = self._comparison(layouts, shares)
            self.stream = Stream(
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

            self.stream.run(fill, self.loads, progress)
            different = compared.refusal(layouts.version) if compared is not None else None
            if different is not None:
                raise failure(self.epoch, different[0], "load", different[1])

    def _comparison(self, layouts: Layouts, shares: Shares) -> Comparison | None:
        """With the weights of this rank; workers that give hold one committed version."""
        self.u.turn = self.u.turn + 1 if self.u.turn is not None else self.epoch
        source = self.source if not layouts.holds else None
        return comparison(shares.plan, source, self.u.rank, self.options.compare_sources, self.u.turn)

    def _vote(self) -> None:
        """From when the coordinator may know of this rank's vote, only it can tell what becomes of the worker."""
        self.voted = True
        self._agree("finish")
        self.decided = True

    def _agree(self, phase: Phase, value: str = "") -> None:
        self.phase = phase
        self.member.send(Agreed(self.epoch, self.u.rank, phase, value), phase)
        self.member.hear(Proceed, phase)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        """Around a phase: takes its time, and what its waits raise becomes the fault that all will hear of."""
        self.phase, began = phase, time.perf_counter()
        try:
            yield
        except (Gone, TimeoutError, RefusedError, WireError) as error:
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
        known = self._explain(error)
        in_doubt = self.voted and not self.decided and self.member.stop is None
        with suppress(Exception):  # a worker that is gone or hangs: it will learn in the next attempt
            if self.loads and (known.committed or self.decided):
                self.beside.ask(Commit(self.epoch, self.version), Status, FAREWELL_S, heed=False)
            elif self.began and not in_doubt:
                self.beside.send(Abort(self.epoch))
                if not self.timed_out:  # one that hangs was waited for already
                    self._farewell()
        if self.timed_out:
            self.beside.drop()  # it goes back when it finds itself alone; what it answers is not for another question
        if not in_doubt:
            return known
        text = (
            f"{known.text}; whether version {self.version} is committed is not known here, and the worker stays closed"
        )
        return failure(self.epoch, known.who, known.phase, f"{text} until the next attempt tells it", known.bucket)

    def _farewell(self) -> None:
        """Reads what the worker still has to say until it has gone back; lets go of one that does not."""
        until = time.monotonic() + FAREWELL_S
        try:
            while True:
                left = max(0.0, until - time.monotonic())
                answer = self.u.post.wait("worker", left, heed=False)
                if isinstance(answer, Status):
                    return
        except (Gone, TimeoutError):
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
                text, waited = f"{type(error).__name__}: {error}", isinstance(error, Broken)
                who = f"update rank {self.u.rank}"
                fault = Fault(self.epoch, who, self.phase, self.bucket, text, waited=waited)
            if self.epoch:
                self.member.report(fault)
            return post.wait_bad(EXPLAIN_S + HEAR_S) or UpdateError(fault, committed=self.decided)
        bad, cut_off = post.bad, self.member.lost and self.member.stop is None
        if cut_off or (bad.phase == "finish" and bad.bucket < 0 and self.phase == "load"):
            # Whoever ended did not say where it was; where it left this rank is the next best.
            here = failure(self.epoch, bad.who, self.phase, bad.text, self.bucket)
            return UpdateError(here.fault, committed=bad.committed or self.decided)
        return bad


def failure_at_source(error: UpdateError, source: int) -> UpdateError:
    """The same, naming where the bytes came from."""
    fault = error.fault
    text = f"{fault.text} (update rank {source})"
    return UpdateError(type(fault)(fault.epoch, fault.who, fault.phase, fault.bucket, text, fault.corrupt))
