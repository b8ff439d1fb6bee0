"""A model checker of weight updates: all orders of messages, crashes, restarts and replacements, at small sizes.

    python -m tests.support.update.model_checker --ranks 2 --workers 2 --updates 2 --crashes 2

The coordinator, the ranks, the workers and the log are those of `treadle.update.protocol`: the very functions that run.
What is modelled here is what lies between them: sockets that keep their order and end, processes that end and start,
the file at a socket's path, the lock on a worker's slot, and engines, of which only the weights' true origin is known.

It starts from a set that serves version 1, and looks at every state that can be reached. In each of them:

    whole       a worker that serves holds one version, whole
    committed   which is the one that was committed last by its log
    once        with the weights that were committed as that version, and no others
    one log     and no other log believes that the worker serves another
    told right  when ranks have been told that all is well, the workers that they found serve the committed version

Rules that can be left out (`--without`) are what the protocol had not at first: ids of logs, members, slots.

A log that is put back from a backup (`--restores`) is the first one, as it was before any update. A worker that ends
while a child holds its sockets (`--children`) is gone without a word: its rank, whose connection stays open, gives up
waiting. A socket at a path at which nobody answers is to a rank what no socket is; that sockets close in children, and
that a listener without a process counts as ended, is below this model, in `treadle.host.sockets` and its tests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import TypeAlias

from tests.support.update.world import (
    CHILDREN,
    CRASHES,
    CUTS,
    DOUBLES,
    MISTAKES,
    RECOVERIES,
    REPLACEMENTS,
    REPORTS,
    RESTORES,
    RULES,
    TICKS,
    UPDATES,
    Crashed,
    Link,
    Process,
    Rank,
    Run,
    Sizes,
    World,
    carry_out,
    do,
    engine,
    enter,
    fail,
    find,
    first_logs,
    handle,
    hear_report,
    kill,
    leave,
    named_weights,
    record_of,
    replace,
    restored,
    serves,
    spend,
    start,
    started,
    status_of,
    take_grant,
    taken,
    with_item,
    with_process,
    with_rank,
    with_run,
)
from treadle.update.protocol import coordinator_decisions, rank, worker_decisions
from treadle.update.protocol.control import Call, Fault, Kind
from treadle.update.protocol.leases import MARGIN, is_past
from treadle.update.protocol.worker_decisions import WorkerState

# ---- what may happen -------------------------------------------------------------------------------------------------

Event: TypeAlias = tuple[str, World]


def events(world: World, sizes: Sizes) -> Iterator[Event]:
    """All events that may happen next, with a description of each."""
    for number, run in enumerate(world.runs):
        yield from _run_events(world, number, run, sizes)
    for process in world.processes:
        yield from _process_events(world, process, sizes)
    yield from _starts(world, sizes)
    if sizes.leases or sizes.agents:
        yield from _lease_events(world, sizes)


def _run_events(world: World, number: int, run: Run, sizes: Sizes) -> Iterator[Event]:
    callers = run.world - sizes.agents
    idle = all(r is not None and r.waits == "idle" for r in run.ranks[:callers])
    if idle and not run.is_over:
        if world.left[UPDATES]:
            yield f"run {number} asks for version {world.version + 1}", _ask(world, number, "update", sizes)
        if world.left[RECOVERIES]:
            yield f"run {number} asks to recover", _ask(world, number, "recover", sizes)
    for r, me in enumerate(run.ranks):
        link = number, r
        if me is None:
            if r >= callers and run.core is not None:
                step = coordinator_decisions.joined(run.core, r)
                there = with_rank(world, link, Rank())
                yield f"agent {r} of run {number} joins again", carry_out(there, number, step, "")
            continue
        if me.waits == "idle" and run.down[r] and r >= callers:
            yield f"agent {r} of run {number} hears {type(run.down[r][0]).__name__}", _hears(world, link, sizes)
        if me.waits == "enter" or (me.waits == "idle" and me.is_called):
            yield f"rank {r} of run {number} enters", enter(world, link, sizes)
            if world.left[CUTS] and r >= sizes.sources:
                yield f"rank {r} of run {number}, cut off, enters", enter(spend(world, CUTS), link, sizes, cut=True)
        if me.waits == "coordinator" and run.down[r]:
            said = type(run.down[r][0]).__name__ if run.down[r][0] != "end" else "that the coordinator is gone"
            yield f"rank {r} of run {number} hears {said}", _hears(world, link, sizes)
            yield from _decisions(f"rank {r} hears {said}", number, partial(_hears, world, link, sizes), world)
        if me.waits == "worker" and find(world, me.link) is None:
            yield f"rank {r} of run {number} gives up: its worker is gone", _give_up(world, link, heard=True)
        if not world.left[CRASHES]:
            continue
        if me.waits in ("coordinator", "worker"):
            for heard in (True, False) if run.core is not None else (False,):
                how = "" if heard else ", unheard"
                yield (
                    f"rank {r} of run {number} gives up{how}",
                    _give_up(spend(world, CRASHES), link, heard=heard),
                )
        if (me.waits not in ("idle", "done") or r >= callers) and (r or run.core is not None):
            who = f"rank {r} of run {number}" + ("" if r else ", with the coordinator,")
            for keep in (True, False) if not r and any(run.down[1:]) else (True,):
                said = "" if keep else ", before what it told was sent"
                yield (
                    f"{who} is killed{said}",
                    kill(spend(world, CRASHES), link, keep=keep),
                )


def _lease_events(world: World, sizes: Sizes) -> Iterator[Event]:
    """Time passes; workers are reported and granted leases, early, late or never."""
    ends = [end for run in world.runs if run.core is not None for end in run.core.leases.out.values()]
    ends += [-(-p.until * (MARGIN + 1) // MARGIN) for p in world.processes if p.until is not None]
    later = [end for end in ends if end is not None and end > world.now]
    if world.left[TICKS] and later:
        yield f"it is {min(later)} by the true clock", replace(spend(world, TICKS), now=min(later))
    for number, run in enumerate(world.runs):
        if run.core is not None and run.core.waits_ns and is_past(run.core.waits_ns, world.now):
            step = coordinator_decisions.ticked(run.core, record_of(world, number), world.now)
            yield f"run {number} has waited for leases", carry_out(world, number, step, "")
        for r in range(sizes.sources, run.world) if world.left[REPORTS] and run.core is not None else ():
            there = next((p for p in world.processes if p.slot == r - sizes.sources and p.at_path), None)
            if run.ranks[r] is not None and there is not None:
                seen = (number, r), status_of(there, sizes, world, stamped=True)
                asked = replace(spend(world, REPORTS), reports=(*world.reports, seen))
                yield f"{there.name} reports to rank {r} of run {number}", asked
    for number, (link, status) in enumerate(world.reports):
        yield f"run {link[0]} hears that worker {status.worker} is {status.state}", hear_report(world, number)
    for number, (name, _) in enumerate(world.grants):
        yield f"{name} takes a grant", take_grant(world, number)


def _ask(world: World, number: int, kind: Kind, sizes: Sizes) -> World:
    version = world.version + 1 if kind == "update" else 0
    world = spend(world, UPDATES if kind == "update" else RECOVERIES)
    called = sizes.ranks - sizes.agents if sizes.agents else len(world.runs[number].ranks)
    ranks = tuple(
        Rank(None, "enter", each.link) if each is not None and r < called else each
        for r, each in enumerate(world.runs[number].ranks)
    )
    world = replace(world, version=max(world.version, version))
    return with_run(world, number, ranks=ranks, asked=(kind, version))


def _hears(world: World, link: Link, sizes: Sizes, crash: str = "") -> World:
    number, r = link
    run = world.runs[number]
    message, *rest = run.down[r]
    world = with_run(world, number, down=with_item(run.down, r, tuple(rest)))
    me = run.ranks[r]
    assert me is not None
    if isinstance(message, Call):
        return with_rank(world, link, replace(me, called=message))
    if me.state is None:  # an agent between attempts
        return kill(world, link, keep=True) if message == "end" else world
    if message == "end":
        return leave(world, link, None)
    if isinstance(message, Fault):
        return leave(world, link, message) if message.epoch in (0, me.state.epoch) else world
    if me.state.epoch and message.epoch != me.state.epoch:
        return world  # of an earlier attempt
    return do(world, link, rank.heard(me.state, message), sizes, crash)


def _give_up(world: World, link: Link, *, heard: bool) -> World:
    """A rank has waited too long; its worker may still take what it was sent."""
    me = world.runs[link[0]].ranks[link[1]]
    assert me is not None
    assert me.state is not None
    if me.waits == "worker":
        world = with_rank(world, link, replace(me, state=rank.timed_out(me.state)))
    return fail(world, link, heard=heard)


def _decisions(what: str, number: int, act: Callable[[str], World], world: World) -> Iterator[Event]:
    """If this leads to a decision, the coordinator may end just before or just after it has written it."""
    if not world.left[CRASHES]:
        return
    for crash in ("before", "after"):
        try:
            act(crash)
        except Crashed as crashed:
            ended = kill(spend(crashed.world, CRASHES), (number, 0), keep=False)
            yield f"{what}; the coordinator is killed {crash} its decision is written", ended


def _process_events(world: World, process: Process, sizes: Sizes) -> Iterator[Event]:
    if process.queue:
        link, message = process.queue[0]
        named = type(message).__name__ if message != "end" else "the end of its rank"
        what = f"{process.name} takes {named} of run {link[0]}"
        yield what, handle(world, process, sizes)
        yield from _decisions(what, link[0], partial(handle, world, process, sizes), world)
        me = world.runs[link[0]].ranks[link[1]]
        if world.left[CRASHES] and me is not None and me.waits == "worker":
            yield f"{what}; its rank is killed before it hears", _handled_alone(world, process, link, sizes)
    if not process.at_path and not process.state.retired and "slots" in sizes.rules:
        yield f"{process.name} finds another in its place", _retire(world, process)
    if world.left[CRASHES]:
        yield f"{process.name} is killed", _end(taken(spend(world, CRASHES), process), process)
    if world.left[CHILDREN]:
        yield f"{process.name} is killed, and a child holds its sockets", _end(spend(world, CHILDREN), process)
    if world.left[REPLACEMENTS] and process.at_path:
        yield f"another process is started in place of {process.name}", _supplant(world, process, sizes)


def _handled_alone(world: World, process: Process, link: Link, sizes: Sizes) -> World:
    world = kill(spend(world, CRASHES), link, keep=True)
    there = find(world, process.incarnation)
    assert there is not None
    return handle(world, there, sizes)


def _retire(world: World, process: Process) -> World:
    world = taken(world, process)
    there = find(world, process.incarnation)
    assert there is not None
    moves, state = worker_decisions.retire(there.state)
    for move in moves:
        there = engine(there, move.act, None, None, world)
    return _free(with_process(world, replace(there, state=state)), process.slot)


def _free(world: World, slot: int) -> World:
    """Give a slot that nobody holds to the process that waits for it."""
    there = [p for p in world.processes if p.slot == slot and not p.state.retired]
    if any(p.state.holds_slot for p in there):
        return world
    for p in there:
        if p.at_path:
            return with_process(world, replace(p, state=changed(p.state, holds_slot=True)))
    return world


def _end(world: World, process: Process) -> World:
    world = replace(world, processes=tuple(p for p in world.processes if p.incarnation != process.incarnation))
    return _free(world, process.slot)


def _born(world: World, slot: int, sizes: Sizes) -> World:
    """Start a worker's process: empty and closed."""
    others = any(p.slot == slot and not p.state.retired and p.state.holds_slot for p in world.processes)
    holds = not others or "slots" not in sizes.rules
    named = {p.incarnation for p in world.processes} | {m.incarnation for log in world.logs for m in log.members}
    named |= {name for run in world.runs for r in run.ranks if r is not None for name in (r.link, r.found)}
    new = next(name for number in range(99) if (name := f"w{slot}.{number}") not in named)
    return replace(world, processes=(*world.processes, Process(slot, new, WorkerState(slot, holds_slot=holds))))


