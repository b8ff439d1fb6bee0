"""The world of the model checker of weight updates: logs, ranks, workers, and the sockets between them.

Decisions are those of `treadle.update.protocol`; here is what carries them out in place of sockets, disks and engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, NamedTuple, TypeAlias, TypeVar

from treadle.update.protocol import coordinator_decisions, rank, worker_decisions
from treadle.update.protocol.attempt import Attempt
from treadle.update.protocol.control import Asked, Call, Enter, Fault, Kind, Sides
from treadle.update.protocol.coordinator_decisions import CoordinatorState, Decide, Open, Tell
from treadle.update.protocol.leases import MARGIN, Lease, extends, is_past, leased, leases_of
from treadle.update.protocol.rank import AskWorker, AttemptDone, RankState, TellCoordinator
from treadle.update.protocol.record import Member, Record, committed, led
from treadle.update.protocol.update_messages import Begin, Finish, Grant, Move, Status, WeightLayout
from treadle.update.protocol.worker_decisions import Content, WorkerState
from treadle.update.update_options import UpdateOptions

OPTIONS = UpdateOptions()
LEASED = UpdateOptions(lease_s=1.0)
LEASE_NS = 100
LED = Fault(0, "the coordinator", "finish", -1, "another one has the log")
LAYOUT = "has", "wants"
RULES = frozenset({"log ids", "members", "slots"})

Weights: TypeAlias = tuple[int, int, int] | str | None
"""What an engine holds in truth: (log, version, attempt), "torn", or nothing of any version."""

Link: TypeAlias = tuple[int, int]
"""A rank's connection: (run, rank)."""


@dataclass(frozen=True)
class Sizes:
    """Bounds of a world. `crashes` counts faults: processes that end, and ranks that give up waiting.

    `sources` of the ranks, the first ones, have no worker; the others speak for workers 0, 1, ...

    `restores`: the log is put back as it was at first. `children`: workers that end while a child holds their sockets.

    `leases`: they end, and `least` replicas are enough. `ticks` is how often time passes, `reports` how often a worker
    is reported beside attempts. `cuts`: a rank does not reach its worker, which lives. `doubles`: other ranks are
    started while the first live, as the log's lock is lost. `agents` of the ranks, the last ones, are called by the
    others, and join again where they were lost; they too report, with leases or without.
    """

    ranks: int = 2
    workers: int = 2
    updates: int = 2
    crashes: int = 2
    replacements: int = 0
    mistakes: int = 0
    recoveries: int = 1
    restores: int = 0
    children: int = 0
    sources: int = 0
    leases: bool = False
    least: int | None = None
    ticks: int = 0
    reports: int = 0
    cuts: int = 0
    doubles: int = 0
    agents: int = 0
    rules: frozenset[str] = RULES

    @property
    def lease_ns(self) -> int | None:
        return LEASE_NS if self.leases else None


class Process(NamedTuple):
    """An inference worker: its own state, its engine's true weights, and the messages its update rank has sent."""

    slot: int
    incarnation: str
    state: WorkerState
    weights: Weights = None
    before: Weights = None
    open: bool = False
    at_path: bool = True
    master: Link | None = None
    queue: tuple[tuple[Link, Any], ...] = ()
    lease: Lease = Lease()
    until: int | None = None
    """Until when its gate is open, by its own clock."""

    @property
    def name(self) -> str:
        return f"worker {self.slot} ({self.incarnation})"


class Rank(NamedTuple):
    """An update rank's process. `waits` for: an attempt, to enter it, the coordinator, the worker; or done.

    `found` is who was at its worker's path when it entered. `called`: the last call to an agent, and `answered` the
    number of the last one that it has entered by.
    """

    state: RankState | None = None
    waits: str = "idle"
    link: str = ""
    found: str = ""
    called: Call | None = None
    answered: int = 0

    @property
    def is_called(self) -> bool:
        return self.called is not None and self.called.number > self.answered

    def rested(self, link: str) -> Rank:
        """The same between attempts."""
        return Rank(None, "idle", link, called=self.called, answered=self.answered)


