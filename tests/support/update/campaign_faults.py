"""The faults of a campaign: each is drawn with its place, played amid an update, and followed by a retry."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.support.rank_pool import SHOW_STACKS
from tests.support.update.campaign_world import ENDS_S, SERVES_S, ViolationError, World
from tests.support.update.crashes import DECISIONS, PHASES, Crash
from treadle.update import UpdateOptions

DEADLINE_S = 3.0
LEASE_S = 2.0

FAULTS = tuple(
    (act, whom)
    for act, by in {
        "kill": ("worker", "rank", "coordinator", "all"),
        "stop": ("worker", "rank", "coordinator"),
        "stop long": ("worker", "rank", "coordinator"),
        "interrupt": ("worker", "rank", "coordinator", "all"),
        "cut": ("rank",),
        "cut long": ("rank",),
        "two coordinators": ("all",),
        "log restored": ("all",),
    }.items()
    for whom in by
)
LEASED = (*FAULTS, ("gone", "worker"), ("gone", "host"))
AGENTS = (*LEASED, *((act, "agent") for act in ("kill", "stop", "stop long", "interrupt", "cut", "cut long")))


@dataclass(frozen=True)
class Draw:
    """One fault: `act` on `whom`, while the ranks wait at `place`, or `delay_s` after they went on from there.

    A process that is stopped, or a cable that is cut, is so for `lasts_s`; `waits`: the retry waits until that is over.
    """

    seed: int
    act: str
    whom: str
    number: int
    place: Crash
    delay_s: float
    lasts_s: float
    waits: bool
    options: UpdateOptions

    def __str__(self) -> str:
        when = f"{self.place.when} {self.place.phase}".strip() if self.place.when != "bucket" else "amid load"
        after = f" + {self.delay_s * 1e3:.0f} ms" if self.delay_s else ""
        return f"{self.act} {self.whom} {self.number} at rank {self.place.rank} {when}{after}"


def draw(seed: int, faults: tuple[tuple[str, str], ...], num: int, callers: int, options: UpdateOptions) -> Draw:
    """The draw with this seed: kinds of faults take turns, all else is random. `num` workers, `callers` ranks."""
    chance, (act, whom) = random.Random(seed), faults[seed % len(faults)]
    kind = chance.choice(("phase", "phase", "bucket", "decision"))
    rank = chance.randrange(callers)
    place = {
        "phase": Crash(rank, chance.choice(("before", "after")), chance.choice(PHASES)),
        "bucket": Crash(rank, "bucket", bucket=chance.randrange(4)),
        "decision": Crash(0, chance.choice(DECISIONS)),
    }[kind]
    delay_s = chance.choice((0.0, chance.uniform(0.0, 0.1)))
    lasts_s = DEADLINE_S + chance.uniform(1.0, 2.0) if "long" in act else chance.uniform(0.1, 1.0)
    varied = replace(
        options,
        rollback=chance.choice(("host", "host", "disk", "none")),
        close=chance.choice(("drain", "abort")),
        transfer=options.transfer if options.transfer != "auto" else chance.choice(("broadcast", "targeted")),
    )
    return Draw(seed, act, whom, chance.randrange(num), place, delay_s, lasts_s, chance.random() < 0.5, varied)


def play(world: World, one: Draw) -> None:
    """Play a fault, then try again until an update succeeds. Raises ViolationError."""
    world.draws += 1
    world.tries = 0
    world.errors.clear()
    world.signs.mkdir()
    SCENES.get(one.act, _strike)(world, one)
    _retry(world, one)


def _amid(world: World, one: Draw, act: Callable[[], None]) -> None:
    """Begin an update, and act at the place in it."""
    world.begin(one.options, one.place)
    world.reached = world.await_place()
    if one.delay_s:
        world.go_on()
        time.sleep(one.delay_s)
        act()
    else:
        act()
        world.go_on()


def _strike(world: World, one: Draw) -> None:
    _amid(world, one, lambda: ACTS[one.act](world, one))
    world.outcomes()


def _retry(world: World, one: Draw) -> None:
    """Update until that succeeds; all workers serve what it has brought."""
    if one.waits:
        world.settle()
    until = time.monotonic() + SERVES_S
    while True:
        world.tries += 1
        world.revive()
        errors = world.update(one.options)
        if not errors:
            break
        if time.monotonic() > until:
            raise ViolationError(f"no retry succeeds: {errors}; {world.states()}")
        time.sleep(0.05)
    world.settle()
    world.await_served(world.version)
    world.compare(world.version)


# ---- acts ------------------------------------------------------------------------------------------------------------


def _signal(world: World, one: Draw, number: int) -> None:
    for process in world.processes(one.whom, one.number):
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, number)


def _kill(world: World, one: Draw) -> None:
    for process in world.processes(one.whom, one.number):
        process.kill()
        process.join()


def _stop(world: World, one: Draw) -> None:
    _signal(world, one, signal.SIGSTOP)
    world.later(one.lasts_s, lambda: _signal(world, one, signal.SIGCONT))


def _interrupt(world: World, one: Draw) -> None:
    """All end by themselves."""
    processes = world.processes(one.whom, one.number)
    _signal(world, one, signal.SIGINT)
    world.go_on()
    for process in processes:
        process.join(ENDS_S)
        if process.is_alive():
            os.kill(process.pid or 0, SHOW_STACKS)
            raise ViolationError(f"an interrupted {one.whom} has not ended within {ENDS_S:g} s")


def _cut(world: World, one: Draw) -> None:
    link, host = world.link, world.host(one.whom, one.number)
    assert link is not None
    link.cut(host)
    world.later(one.lasts_s, lambda: link.mend(host))


ACTS: dict[str, Callable[[World, Draw], None]] = {
    "kill": _kill,
    "stop": _stop,
    "stop long": _stop,
    "interrupt": _interrupt,
    "cut": _cut,
    "cut long": _cut,
}


# ---- scenes ----------------------------------------------------------------------------------------------------------


def _gone(world: World, one: Draw) -> None:
    """A worker and its rank are lost for good, or a host whose worker serves on as long as it may: others go on.

    Without leases it may do so for ever, so that the worker is ended and those that are left are taken over.
    """
    number, endless = one.number, world.options.lease_s is None

    def lose() -> None:
        if one.whom == "worker" or endless:
            world.workers.processes[number].kill()
            world.workers.processes[number].join()
        if world.setup.agents:
            world.fleet.kill_agent(number)
        else:
            process = world.fleet.callers[number][0]
            process.kill()
            process.join()
        world.away.add(number)

    _amid(world, one, lose)
    world.outcomes()
    if endless:
        world.restart_ranks(takeover=True)
    _retry(world, one)
    world.away.clear()
    if endless or not world.setup.agents:
        world.fleet.kill_callers()


def _two_coordinators(world: World, one: Draw) -> None:
    """Other ranks begin with the same log, as the lock is lost; those before try to go on, and are ended then."""
    other = world.new_fleet()

    def begin() -> None:
        (world.workers.ledger / "ledger.lock").unlink()
        world.start_ranks(other)
        world.begin(one.options, fleet=other)

    _amid(world, one, begin)
    try:
        if one.waits:
            world.outcomes(other)
        world.outcomes()
    finally:
        before, world.fleet = world.fleet, other
        before.__exit__(None, None, None)
    if not one.waits:
        world.outcomes()


def _log_restored(world: World, one: Draw) -> None:
    """The log is put back from a copy: an update is refused and workers serve on; then the newest log, or a new one."""
    log = world.workers.ledger / "ledger.json"
    older = log.read_bytes()
    _retry(world, one)
    newest, version = log.read_bytes(), world.version
    world.watched()
    world.fleet.kill_callers()
    _put_back(world, older)
    world.start_ranks()
    until = time.monotonic() + SERVES_S
    errors = world.update(one.options)
    while not any("it is an older copy" in error for error in errors):
        if not errors or time.monotonic() > until:
            raise ViolationError(f"an update by an older log is not refused as such: {errors}")
        errors = world.update(one.options)
    if world.options.lease_s is None and world.unserved(version):
        raise ViolationError(f"workers do not serve on under an older log: {world.unserved(version)}")
    world.fleet.kill_callers()
    if one.waits:
        _put_back(world, newest)
        return
    log.unlink()
    world.start_ranks(takeover=True)
    world.update(one.options)
    world.fleet.kill_callers()


def _put_back(world: World, log: bytes) -> None:
    """Put a log in place, as a whole."""
    part = world.workers.ledger / "copy"
    part.write_bytes(log)
    part.rename(world.workers.ledger / "ledger.json")


SCENES: dict[str, Callable[[World, Draw], None]] = {
    "gone": _gone,
    "two coordinators": _two_coordinators,
    "log restored": _log_restored,
}