def _supplant(world: World, process: Process, sizes: Sizes) -> World:
    world = with_process(spend(world, REPLACEMENTS), replace(process, at_path=False))
    return _born(world, process.slot, sizes)


def _starts(world: World, sizes: Sizes) -> Iterator[Event]:
    for slot in range(sizes.workers):
        if not any(p.slot == slot and p.at_path for p in world.processes):
            yield f"worker {slot} is started again", _born(world, slot, sizes)
    live = [run for run in world.runs if not run.is_over]
    if not live:
        yield "the ranks are started again", started(world, 0, sizes.ranks, sizes)
    if world.left[DOUBLES] and live:
        yield "other ranks are started, too", started(spend(world, DOUBLES), 0, sizes.ranks, sizes)
    quiet = all(r is None or r.waits == "idle" for run in live for r in run.ranks)
    if world.left[RESTORES] and quiet and world.logs[0] != first_logs(sizes)[0]:
        again = restored(_stopped(spend(world, RESTORES)), sizes)
        yield (
            "the log is put back from a backup, and the ranks are started again",
            started(again, 0, sizes.ranks, sizes),
        )
    if not world.left[MISTAKES]:
        return
    if quiet and sizes.ranks > 1:
        yield "one rank too few is started", started(_stopped(spend(world, MISTAKES)), 0, sizes.ranks - 1, sizes)
    if all(run.log == 0 for run in live):
        yield "ranks are started with another log", started(spend(world, MISTAKES), 1, sizes.ranks, sizes)