class Run(NamedTuple):
    """One start of all update ranks, with a log; the coordinator is in rank 0's process."""

    log: int
    world: int
    core: CoordinatorState | None
    ranks: tuple[Rank | None, ...]
    down: tuple[tuple[Any, ...], ...]
    asked: tuple[Kind, int] = ("recover", 0)
    record: Record | None = None
    """What the coordinator takes for the log's content, where leases end."""

    @property
    def is_over(self) -> bool:
        return self.core is None or bool(self.core.lost)


class World(NamedTuple):
    """The whole state. `logs` are on disk, `on[log]` the slots it was committed on, `left` the bounds not used up.

    What was decided stays so when a log is put back: `decided[log]` is the last version, `true` are all weights that
    were decided to be one.
    """

    logs: tuple[Record, ...]
    counters: tuple[int, ...]
    on: tuple[frozenset[int], ...]
    processes: tuple[Process, ...]
    runs: tuple[Run, ...]
    version: int
    left: tuple[int, ...]
    members: tuple[tuple[Member, ...], ...]
    decided: tuple[int, ...] = (1, 1)
    true: frozenset[tuple[int, int, int]] = frozenset({(0, 1, 1), (1, 1, 1)})
    wrong: str = ""
    now: int = 0
    reports: tuple[tuple[Link, Status], ...] = ()
    grants: tuple[tuple[str, Grant], ...] = ()
    """On their way: a grant may be late, or lost."""

    def key(self) -> Any:
        """A key that worlds with the same future share."""
        runs = tuple((r.log, r.world, _core_key(r.core), r.ranks, r.down, r.asked, r.record) for r in self.runs)
        rest = self.counters, self.on, self.version, self.left, self.members, self.decided, self.true
        return self.logs, self.processes, runs, rest, self.now, self.reports, self.grants


UPDATES, CRASHES, REPLACEMENTS, MISTAKES, RECOVERIES, RESTORES, CHILDREN, TICKS, REPORTS, CUTS, DOUBLES = range(11)


def _core_key(core: CoordinatorState | None) -> Any:
    if core is None:
        return None
    a = core.attempt
    said = tuple(tuple(sorted(d.items())) for d in (a.entered, a.settled, a.said))
    out = tuple(sorted(core.leases.out.items(), key=str)) if core.leases.lease_ns is not None else ()
    calls = (a.call, tuple(sorted(a.called)), tuple(sorted(core.agents)), a.own, core.again_ns) if a.call else ()
    return a.epoch, a.phase, a.committed, said, tuple(sorted(core.lost)), out, core.last if out else 0, calls


def start(sizes: Sizes) -> World:
    """A set that serves version 1, its ranks, and another log with a version 1 of other weights, on other workers."""
    rules = sizes.rules
    ids = ("A", "B") if "log ids" in rules else ("", "")
    processes = tuple(
        Process(
            slot,
            f"w{slot}",
            WorkerState(slot, "serving", Content(ids[0], 1, 1), ids[0], epoch=1, attempt=ids[0]),
            weights=(0, 1, 1),
            open=True,
            lease=Lease(Content(ids[0], 1, 1), sizes.lease_ns, ids[0]),
            until=sizes.lease_ns,
        )
        for slot in range(sizes.workers)
    )
    logs = first_logs(sizes)
    on = frozenset(range(sizes.workers)), frozenset[int]()
    troubles = sizes.crashes, sizes.replacements, sizes.mistakes
    beside = sizes.ticks, sizes.reports, sizes.cuts, sizes.doubles
    left = sizes.updates, *troubles, sizes.recoveries, sizes.restores, sizes.children, *beside
    world = World(logs, (1, 1), on, processes, (), 1, left, ((), ()))
    return started(world, 0, sizes.ranks, sizes)


