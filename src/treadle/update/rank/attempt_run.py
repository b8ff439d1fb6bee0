"""One attempt on one update rank: phase by phase, each agreed on by all ranks before the next.

`protocol/rank.py` decides; `AttemptRun` does what it says and has no decisions of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from msgspec.structs import replace as replaced

from treadle.dist.streams import HOST_MEMORY
from treadle.update.coordinator.late_ranks import HEAR_S
from treadle.update.errors import UpdateError, failure
from treadle.update.protocol import rank
from treadle.update.protocol.catalogue import layout_digest
from treadle.update.protocol.control import Enter, Fault, FromCoordinator, Go, Layouts, Phase, Sample, Sides
from treadle.update.protocol.rank import Action, AskWorker, AttemptDone, RankState, TellCoordinator, Work
from treadle.update.protocol.update_messages import Begin, Describe, Finish, Grant, Refused, Status, WeightLayout
from treadle.update.rank.attempt_device import AttemptDevice
from treadle.update.rank.broadcast import BroadcastError
from treadle.update.rank.bucket_loop import BucketLoop
from treadle.update.rank.common_base import gather_missing, missing_base, why_all_move
from treadle.update.rank.comparing import TieComparison
from treadle.update.rank.context import RankContext, UpdateRequest
from treadle.update.rank.delta_packing import delta_room
from treadle.update.rank.load_phase import Loading
from treadle.update.rank.plans import UnplannableError
from treadle.update.rank.shares import Shares
from treadle.update.rank.worker_client import NO_LAYOUT, WorkerClient, WorkerRefusedError, blame
from treadle.update.updated import Updated
from treadle.wire.codec import sendable
from treadle.wire.errors import PeerGoneError, WireError

FAREWELL_S = 3.0
"""How long a failed attempt waits for its worker to go back; the worker goes on by itself after that."""

GONE_S = 0.05
"""How long a worker that was left out and has not been heard since is called."""

EXPLAIN_S = 1.5
"""How long a rank whose broadcast broke off waits to be told why."""


class AttemptRun:
    """One attempt. `state` is the protocol's; everything else is work at hand and results."""

    def __init__(self, context: RankContext, request: UpdateRequest) -> None:
        self.context, self.request = context, request
        self.options, self.coordinator = context.options, context.coordinator
        self.state = RankState(
            context.rank, context.options, version=request.asked.version, speaks=context.own_worker is not None
        )
        self.coordinator.begin(request.call)
        self._device = AttemptDevice(context.given, None, request.source)
        self.seconds: dict[str, float] = {}
        self.loop: BucketLoop | None = None
        self._has = self._wants = WeightLayout((), ())
        self._wants_digest = NO_LAYOUT
        self._entered = False
        """The coordinator may have this rank's entry."""
        self._status: Status | None = None
        self._shares: Shares | None = None
        self._ties: TieComparison | None = None
        self._rollback_bytes = 0
        self._finds_changed = self.options.changed == "elements" and request.asked.kind == "update"
        self._why_all = ""
        """Why all elements move where the options ask for changed ones."""
        self._moved_bytes = 0

    @property
    def worker(self) -> WorkerClient:
        """The connection to this rank's worker, for ranks that have one."""
        return self.context.worker

    @property
    def epoch(self) -> int:
        """The attempt's number, 0 before the coordinator has given it one."""
        return self.state.epoch

    @property
    def phase(self) -> Phase:
        """The phase this rank is in."""
        return self.state.phase

    @property
    def bucket(self) -> int:
        """The bucket this rank is at, -1 outside of loading."""
        return self.loop.where.bucket if self.loop is not None and self.phase == "load" else -1

    def run(self) -> Updated:
        """Return the whole attempt. Raises whatever ends it early; `fail` then reports what became of it.

        Between two steps each rank reports to the coordinator, which answers when all ranks have.
        """
        # 1. Enter: connect to the worker; send digests of the source's and the worker's layouts. The coordinator checks
        #    that all ranks ask for the same, and numbers the attempt.
        with self._in("enter"):
            action: Action
            entry = self._enter()
            self.state, action = rank.heard(self.state, self._tell(TellCoordinator(entry, (Go,))))
            go = self.state.go
            assert go is not None
            self.context.broadcasts.cast = go.cast
            self.context.use(self._device.of_type(go.device))
            if self.request.call and self.context.device.type != HOST_MEMORY.type:  # an agent's thread
                torch.accelerator.set_device_index(self.context.device.index)  # what names none would be on the first
            self.context.share.settle(go.grant.log, go.grant.epochs)
        while not isinstance(action, AttemptDone):
            with self._in(self.phase):
                match action:
                    # 2. Settle: tell this rank's worker which version is committed.
                    # 8. Open: once the decision is on disk, the worker resets its caches and serves the new version.
                    case AskWorker(Grant() as message):
                        self.state, action = rank.answered(self.state, self._grant(message))
                    # 3. Layout: where layouts changed, one rank of those that are alike tells them to the coordinator.
                    case Work("describe", asked):
                        self.state, action = rank.worked(self.state, self._describe(asked))
                    # 4. Plan: every rank makes the same plan; it hands its worker the worker's part, and the buffers.
                    case Work("plan"):
                        shares = self._plan()
                        named, delta = shares.name(self.context.rank), self._all_have_a_base()
                        self.state, action = rank.worked(self.state, shares.digest, plan=named, delta=delta)
                    # 5. Begin: the worker makes its rollback copy, then closes.
                    case AskWorker(Begin() as message):
                        self.state, action = rank.answered(self.state, self._begin(message))
                    # 6. Load: bucket by bucket: pack, broadcast, load into the engine, compare sources.
                    case Work("load"):
                        self.state, action = rank.worked(self.state, self._load())
                    # 7. Finish: the worker makes its model whole and stays closed. This rank's report is its vote.
                    case AskWorker(Finish() as message):
                        self.state, action = rank.answered(self.state, self._finish(message))
                    # -------- POINT OF NO RETURN: with all votes in, the coordinator writes the decision to its log.
                    case TellCoordinator():
                        self.state, action = rank.heard(self.state, self._tell(action))
        if self.request.asked.kind == "update":
            self.context.share.settle(self.state.log, (self.epoch,))
        return self._updated()

    def _updated(self) -> Updated:
        rollbacks = self._status.rollbacks if self._status is not None else 0
        if self._shares is None:
            assert self.state.go is not None
            assert self.state.go.grant.version is not None
            return Updated(self.state.go.grant.version, self.epoch, 0, 0, rollbacks, self.seconds, ())
        assert self.state.layouts is not None
        assert self.loop is not None
        shares, why = self._shares, self.state.layouts.why
        return Updated(
            self.state.version,
            self.epoch,
            self._moved_bytes,
            self._rollback_bytes,
            rollbacks,
            self.seconds,
            (*shares.plan.notes, *filter(None, (why, self._why_all))),
            shares,
            self.loop.times,
        )

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def _tell(self, tell: TellCoordinator) -> FromCoordinator:
        self.coordinator.send(tell.message, self.phase)
        self._entered = True
        return self.coordinator.hear(tell.answers, self.phase)

    def _enter(self) -> Enter:
        """Connect to the worker. A rank that cannot still enters, with the fault, so that all ranks hear of it."""
        fault, away = None, ""
        if self.request.source is not None:
            self._has = self.request.source.has
        try:
            if self.state.speaks:
                self._meet_worker()
        except (UpdateError, WorkerRefusedError, WireError, OSError) as error:
            if self.context.inbox.bad is not None:
                raise
            if isinstance(error, TimeoutError):
                self.worker.drop()  # a late answer would be taken for that to the next question
            known = blame(error, 0, self.worker.name, "enter", -1)
            if self.options.least is not None:
                away = self._leave_out(known.text)
            else:
                fault = known.fault
        layouts = layout_digest(self._has), self._wants_digest
        status = self._status if fault is None and not away else None
        asked, call, group = self.request.asked, self.request.call, self.context.broadcasts.made
        return Enter(self._number, asked, *layouts, status, group, fault, away, call, self._device.told)

    def _leave_out(self, why: str) -> str:
        """Go on without the worker, whose lease then ends; why."""
        self.worker.drop()
        self.context.was_away = True
        self.state = replace(self.state, speaks=False)
        self._status, self._wants, self._wants_digest = None, WeightLayout((), ()), NO_LAYOUT
        return why

    def _meet_worker(self) -> None:
        deadline_s = self.options.meet_s
        if time.monotonic() < self.context.sick_until_s:
            raise WorkerRefusedError(Refused("failed", f"an attempt failed by it: {self.context.why_sick}"))
        keeper = self.context.keeper
        is_gone = self.context.was_away and keeper is not None and not keeper.hears
        self.worker.connect(self.context.rank, GONE_S if is_gone else deadline_s)
        self.context.was_away = False
        self._status = self.worker.settled_in(deadline_s)
        if not self._status.holds_slot and self.options.least is not None:
            text = f"process {self._status.before} was this worker before, and has neither ended nor closed"
            raise WorkerRefusedError(Refused("taken", text))
        self._wants = self.worker.layout(self._status.layout, deadline_s)
        self._wants_digest = self.worker.layout_digest
        self._device = AttemptDevice(self.context.given, self._status, self.request.source)

    @property
    def _number(self) -> int | None:
        """The number of this rank's worker."""
        return self.context.own_worker.worker if self.context.own_worker is not None else None

    def _grant(self, message: Grant) -> Status:
        self._status = self.worker.ask(message, Status, self.options.phase_s)
        keeper = self.context.keeper
        holds = message.version is not None and self._status.version == message.version
        if keeper is not None and holds and self._status.state == "lapsed":
            keeper.renew(self.options.deadline_s / 2)  # the keeper goes on after that
            self._status = self.worker.ask(Describe(), Status, self.options.phase_s)
        return self._status

    def _describe(self, asked: Describe) -> Sides:
        has, wants = self._has if asked.has else None, self._wants if asked.wants else None
        context = self.context
        if context.is_measured:  # on all ranks or none: they have the same options and type of device
            context.broadcasts.group_of(asked.group, context.inbox)
        return Sides(context.free_bytes, has, wants)

    def _plan(self) -> Shares:
        """Make the plan and hand the worker its part. The plan's digest must be the same on all ranks."""
        context, layouts, deadline_s = self.context, self._layouts, self.options.deadline_s
        try:
            shares = context.plans.of(layouts, self.options.transfer, delta=self._finds_changed)
        except WireError as error:
            raise failure(self.epoch, self.coordinator.name, "plan", str(error)) from error
        except UnplannableError as error:
            raise failure(self.epoch, error.who, "plan", str(error)) from error
        self._ties = self._compare_ties(shares)
        context.buffers.fit(shares, delta_room(shares.plan) if self._finds_changed else 0)
        if self.state.speaks:
            exports = context.rank in layouts.holds
            name = shares.name(context.rank, exports=exports)
            self.worker.take_plan(name, lambda: shares.of_worker(context.rank, exports=exports), deadline_s)
            self.worker.map(context.buffers.all, context.device.type, deadline_s)
        self._shares = shares
        return shares

    def _all_have_a_base(self) -> bool:
        """Return whether changed elements move: all ranks and workers have the version that these are added to."""
        assert self._shares is not None
        if not self._finds_changed or not self._shares.plan.buckets:
            return False
        own = missing_base(self.context, self._shares, self._status, self._ties)
        self._why_all = why_all_move(gather_missing(self.context, self._layouts.group, own))
        return not self._why_all

    def _compare_ties(self, shares: Shares) -> TieComparison | None:
        """Compare names that engines have tied, before anything closes, as far as this rank has both."""
        tied, source = self.context.plans.tied(self._layouts), self.request.source
        if not tied or source is None:
            return None
        ties = TieComparison(shares.plan, source, tied)
        ties.compare_own()
        self._refuse_ties(ties, "plan")
        return ties

    def _refuse_ties(self, ties: TieComparison, phase: Phase) -> None:
        different = ties.refusal(self.state.version)
        if different is not None:
            raise failure(self.epoch, f"update rank {self.context.rank}", phase, different)

    def _begin(self, message: Begin) -> Status:
        begun = self.worker.ask(message, Status, self.options.phase_s)
        self._rollback_bytes = begun.rollback_bytes
        if begun.rollback_bytes:
            self.context.say(
                f"worker {self.worker.worker} keeps {begun.rollback_bytes} bytes ({self.options.rollback_place}) until "
                f"version {message.version} is committed"
            )
        return begun

    def _load(self) -> tuple[Sample, ...]:
        assert self._shares is not None
        noted = self._finds_changed and self.request.source is not None
        if noted:
            self.context.share.begin(self.state.log, self.epoch, self._shares.digest)
        loading = Loading(
            self.context,
            self._shares,
            self._layouts,
            self.request.source,
            self.epoch,
            self._ties,
            delta=self.state.delta,
            noted=noted,
        )
        self.loop = loading.loop
        samples = loading.run(loads=self.state.loads)
        self._moved_bytes = loading.moved_bytes
        if self._ties is not None:
            self._refuse_ties(self._ties, "load")
        return samples

    def _finish(self, message: Finish) -> Status:
        staged = self.worker.ask(message, Status, self.options.deadline_s)
        self._rollback_bytes = max(self._rollback_bytes, staged.rollback_bytes)
        return staged

    @property
    def _layouts(self) -> Layouts:
        assert self.state.layouts is not None
        return self.state.layouts

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        """Time a phase, and turn what its waits raise into the fault that all ranks will hear of."""
        began = time.perf_counter()
        try:
            yield
        except (PeerGoneError, TimeoutError, WorkerRefusedError, WireError) as error:
            if isinstance(error, TimeoutError):
                self.state = rank.timed_out(self.state)
            raise self._blame(error) from error
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def _blame(self, error: Exception) -> UpdateError:
        who = self.worker.name if self.state.speaks else f"update rank {self.context.rank}"
        made = blame(error, self.epoch, who, self.phase, self.bucket)
        if not made.corrupt or self.loop is None:
            return made
        source = self.loop.shares.plan.buckets[self.bucket].source
        return UpdateError(replaced(made.fault, text=f"{made.text} (update rank {source})"))

    # ---- an attempt that ends early ----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> UpdateError:
        """End the attempt early: find out why, tell the worker if the outcome is known, and return what to raise.

        After the vote only the coordinator knows the outcome; without its word the worker stays staged and closed.
        """
        try:
            known = self.explain(error)
            self._note_sick(known)
            if known.corrupt:  # a worker may hold something else than this rank's copy
                self.context.share.drop()
        finally:  # whatever breaks in: the worker must not stay closed for an attempt that is over
            self._end()
            self._bid(rank.farewell(self.state))
        if not self.state.in_doubt:
            return known
        closed = ", and the worker stays closed until the next attempt" if self.state.loads else ""
        text = f"{known.text}; whether version {self.state.version} is committed is not known here{closed}"
        return failure(self.epoch, known.who, known.phase, text, known.bucket)

    def _note_sick(self, known: UpdateError) -> None:
        """Leave the worker out for a lease where the attempt failed by it, and the policy allows that."""
        is_own = self._number is not None and known.who.partition(" (")[0] == f"worker {self._number}"
        if is_own and self.options.least is not None:
            self.context.sick_until_s = time.monotonic() + (self.options.lease_s or 0.0)
            self.context.why_sick = known.text

    def explain(self, error: BaseException) -> UpdateError:
        """The error that all ranks raise: the coordinator's if there is one, else this rank's own, reported to it."""
        inbox = self.context.inbox
        broke_off = isinstance(error, RuntimeError) and not isinstance(error, UpdateError)
        if inbox.bad is None and broke_off:
            inbox.wait_bad(EXPLAIN_S)  # a broadcast breaks off before the news of why has come
        bad = inbox.bad
        if bad is None:
            fault = self._own_fault(error)
            known = replaced(fault, call=self.request.call)
            self.coordinator.report(known if self._entered else self._faulty_entry(fault))
            return inbox.wait_bad(EXPLAIN_S + HEAR_S) or UpdateError(replaced(fault, committed=self.state.decided))
        self._end()
        if not rank.is_vague(self.state, bad.fault):
            return bad
        here = failure(self.epoch, bad.who, self.phase, bad.text, self.bucket)
        return UpdateError(replaced(here.fault, committed=bad.committed or self.state.decided))

    def _faulty_entry(self, fault: Fault) -> Enter:
        """The entry of a rank that failed before it could enter: the others hear of it when they have entered."""
        asked, call, nobody = self.request.asked, self.request.call, NO_LAYOUT
        return Enter(self._number, asked, nobody, nobody, None, 0, fault, call=call)

    def _own_fault(self, error: BaseException) -> Fault:
        if isinstance(error, UpdateError):
            return error.fault
        text, waited = sendable(f"{type(error).__name__}: {error}"), isinstance(error, BroadcastError)
        return Fault(self.epoch, f"update rank {self.context.rank}", self.phase, self.bucket, text, waited=waited)

    def _end(self) -> None:
        self.state = rank.ended(self.state, self.coordinator.told, lost=self.coordinator.lost)

    def _bid(self, message: Grant | None) -> None:
        if not self.state.speaks:
            return
        waits = not self.state.worker_late or self.state.is_committed
        try:
            with suppress(Exception):  # a worker that is gone or hangs learns the outcome in the next attempt
                if message is not None:
                    self.worker.send(message)
                    self.worker.await_answers(FAREWELL_S if waits else 0.0)
        finally:  # whatever breaks in: an answer to this attempt must not be taken for one to the next
            if self.worker.is_answering:
                self.worker.drop()  # the worker goes back when its connection ends