def _stopped(world: World) -> World:
    """End all idle ranks."""
    for number, run in enumerate(world.runs):
        for r in reversed(range(run.world)):
            if run.ranks[r] is not None and not world.runs[number].is_over:
                world = kill(world, (number, r), keep=True)
        world = with_run(world, number, core=None, ranks=(None,) * run.world, down=((),) * run.world)
    return world


def _swept(world: World) -> World:
    """Drop runs that have ended: worlds with the same future then have the same key."""
    heard_of = {link[0] for p in world.processes for link in (p.master, *(q[0] for q in p.queue)) if link is not None}
    heard_of |= {link[0] for link, _ in world.reports}
    kept = [n for n, run in enumerate(world.runs) if n in heard_of or any(run.ranks)]
    if len(kept) == len(world.runs):
        return world
    number = {old: new for new, old in enumerate(kept)}
    processes = tuple(
        replace(
            p,
            master=(number[p.master[0]], p.master[1]) if p.master is not None else None,
            queue=tuple(((number[link[0]], link[1]), message) for link, message in p.queue),
        )
        for p in world.processes
    )
    reports = tuple(((number[link[0]], link[1]), status) for link, status in world.reports)
    return replace(world, processes=processes, reports=reports, runs=tuple(world.runs[n] for n in kept))