def first_logs(sizes: Sizes) -> tuple[Record, Record]:
    """The logs as they are at first."""
    rules = sizes.rules
    ids = ("A", "B") if "log ids" in rules else ("", "")
    slots = [f"s{slot}" if "slots" in rules else "" for slot in range(sizes.workers)]
    members = tuple(Member(slot, name, f"w{slot}", 1, "") for slot, name in enumerate(slots))
    kept = members if "members" in rules else ()
    return Record(1, (1,), ids[0], kept, lease_ns=sizes.lease_ns), Record(1, (1,), ids[1], lease_ns=sizes.lease_ns)


def restored(world: World, sizes: Sizes) -> World:
    """The first log is put back as it was at first; whoever asks for versions goes by it."""
    first = first_logs(sizes)[0]
    logs, counters = with_item(world.logs, 0, first), with_item(world.counters, 0, 1)
    return replace(world, logs=logs, counters=counters, version=1)


def started(world: World, log: int, num: int, sizes: Sizes) -> World:
    for number, run in enumerate(world.runs):
        for r, me in enumerate(run.ranks):
            if run.is_over and me is not None and me.waits in ("idle", "enter", "done"):
                world = kill(world, (number, r), keep=True)
    known, callers = dict.fromkeys(range(num), LAYOUT), num - sizes.agents
    agents = frozenset(range(callers, num))
    if not sizes.leases:
        core = CoordinatorState(callers, Attempt(callers), known=known, agents=agents)
        return replace(world, runs=(*world.runs, Run(log, num, core, (Rank(),) * num, ((),) * num)))
    leases = leases_of(world.logs[log], LEASE_NS, sizes.least, world.now)
    core = CoordinatorState(
        callers, Attempt(callers), known=known, leases=leases, last=world.counters[log], agents=agents
    )
    record = led(world.logs[log], LEASE_NS)
    run = Run(log, num, core, (Rank(),) * num, ((),) * num, record=record)
    return replace(world, runs=(*world.runs, run), logs=with_item(world.logs, log, record))


# ---- changing a part -------------------------------------------------------------------------------------------------


T = TypeVar("T", bound="Process | Rank | Run | World")


def replace(of: T, **changes: Any) -> T:
    """The same with some fields changed."""
    return of._replace(**changes)  # type: ignore[return-value]


