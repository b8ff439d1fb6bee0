"""One step has one makespan, to the tick, through whatever door it goes.

Command line, Python, drawn pages, comparisons, files of programs, and the planner's own simulation.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.support.command import treadle as typed
from treadle.costs import Costs, dump
from treadle.ir.blocks import write_layout
from treadle.ir.trace import MICROSECONDS
from treadle.lowering import LoweringOptions
from treadle.passes.cut import cut_evenly
from treadle.planner.simulated_step import simulate_whole
from treadle.planner.structure import Structure
from treadle.schedules import SCHEDULES, family

NUM_THINGS = 200
BY_DAY = 30
QUICK = 4
PARTS = ("attn_f", "mlp_f", "mlp_b", "attn_b", "mlp_w", "attn_w")
EXCHANGES = ("counts", "host", "dispatch_f", "combine_f", "combine_b", "dispatch_b")
ENDS = ("embed_f", "embed_b", "mtp_f", "mtp_b", "mtp_w", "head_f", "head_b", "head_w")
SAVED = ("attn", "mlp", "embed", "mtp", "head")
FLAGS = {"moe", "padded", "offload", "by_layer"}


@dataclass(frozen=True)
class Thing:
    """A schedule with costs and options, as Python and as the command line have them."""

    schedule: treadle.Schedule
    costs: Costs
    options: dict[str, Any]

    def words(self, directory: Path) -> list[str]:
        """The target and the options as they are typed."""
        schedule, costs = self.schedule, self.costs
        path = directory / "costs.toml"
        path.write_text(dump(costs))
        sizes = {"--pp": schedule.pp, "-m": schedule.num_microbatches, "--costs": path}
        sizes |= {"--vpp": schedule.vpp} if not family(schedule.name).vpps else {}
        return [schedule.name, *(word for name, value in sizes.items() for word in (name, str(value))), *self.flags()]

    def flags(self) -> Iterator[str]:
        for name, value in self.options.items():
            if name in FLAGS:
                yield f"--{name.replace('_', '-')}"
            elif name == "blocks":
                yield from ("--layout", write_layout(value), "--dense", str("".join(value).count("d")))
            elif name == "tied":
                yield "--tied"
            elif name == "split":
                yield "--no-split"
            elif name == "hold":
                yield from ("--hold", "always" if value else "never")
            else:
                listed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                yield from (f"--{name.replace('_', '-')}", listed)


def draw_thing(number: int) -> Thing:
    """The next schedule on a small pipeline, with costs and options of any kind."""
    rng = random.Random(number)
    name, pp = tuple(SCHEDULES)[number % len(SCHEDULES)], rng.choice([2, 4])
    vpp = None if family(name).vpps else rng.choice([2, 3])
    schedule = treadle.generate(name, pp=pp, vpp=vpp, microbatches=2 * pp * rng.choice([1, 1, 2]))
    num_stages = schedule.placement.num_stages
    kind = rng.choice(["cells", "cells", "layers", "model_layers", "blocks", "model"])
    options: dict[str, Any] = {}
    num_layers = num_stages + rng.randint(0, num_stages)
    if kind == "layers":
        options["layers"] = rng.choice([1, 2, tuple(rng.randint(1, 2) for _ in range(num_stages))])
    elif kind == "model_layers":
        options["model_layers"] = num_layers
    elif kind == "blocks":
        options["blocks"] = cut_evenly(f"Ed{'t' * (num_layers - 1)}mL", num_stages)
    costs = draw_costs(rng, {"layers": num_layers, "dense": 1, "mtp": 1} if kind == "model" else {})
    if kind == "layers" or (kind != "cells" and rng.random() < 0.7):
        options |= draw_lanes(rng, by_layer=kind != "layers")
    return Thing(schedule, costs, options)


def draw_lanes(rng: random.Random, *, by_layer: bool) -> dict[str, Any]:
    """Options that work layer by layer."""
    moe = rng.random() < 0.5
    drawn: dict[str, Any] = {"by_layer": by_layer, "moe": moe, "padded": moe and rng.random() < 0.7}
    drawn["offload"] = rng.random() < 0.3
    drawn["recompute"] = rng.choice([(), (), ("attn",), ("mlp",), ("attn", "mlp")])
    drawn["tied"] = ((0, -1),) if rng.random() < 0.3 else ()
    drawn["ep"] = rng.choice([1, 2]) if moe else 1
    drawn["dp"] = rng.choice([1, 1, 2])
    given = {name: value for name, value in drawn.items() if value is True or value not in (False, (), 1)}
    given |= {"split": ()} if rng.random() < 0.2 else {}
    return given | ({"hold": rng.random() < 0.5} if rng.random() < 0.3 else {})


def draw_costs(rng: random.Random, model: dict[str, int]) -> Costs:
    """Costs of a layer's parts, of all ends and messages, some of them of a whole model."""
    return Costs(
        "drawn",
        MICROSECONDS,
        cells={} if rng.random() < 0.5 else {"layers": 1, "f": rng.randint(100, 900), "b": rng.randint(100, 900)},
        layer={part: rng.randint(1, 1000) for part in (*PARTS, *EXCHANGES)},
        dense={"mlp_f": rng.randint(1, 900)},
        ends={part: rng.randint(1, 500) for part in ENDS},
        message={part: rng.randint(0, 900) for part in ("send", "reduce_grad", "offload", "onload")},
        saved_bytes={part: rng.randint(1, 1000) for part in SAVED},
        step={"optimizer": rng.randint(1, 1000)},
        model=model,
    )