# ---- exploring -------------------------------------------------------------------------------------------------------


def violation(world: World) -> str:
    """The rule that a world violates, in words; empty if none."""
    if world.wrong:
        return world.wrong
    for p in world.processes:
        if not serves(p, world.now):
            continue
        if not isinstance(p.weights, tuple):
            return f"whole: {p.name} serves weights that are {named_weights(p.weights)}"
        log, version, _ = p.weights
        if world.decided[log] != version:
            return f"committed: {p.name} serves version {version}, log {'AB'[log]} has committed {world.decided[log]}"
        if p.weights not in world.true:
            return f"once: {p.name} serves {named_weights(p.weights)}, version {version} was committed before that"
        for other, on in enumerate(world.on):
            if other != log and p.slot in on:
                return f"one log: {p.name} serves {named_weights(p.weights)}, log {'AB'[other]} was committed on it too"
    return ""


@dataclass(frozen=True)
class Explored:
    """The number of states, and the shortest trace to a violation, if there is any; `whole`: there are no others."""

    states: int
    seconds: float
    wrong: str = ""
    trace: tuple[str, ...] = ()
    whole: bool = True


def explore(sizes: Sizes, most_states: int = 100_000_000) -> Explored:
    """Explore all states, or the nearest `most_states`, nearest first, up to the first violation.

    Of states that were seen their hashes are kept, of 64 bits: among a million, two that are taken for one are as
    likely as one in thirty million.
    """
    began = time.perf_counter()
    first = start(sizes)
    seen = {hash(first.key())}
    parents: list[tuple[int, str]] = [(-1, "")]
    queue = deque([(0, first)])
    while queue:
        number, world = queue.popleft()
        for what, after in events(world, sizes):
            after = _swept(after)
            wrong = violation(after)
            key = hash(after.key())
            if key in seen and not wrong:
                continue
            seen.add(key)
            parents.append((number, what))
            if wrong:
                return Explored(len(seen), time.perf_counter() - began, wrong, _trace(parents, len(parents) - 1))
            queue.append((len(parents) - 1, after))
        if len(seen) > most_states:
            return Explored(len(seen), time.perf_counter() - began, whole=False)
    return Explored(len(seen), time.perf_counter() - began)


def _trace(parents: list[tuple[int, str]], at: int) -> tuple[str, ...]:
    steps: list[str] = []
    while at > 0:
        at, what = parents[at]
        steps.append(what)
    return tuple(reversed(steps))


def main() -> None:
    """Explore, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("workers", 2), ("updates", 2), ("crashes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--replacements", type=int, default=1, help="workers started while the old process lives")
    parser.add_argument("--mistakes", type=int, default=1, help="ranks too few, or with another log")
    parser.add_argument("--recoveries", type=int, default=1)
    parser.add_argument("--restores", type=int, default=0, help="backups of the log that are put back")
    parser.add_argument("--children", type=int, default=0, help="workers that end while a child holds their sockets")
    parser.add_argument("--sources", type=int, default=0, help="ranks, of all, that have no worker")
    parser.add_argument("--leases", action="store_true", help="leases end")
    parser.add_argument("--least", type=int, help="replicas that are enough; the others' leases run out")
    parser.add_argument("--ticks", type=int, default=0, help="how often time passes")
    parser.add_argument("--reports", type=int, default=0, help="reports of workers beside attempts")
    parser.add_argument("--cuts", type=int, default=0, help="ranks that do not reach their worker, which lives")
    parser.add_argument("--doubles", type=int, default=0, help="coordinators that are started beside another one")
    parser.add_argument("--agents", type=int, default=0, help="ranks, of all, that are called, join and leave")
    parser.add_argument("--without", action="append", default=[], choices=sorted(RULES), help="a rule to leave out")
    args = vars(parser.parse_args())
    sizes = Sizes(rules=RULES - set(args.pop("without")), **args)
    found = explore(sizes)
    lines = [f"{found.states} states in {found.seconds:.1f} s: {found.wrong or 'none is wrong'}"]
    lines += [f"{number:3} {step}" for number, step in enumerate(found.trace, 1)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
