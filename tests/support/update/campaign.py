"""Campaigns of random faults against weight updates, watched from outside.

    python -m tests.support.update.campaign targeted|deltas|leases|agents [--draws 200] [--seed 0]

Each draw begins an update in real processes, plays one fault at a random place of it, and tries again until an update
succeeds. Watchers compare each answer of each worker with the commit log: it must be of the committed version, whole.
After a draw all workers serve, and every element is compared. A line of JSON for each draw, with the seed that repeats
it (`--draws 1`), and one for all.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from shaped_link import ShapedLink, why_not
from tests.support.update.campaign_faults import AGENTS, DEADLINE_S, FAULTS, LEASE_S, LEASED, Draw, draw, play
from tests.support.update.campaign_world import Setup, ViolationError, World
from tests.support.update.changing import CompareElements, changing_source, right_elements
from tests.support.update.models import SMALL, Compare, SourceMaker, expected, model
from treadle.update import UpdateOptions
from treadle.weights.layouts import Parallel, sharded, spread
from treadle.weights.tensor_boxes import Holding

LASTS = 25
"""Draws that one world lives through."""

SHORT = UpdateOptions(SMALL, deadline_s=DEADLINE_S, drain_s=0.3, transfer="auto")
TENSORS = model(2, 64)
CHANGES = 3
"""Versions whose changes a version of deltas has."""


@dataclass(frozen=True)
class Campaign:
    """What is played against, and which faults."""

    setup: Setup
    options: UpdateOptions
    faults: tuple[tuple[str, str], ...] = FAULTS

    def options_of(self, world: int) -> UpdateOptions:
        """The options of the world with this number: that of agents has leases or not."""
        if not self.setup.agents or random.Random(world).random() < 0.6:
            return self.options
        return replace(self.options, lease_s=None, policy="all")

    @property
    def hosts(self) -> int:
        return self.setup.callers + (len(self.setup.workers) if self.setup.agents else 0)


def _whole(have: Holding, want: Holding, callers: int, *, agents: bool = False) -> Setup:
    return Setup(want, SourceMaker(have), partial(expected, want), Compare, callers, agents)


def _changing(have: Holding, want: Holding, callers: int) -> Setup:
    make, right = partial(changing_source, have, last=CHANGES), partial(right_elements, want, last=CHANGES)
    return Setup(want, make, right, partial(CompareElements, last=CHANGES), callers)


REPLICAS = Parallel(replicas=3).holding(TENSORS)
COLUMNS = Parallel(tp=2, dim=lambda name: 1 if "down" in name else 0).holding(TENSORS)
LEASES = replace(SHORT, lease_s=LEASE_S, policy=2)

CAMPAIGNS = {
    "targeted": Campaign(_whole(sharded(TENSORS, 2), COLUMNS, 2), replace(SHORT, transfer="targeted")),
    "deltas": Campaign(_changing(sharded(TENSORS, 2), COLUMNS, 2), replace(SHORT, changed="elements")),
    "leases": Campaign(_whole(REPLICAS, REPLICAS, 3), LEASES, LEASED),
    "agents": Campaign(_whole(spread(TENSORS, 2), REPLICAS, 2, agents=True), LEASES, AGENTS),
}


@dataclass
class Tally:
    """What a campaign came to."""

    draws: int = 0
    answers: int = 0
    refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    tries: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    harness_errors: list[str] = field(default_factory=list)
    skipped: int = 0

    @property
    def is_clean(self) -> bool:
        return not self.violations and not self.harness_errors


def run(name: str, draws: int, seed: int = 0, say: Any = lambda line: None) -> Tally:
    """Play these draws. A world that something went wrong in is followed by a new one."""
    campaign, tally = CAMPAIGNS[name], Tally()
    with _link(campaign.hosts) as link, ExitStack() as stack:
        world: World | None = None
        for number in range(seed, seed + draws):
            if world is None or number % LASTS == 0:
                stack.close()
                world = stack.enter_context(World(campaign.setup, campaign.options_of(number // LASTS), link))
            workers, callers = len(campaign.setup.workers), campaign.setup.callers
            one = draw(number, campaign.faults, workers, callers, world.options)
            if one.act.startswith("cut") and link is None:
                tally.skipped += 1
                continue
            if not _play(world, one, tally, say):
                world = None
    return tally


def _play(world: World, one: Draw, tally: Tally, say: Any) -> bool:
    """Play a draw and note what came of it; whether the world can go on."""
    began, wrong, error = time.monotonic(), list[str](), ""
    try:
        play(world, one)
    except ViolationError as violation:
        wrong.append(str(violation))
    except Exception:
        error = traceback.format_exc()
    try:
        seen = world.watched()
    except Exception:
        error += traceback.format_exc()
    else:
        tally.answers += seen.answers.total()
        tally.refused += seen.refused
        wrong += seen.wrong[:5]
    tally.draws += 1
    tally.faults[f"{one.act} {one.whom}"] += 1
    tally.places[f"{one.place.when} {one.place.phase}".strip()] += 1
    tally.tries[world.tries] += 1
    tally.violations += [f"seed {one.seed}: {text}" for text in wrong]
    tally.harness_errors += [f"seed {one.seed}: {error}"] if error else []
    seconds = round(time.monotonic() - began, 1)
    told = {"seed": one.seed, "fault": str(one), "reached": world.reached, "seconds": seconds, "tries": world.tries}
    say(json.dumps({**told, "errors": world.errors, "wrong": wrong, "error": error}))
    return not wrong and not error


@contextmanager
def _link(num: int) -> Iterator[ShapedLink | None]:
    """Hosts with cables, where such can be made."""
    if why_not() is not None:
        yield None
        return
    with ShapedLink("1gbit", num) as link:
        yield link


def main() -> int:
    """Run the command; exit with 1 where something is wrong."""
    parser = ArgumentParser(description="Random faults against weight updates, watched from outside.")
    parser.add_argument("name", choices=CAMPAIGNS)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw; the others count up")
    parser.add_argument("--without-cables", action="store_true", help="pass without those draws that cut a cable")
    args = parser.parse_args()
    began = time.monotonic()
    tally = run(args.name, args.draws, args.seed, lambda line: print(line, flush=True))  # noqa: T201 - a command
    told = {"campaign": args.name, "seconds": round(time.monotonic() - began), **vars(tally)}
    print(json.dumps(told), flush=True)  # noqa: T201
    if tally.skipped and not args.without_cables:
        print(f"{tally.skipped} draws cut a cable and were not played: {why_not()}; or --without-cables", flush=True)  # noqa: T201
    return 0 if tally.is_clean and (args.without_cables or not tally.skipped) else 1


if __name__ == "__main__":
    sys.exit(main())