def makespans(thing: Thing, directory: Path) -> dict[str, int]:
    """The makespan in ticks, by door."""
    schedule, costs = thing.schedule, thing.costs
    options = treadle.LoweringOptions(**thing.options) if thing.options else None
    given: dict[str, Any] = {"costs": costs} | ({"options": options} if options is not None else {})
    trace = treadle.simulate(schedule, costs, options)
    found = {"simulate": trace.makespan}
    found["simulate a Program"] = treadle.simulate(treadle.lower(schedule, costs, options), costs).makespan
    treadle.draw(schedule, directory / "python.html", **given)
    found["draw"] = on_page(directory / "python.html")
    words = thing.words(directory)
    found["treadle simulate"] = in_json(["simulate", *words], directory, costs)["makespan"]
    run(["draw", *words, "-o", "command.html"], directory)
    found["treadle draw"] = on_page(directory / "command.html")
    if thing.options or costs.model:  # else a comparison gives the schedules a model
        rows = treadle.compare(schedule, schedule, **given).rows
        found |= {"compare": int(rows[0].makespan.value), "compare, second": int(rows[1].makespan.value)}
        rows = in_json(["compare", words[0], *words, "--json"], directory, costs)["rows"]
        found["treadle compare"] = rows[1]["makespan"]["value"]
    run(["show", *words, "--lower", "-o", "program.npz"], directory)
    found["a file"] = in_json(["simulate", "program.npz", "--costs", "costs.toml"], directory, costs)["makespan"]
    if plannable(thing.options):
        found["plan"] = simulate_whole(structure_of(thing), schedule.num_microbatches, costs).ticks
    return found


def plannable(options: dict[str, Any]) -> bool:
    """True for what a plan may consist of: dispatches are padded, choices are left to the simulation."""
    by_layer = "blocks" in options and "by_layer" in options and not {"hold", "split"} & options.keys()
    return by_layer and options.get("padded", False) == options.get("moe", False)


def structure_of(thing: Thing) -> Structure:
    """The structure with the options that a plan has: padded, and no sizes of the mesh but whether there is one."""
    schedule, given = thing.schedule, thing.options
    reduces = given.get("ep", 1) * given.get("dp", 1) > 1
    options = replace(LoweringOptions(**given), padded=True, ep=1, dp=2 if reduces else 1)
    return Structure(schedule.name, schedule.pp, schedule.vpp, options, tuple(sorted(thing.costs.step)))


def run(words: list[str], directory: Path) -> str:
    done = typed(*words, cwd=directory)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def in_json(words: list[str], directory: Path, costs: Costs) -> Any:
    """What a command prints, with times in ticks."""

    def in_ticks(found: Any) -> Any:
        if isinstance(found, dict):
            return {
                name: round(value * costs.clock.ticks)
                if name in ("makespan", "value") and not isinstance(value, dict)
                else in_ticks(value)
                for name, value in found.items()
            }
        return [in_ticks(each) for each in found] if isinstance(found, list) else found

    return in_ticks(json.loads(run([*words, *([] if "--json" in words else ["--json"])], directory)))


def on_page(path: Path) -> int:
    match = re.search(r'"makespan":(\d+),', path.read_text())
    assert match is not None
    return int(match[1])


def check(number: int, directory: Path) -> None:
    thing = draw_thing(number)
    found = makespans(thing, directory)
    assert len(set(found.values())) == 1, (number, thing, found)


@pytest.mark.parametrize("number", range(QUICK))
def test_every_door_leads_to_one_makespan(number: int, tmp_path: Path) -> None:
    check(number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, BY_DAY, 14))
def test_every_door_leads_to_one_makespan_for_many(first: int, tmp_path: Path) -> None:
    for number in range(first, first + 14):
        check(number, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(BY_DAY, NUM_THINGS, 28))
def test_every_door_leads_to_one_makespan_for_all(first: int, tmp_path: Path) -> None:
    for number in range(first, first + 28):
        check(number, tmp_path)


def test_things_are_of_every_kind() -> None:
    things = [draw_thing(number) for number in range(NUM_THINGS)]
    assert {thing.schedule.name for thing in things} == set(SCHEDULES)
    given = {name for thing in things for name in thing.options}
    assert given == {
        *("layers", "model_layers", "blocks", "by_layer", "moe", "padded", "offload", "recompute"),
        *("tied", "split", "hold", "ep", "dp"),
    }
    assert sum(plannable(thing.options) for thing in things) > 5