def with_item(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def spend(world: World, what: int) -> World:
    return replace(world, left=with_item(world.left, what, world.left[what] - 1))


def with_process(world: World, process: Process) -> World:
    return replace(
        world,
        processes=tuple(process if p.incarnation == process.incarnation else p for p in world.processes),
    )


def with_run(world: World, number: int, **changes: Any) -> World:
    return replace(world, runs=with_item(world.runs, number, replace(world.runs[number], **changes)))


def with_rank(world: World, link: Link, to: Rank | None) -> World:
    number, r = link
    return with_run(world, number, ranks=with_item(world.runs[number].ranks, r, to))


def find(world: World, incarnation: str) -> Process | None:
    return next((p for p in world.processes if p.incarnation == incarnation), None)


def send(world: World, link: Link, message: Any) -> World:
    """Send to the rank's worker, if it is there and has not gone over to another rank."""
    me = world.runs[link[0]].ranks[link[1]]
    process = find(world, me.link) if me is not None else None
    if process is None or process.master != link:
        return world
    return with_process(world, replace(process, queue=(*process.queue, (link, message))))


# ---- the coordinator -------------------------------------------------------------------------------------------------


class Crashed(Exception):  # noqa: N818 - a world in which the coordinator ended at a decision
    """Carries that world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world


def _hear(world: World, link: Link, message: Any, crash: str = "") -> World:
    """The coordinator hears a rank; `crash` says if it ends before or after it writes a decision. Raises Crashed."""
    number, r = link
    run = world.runs[number]
    if run.core is None:
        return world
    step = coordinator_decisions.hear(run.core, r, message, record_of(world, number), world.now)
    return carry_out(world, number, step, crash)


def record_of(world: World, number: int) -> Record:
    """The log's content as a run's coordinator knows it."""
    run = world.runs[number]
    return run.record if run.record is not None else world.logs[run.log]


def is_led_by_another(world: World, number: int) -> bool:
    """Whether a coordinator of a later term has written the log: then this one writes nothing."""
    run = world.runs[number]
    return run.record is not None and world.logs[run.log].term > run.record.term


def carry_out(world: World, number: int, step: coordinator_decisions.Step, crash: str) -> World:
    core, actions = step
    world = with_run(world, number, core=core)
    for action in actions:
        run = world.runs[number]
        assert run.core is not None
        log = run.log
        if isinstance(action, Tell):
            message = _bare(action.message)
            down = tuple((*d, message) if r in action.ranks and run.ranks[r] else d for r, d in enumerate(run.down))
            world = with_run(world, number, down=down)
        elif isinstance(action, Open):
            epoch = max(world.counters[log], action.least) + 1
            world = replace(
                world,
                counters=with_item(world.counters, log, epoch),
                members=with_item(world.members, log, action.members if world.logs[log].members else ()),
            )
            if run.record is None or action.record != run.record:
                if is_led_by_another(world, number):
                    return carry_out(world, number, coordinator_decisions.stop(run.core, LED), crash)
                world = replace(world, logs=with_item(world.logs, log, action.record))
            if run.record is not None:
                world = with_run(world, number, record=action.record)
            step = coordinator_decisions.opened(run.core, epoch, record_of(world, number))
            world = carry_out(world, number, step, crash)
        else:
            assert isinstance(action, Decide)
            if crash == "before":
                raise Crashed(world)
            if is_led_by_another(world, number):
                return carry_out(world, number, coordinator_decisions.stop(run.core, LED), crash)
            version, epoch = action.version, run.core.attempt.epoch
            record = committed(record_of(world, number), version, epoch, world.members[log], core.leases.lease_ns)
            if run.core.attempt.asked.kind == "recover" or version > world.decided[log]:
                world = replace(world, true=world.true | {(log, version, epoch)})
            world = replace(
                world,
                decided=with_item(world.decided, log, max(world.decided[log], version)),
                logs=with_item(world.logs, log, record),
                on=with_item(world.on, log, frozenset(run.core.attempt.workers) | world.on[log]),
            )
            if run.record is not None:
                world = with_run(world, number, record=record)
            if crash == "after":
                raise Crashed(world)
            world = carry_out(world, number, coordinator_decisions.decided(run.core), crash)
    return world


def _bare(message: Any) -> Any:
    """Drop error texts, which would make several states of one."""
    if not isinstance(message, Fault):
        return message
    return Fault(message.epoch, "", "enter", -1, "", committed=message.committed)


# ---- update ranks ----------------------------------------------------------------------------------------------------


def enter(world: World, link: Link, sizes: Sizes, *, cut: bool = False) -> World:
    """A rank meets the worker that is at its path, unless it is connected, and enters; if it is `cut` off, without."""
    number, r = link
    run = world.runs[number]
    me = run.ranks[r]
    assert me is not None
    asked, call = Asked(*run.asked), 0
    if me.called is not None:
        asked, call = me.called.asked, me.called.number
    calls = me.called, call
    if r < sizes.sources:
        state = RankState(r, OPTIONS, version=asked.version, speaks=False)
        world = with_run(world, number, down=with_item(run.down, r, ()))
        world = with_rank(world, link, Rank(state, "coordinator"))
        return _hear(world, link, Enter(None, asked, *LAYOUT, None, 1))
    worker = r - sizes.sources
    there = next((p for p in world.processes if p.slot == worker and p.at_path), None)
    found = there.incarnation if there is not None else ""
    kept = find(world, me.link)
    if kept is not None and kept.master == link and ("slots" not in sizes.rules or there is None):
        there = kept  # it looks at the path only since slots were
    state = RankState(r, LEASED if sizes.leases else OPTIONS, version=asked.version)
    world = with_run(world, number, down=with_item(run.down, r, ()))
    if cut or (there is None and sizes.least is not None):
        world = with_rank(
            send(world, link, "end"), link, Rank(changed(state, speaks=False), "coordinator", "", "", *calls)
        )
        away = Enter(worker, asked, *LAYOUT, None, 1, away="cut", call=call)
        return _hear(world, link, away)
    if there is None:
        world = with_rank(world, link, Rank(state, "coordinator", "", "", *calls))
        fault = Fault(0, "worker", "enter", -1, "")
        return _hear(world, link, Enter(worker, asked, *LAYOUT, None, 1, fault, call=call))
    if there.master != link:
        world = taken(world, there)
        there = find(world, there.incarnation)
        assert there is not None
    there = replace(there, master=link, queue=())  # of an earlier connection nothing is read any more
    world = with_rank(with_process(world, there), link, Rank(state, "coordinator", there.incarnation, found, *calls))
    entered = Enter(worker, asked, *LAYOUT, status_of(there, sizes, world), 1, call=call)
    return _hear(world, link, entered)


def own_time(now: int) -> int:
    """The time by a worker's clock, which is as slow as the margin allows."""
    return now * MARGIN // (MARGIN + 1)


def serves(p: Process, now: int) -> bool:
    """Whether its gate lets requests in, and answers out."""
    return p.open and not is_past(p.until, own_time(now))


def status_of(p: Process, sizes: Sizes, world: World, *, stamped: bool = False) -> Status:
    s, held = p.state, p.state.held
    lapsed = s.state == "serving" and not serves(p, world.now)
    slots = "slots" in sizes.rules
    return Status(
        p.slot,
        1,
        "lapsed" if lapsed else s.state,
        s.version,
        s.epoch,
        0,
        log=s.bound,
        origin=held.log if held is not None else "",
        content=held.epoch if held is not None else 0,
        holds_slot=s.holds_slot,
        incarnation=p.incarnation if slots else "",
        slot=f"s{p.slot}" if slots else "",
        staged=s.epoch if s.state == "staged" else 0,
        stamp_ns=own_time(world.now) if stamped else 0,
        term=p.lease.term if p.lease.log == s.bound else 0,
        can_export=True,
    )


def taken(world: World, process: Process) -> World:
    """A worker's connection ends for the rank that has it."""
    link = process.master
    if link is None:
        return world
    world = with_process(world, replace(process, master=None, queue=()))
    me = world.runs[link[0]].ranks[link[1]]
    if me is None or me.link != process.incarnation:
        return world
    world = with_rank(world, link, replace(me, link=""))
    return fail(world, link) if me.waits in ("worker", "coordinator") and me.state is not None else world


def fail(world: World, link: Link, *, heard: bool = True) -> World:
    """A rank ends its attempt for a reason of its own; where it is `heard`, the coordinator says what came of it."""
    number, r = link
    me = world.runs[number].ranks[r]
    assert me is not None
    assert me.state is not None
    if not heard:
        return leave(world, link, None)
    world = _hear(world, link, Fault(me.state.epoch, f"rank {r}", me.state.phase, -1, ""))
    down = world.runs[number].down[r]
    told = next((m for m in down if isinstance(m, Fault) and m.epoch == me.state.epoch), None)
    return leave(world, link, told)


def leave(world: World, link: Link, told: Fault | None) -> World:
    """A rank leaves an attempt that ended early: it says farewell to its worker."""
    number, r = link
    me = world.runs[number].ranks[r]
    assert me is not None
    assert me.state is not None
    last = rank.farewell(rank.ended(me.state, told, lost=world.runs[number].core is None))
    if last is not None:
        world = send(world, link, last)
    if world.runs[number].is_over:  # nothing is left for it to do
        return kill(world, link, keep=True)
    if me.state.worker_late:
        world = send(world, link, "end")
    return with_rank(world, link, me.rested("" if me.state.worker_late else me.link))


def kill(world: World, link: Link, *, keep: bool) -> World:
    """A rank's process ends; what it sent before is still read."""
    number, r = link
    run = world.runs[number]
    world = send(world, link, "end")
    world = with_run(with_rank(world, link, None), number, down=with_item(run.down, r, ()))
    if r == 0:
        run = world.runs[number]
        down = tuple((*(d if keep else ()), "end") if run.ranks[q] is not None else () for q, d in enumerate(run.down))
        return with_run(world, number, core=None, down=down)
    core = world.runs[number].core
    if core is None:
        return world
    step = coordinator_decisions.lost(core, r, f"rank {r}", "killed", record_of(world, number), world.now)
    return carry_out(world, number, step, "")


def do(world: World, link: Link, step: rank.Step, sizes: Sizes, crash: str = "") -> World:
    """Run a rank's actions up to where it waits."""
    state, action = step
    while True:
        me = world.runs[link[0]].ranks[link[1]]
        assert me is not None
        if isinstance(action, AttemptDone):
            world = with_rank(world, link, replace(me, state=state, waits="done"))
            return _done_alone(world, link) if sizes.agents else _done(world, link[0])
        if isinstance(action, TellCoordinator):
            world = with_rank(world, link, replace(me, state=state, waits="coordinator"))
            return _hear(world, link, action.message, crash)
        if isinstance(action, AskWorker):
            world = with_rank(world, link, replace(me, state=state, waits="worker"))
            return _asked(world, link, action.message)
        if action.what == "load" and state.loads:
            world = with_rank(world, link, replace(me, state=state, waits="worker"))
            return _asked(world, link, Move(state.epoch, state.plan, 0, 0, out=False, checked=True))
        made = {"plan": "p", "describe": Sides(0, WeightLayout((), ()), WeightLayout((), ()))}
        state, action = rank.worked(state, made.get(action.what))


def _asked(world: World, link: Link, message: Any) -> World:
    me = world.runs[link[0]].ranks[link[1]]
    assert me is not None
    return send(world, link, message) if me.link else fail(world, link)


def _done(world: World, number: int) -> World:
    """Once all ranks have succeeded, check that every worker they found serves the committed version."""
    run = world.runs[number]
    if not all(r is not None and r.waits == "done" for r in run.ranks):
        return world
    wrong = ""
    alone = sum(not other.is_over and other.log == run.log for other in world.runs) == 1
    for me in run.ranks if alone else ():
        wrong = _told_wrong(world, run, me) or wrong
    idle = tuple(r.rested(r.link) for r in run.ranks if r is not None)
    return replace(with_run(world, number, ranks=idle), wrong=wrong)


def _done_alone(world: World, link: Link) -> World:
    """The same of one rank, where others come and go; once another attempt has begun, its worker may have closed."""
    run = world.runs[link[0]]
    me = run.ranks[link[1]]
    assert me is not None
    begun = run.core is None or not run.core.attempt.is_idle
    wrong = _told_wrong(world, run, me) if not begun else ""
    return replace(with_rank(world, link, me.rested(me.link)), wrong=wrong)


def _told_wrong(world: World, run: Run, me: Rank | None) -> str:
    there = find(world, me.found) if me is not None else None
    if there is None or not there.at_path:
        return ""  # it has ended since, or another has come
    serves = there.weights if there.open else None
    if isinstance(serves, tuple) and serves[:2] == (run.log, world.logs[run.log].version):
        return ""
    return f"told right: {run.asked[0]} said that all is well, {there.name} holds {named_weights(serves)}"


def named_weights(weights: Weights) -> str:
    if isinstance(weights, tuple):
        return f"version {weights[1]} of log {'AB'[weights[0]]} by attempt {weights[2]}"
    return weights if weights is not None else "nothing that it serves"


# ---- workers ---------------------------------------------------------------------------------------------------------


def handle(world: World, process: Process, sizes: Sizes, crash: str = "") -> World:
    """A worker takes the next message of its rank, and the rank its answer."""
    (link, message), *rest = process.queue
    process = replace(process, queue=tuple(rest))
    try:
        moves, state = _decide(process, message)
        process = _with_lease(process, state, message)
    except worker_decisions.MessageRefusedError:
        return _answer(with_process(world, process), link, message, None, sizes, crash)
    for move in moves:
        process = engine(process, move.act, link, message, world)
    process = replace(process, state=state)
    if message == "end":
        process = replace(process, master=None)
    return _answer(with_process(world, process), link, message, process, sizes, crash)


def _with_lease(process: Process, state: WorkerState, message: Any) -> Process:
    """The lease that comes with a grant. Raises MessageRefusedError for that of an old coordinator."""
    if not isinstance(message, Grant):
        return process
    held = state.held if state.state == "serving" else None
    lease = leased(process.lease, held, message)
    return replace(process, lease=lease, until=lease.until(held) if held is not None else process.until)


def hear_report(world: World, number: int) -> World:
    """The coordinator hears a report; what it grants is on its way then."""
    (link, status), rest = world.reports[number], world.reports[:number] + world.reports[number + 1 :]
    world = replace(world, reports=rest)
    run = world.runs[link[0]]
    if run.core is None or run.ranks[link[1]] is None or is_led_by_another(world, link[0]):
        return world
    core, actions = coordinator_decisions.hear(run.core, link[1], status, record_of(world, link[0]), world.now)
    world = with_run(world, link[0], core=core)
    tells = [action for action in actions if isinstance(action, Tell)]
    told = tuple((status.incarnation, tell.message) for tell in tells if isinstance(tell.message, Grant))
    world = replace(world, grants=(*world.grants, *told))
    calls = [tell for tell in tells if isinstance(tell.message, Call)]
    return carry_out(world, link[0], (core, list(calls)), "")


def take_grant(world: World, number: int) -> World:
    """A worker takes a grant beside its attempts."""
    (incarnation, grant), rest = world.grants[number], world.grants[:number] + world.grants[number + 1 :]
    world, process = replace(world, grants=rest), find(world, incarnation)
    if process is None:
        return world
    try:
        if extends(process.state, grant):
            return with_process(world, _with_lease(process, process.state, grant))
        moves, state = _decide(process, grant)
        process = _with_lease(process, state, grant)
    except worker_decisions.MessageRefusedError:
        return world
    for move in moves:
        process = engine(process, move.act, None, grant, world)
    return with_process(world, replace(process, state=state))


def _decide(process: Process, message: Any) -> worker_decisions.Moves:
    state, can_restore = process.state, process.before is not None
    if isinstance(message, Grant):
        return worker_decisions.grant(state, message, can_restore=can_restore)
    if isinstance(message, Begin):
        return worker_decisions.begin(state, message)
    if isinstance(message, Move):
        return worker_decisions.load(state, message.epoch)
    if isinstance(message, Finish):
        return worker_decisions.finish(state, message)
    return worker_decisions.release(state, can_restore=can_restore)


def engine(p: Process, act: worker_decisions.Act, link: Link | None, message: Any, world: World) -> Process:
    """The engine after an act."""
    if act == "close":
        p = replace(p, open=False)
        return replace(p, before=p.weights if p.state.state == "serving" else None) if isinstance(message, Begin) else p
    if act == "load":
        return replace(p, weights="torn")
    if act == "finish":
        assert link is not None
        assert p.state.begun is not None
        return replace(p, weights=(world.runs[link[0]].log, p.state.begun.version, p.state.epoch))
    if act == "restore":
        return replace(p, weights=p.before)
    return replace(p, open=True) if act in ("open", "reopen") else p


def _answer(world: World, link: Link, asked: Any, done: Process | None, sizes: Sizes, crash: str) -> World:
    me = world.runs[link[0]].ranks[link[1]] if link[0] < len(world.runs) else None
    if me is None or me.waits != "worker" or me.state is None or asked == "end":
        return world
    if getattr(asked, "epoch", 0) != me.state.epoch:
        return world
    if done is None:
        return fail(world, link)
    step = rank.worked(me.state) if isinstance(asked, Move) else rank.answered(me.state, status_of(done, sizes, world))
    return do(world, link, step, sizes, crash)
