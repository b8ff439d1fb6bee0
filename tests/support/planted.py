"""Races planted into the runtime, which the fuzzer has to find.

    python -m tests.support.planted [NAME ...] [--draws 200]
    TREADLE_TEST_DEVICE=sim python -m tests.support.planted [NAME ...] --streams
    python -m tests.support.planted [NAME ...] --streams

The second plants mistakes that only a device shows (`stream_plants.py`) and draws steps on the device of threads; the
third runs one step of the same pipelines under the stream checker. `--table` prints both
outputs as a table, and exits with 1 where neither finds a mistake.

A plant is a few replacements in the text of one module, each of which must match exactly once: a line that has moved
fails here rather than be no plant any more. The changed text is compiled, and the functions of the imported module
get its code; so a rank of the tests' forkserver is planted in milliseconds, where a copy of the package would have to
be imported anew.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tests.support.plant import Plant
from tests.support.stream_plants import STREAM_PLANTS
from tests.support.update_plants import UPDATE_PLANTS, UPDATES

PLANTS = {
    "event-before-work": Plant(
        "an op counts as done before it has run",
        "treadle.runtime.run.lanes.thread",
        (
            (
                "step.start[op] = perf_counter_ns()\n",
                "step.start[op] = perf_counter_ns()\n                step.done[op].set()\n",
            ),
        ),
        "kind=layers,schedule=1f1b|zb-v,num_layers=1",
    ),
    "wait-for-own-lane-only": Plant(
        "a lane does not wait for the first of the ops that an op needs",
        "treadle.runtime.run.lanes.thread",
        (("for other in item.after:", "for other in item.after[1:]:"),),
        "kind=layers,schedule=interleaved-overlap|dualpipev,num_layers=1",
    ),
    "finish-early": Plant(
        "a step is over when the first op of each lane is",
        "treadle.runtime.run.lanes.thread",
        (("self._step.last[lane] = op", "self._step.last.setdefault(lane, op)"),),
        "kind=dp,layered=True,schedule=interleaved|zb-v|dualpipev,num_layers=1",
    ),
    "receive-not-waited-for": Plant(
        "a message is read before it has come",
        "treadle.dist.channel",
        (("for work in works:\n            self.wait(work)\n        return tensors", "return tensors"),),
        "kind=cells,schedule=1f1b|gpipe",
    ),
    "ring-of-one": Plant(
        "the next message is received into the tensors of the last one",
        "treadle.dist.channel",
        (
            (
                "tensors = tuple([spec.empty(self.device) for spec in boundary])",
                "made = tuple([spec.empty(self.device) for spec in boundary])\n"
                "        tensors = self.__dict__.setdefault(str(boundary), made)",
            ),
        ),
        "kind=layers,schedule=gpipe|1f1b,num_layers=1",
    ),
    "exchange-not-waited-for": Plant(
        "rows are read before they have come",
        "treadle.dist.groups",
        (
            (
                "self.wait(self.communicator.alltoall_base(arrived, rows.contiguous(), receive, send))",
                "self.under_way = self.communicator.alltoall_base(arrived, rows.contiguous(), receive, send)",
            ),
        ),
        "kind=layers,ep=2,schedule=1f1b|zb-v,num_layers=1",
    ),
    "reduction-lands-first": Plant(
        "gradients are taken from a reduction before it is waited for",
        "treadle.runtime.model.gradient_bucket",
        (
            (
                "            for work in self._works:\n",
                "            self.flat = self.flat.clone()\n            self._views = self._all_views()\n"
                "            for work in self._works:\n",
            ),
        ),
        "kind=dp,schedule=1f1b|zb-h1,dtype=bfloat16,num_classes=32000",
    ),
    "gather-not-waited-for": Plant(
        "forwards read parameters before they are gathered",
        "treadle.passes.step_end",
        (("waits.append((reader[_places(program, gathers)], gathers))", "pass"),),
        "kind=sharded,layered=True,num_layers=2,dropout=False",
    ),
    "gather-lands-late": Plant(
        "gathered parameters are put in place before they have come",
        "treadle.runtime.model.parameter_bucket",
        (
            (
                "        self._group.wait(work)\n        into",
                "        rows = rows.clone()\n        self._group.wait(work)\n        into",
            ),
        ),
        "kind=sharded,num_classes=32000,dropout=False",
    ),
    "bucket-reduced-early": Plant(
        "a bucket is reduced before its last weight gradient",
        "treadle.runtime.run.executor",
        (
            (
                "after=[[place[dep] for dep in part.program.deps(op.index)] for op in own]",
                "after=[[place[dep] for dep in part.program.deps(op.index) if op.kind.name != 'REDUCE_SCATTER'] "
                "for op in own]",
            ),
        ),
        "kind=sharded,layered=True,num_layers=2,dropout=False",
    ),
    "piece-given-back-first": Plant(
        "a piece of the pool is given back before it is read",
        "treadle.runtime.model.saved.saved_store",
        (
            (
                "        flat.copy_(self.room[: self.size_bytes], non_blocking=True)\n"
                "        self._pool.give_back(self.room)\n",
                "        self._pool.give_back(self.room)\n"
                "        flat.copy_(self.room[: self.size_bytes], non_blocking=True)\n",
            ),
        ),
        "kind=offload,schedule=1f1b|interleaved-overlap",
    ),
    "shelf-of-all-micro-batches": Plant(
        "what micro-batches save is kept in one list",
        "treadle.runtime.model.saved.saved_store",
        (
            (
                "return self._shelves.setdefault(key, Shelf())",
                "shelf = self._shelves.setdefault((key[0], 0, key[2]), Shelf())\n        self._shelves[key] = shelf\n"
                "        return shelf",
            ),
        ),
        "kind=offload,schedule=1f1b|interleaved-overlap",
    ),
    "ledger-without-lock": Plant(
        "saved bytes are counted by several threads without a lock",
        "treadle.runtime.model.saved.live_saved",
        (
            (
                "        with self._lock:\n            self._settle()\n            holders =",
                "        if True:\n            self._settle()\n            holders =",
            ),
        ),
        "kind=offload,schedule=interleaved-overlap|dualpipev",
    ),
    "splits-on-the-group": Plant(
        "how many rows a micro-batch exchanged is kept where the next one puts it",
        "treadle.runtime.model.exchange",
        (
            (
                "ctx.ep_group, ctx.send, ctx.receive = ep_group, send, receive",
                "ctx.ep_group = ep_group\n        ep_group.__dict__['splits'] = (receive, send)",
            ),
            ("_swap(ctx.ep_group, grad, ctx.receive, ctx.send)", "_swap(ctx.ep_group, grad, *ctx.ep_group.splits)"),
        ),
        "kind=layers,ep=2,schedule=1f1b|interleaved-overlap,num_layers=1",
    ),
    "piece-taken-twice": Plant(
        "a piece of the pool that was taken stays among the free ones",
        "treadle.runtime.model.saved.pool",
        (("return free.pop()", "return free[-1]"),),
        "kind=offload,schedule=1f1b|interleaved-overlap",
    ),
    "scale-rounded-twice": Plant(
        "the gradient of a loss starts from a scale that was rounded to bfloat16 first",
        "treadle.runtime.model.chunk",
        (("[own.aux].to(own.loss.dtype)", "[own.aux].bfloat16().to(own.loss.dtype)"),),
        "kind=layers,schedule=1f1b|zb-h1,aux=bf16,num_layers=1",
    ),
    "halves-shared": Plant(
        "weight halves of all micro-batches go to one list",
        "treadle.runtime.model.weight_grad",
        (("self._open = []", "self._open = self.__dict__.setdefault('shared', [])"),),
        "kind=layers|cells,schedule=zb-v|zb-h1",
    ),
}


ALL = PLANTS | STREAM_PLANTS | UPDATE_PLANTS

HANGS_S = 15.0
"""How long a rank of a pipeline on the device waits for another, where a plant may hang it."""


def apply(name: str) -> None:
    """Plants it in this process."""
    plant = ALL[name]
    module = import_module(plant.module)
    assert module.__file__ is not None
    code = compile(changed(plant, Path(module.__file__).read_text()), module.__file__, "exec")
    changed_code = {part.co_qualname: part for part in _parts(code)}
    for function in _functions(module):
        if function.__code__.co_filename == module.__file__:
            function.__code__ = changed_code[function.__qualname__]


def changed(plant: Plant, text: str) -> str:
    """A module's text with the plant in it."""
    for old, new in plant.replacements:
        num = text.count(old)
        if num != 1:
            raise ValueError(f"{plant.module} has {old!r} {num} times, and a plant replaces what is there once")
        text = text.replace(old, new)
    return text


def _parts(code: CodeType) -> Iterator[CodeType]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _parts(part)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Those of a module and of its classes."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for part in vars(value).values() if isinstance(value, type) else [value]:
            plain = getattr(part, "__func__", getattr(part, "fget", part))
            plain = getattr(plain, "__wrapped__", plain)
            if isinstance(plain, FunctionType):
                yield plain


def find_on_device(name: str, draws: int, seed: int) -> dict[str, object]:
    """Draw steps on the device until one is wrong, raises or hangs; `how` is the first finding."""
    from tests.support import fuzz
    from tests.support.update import sim_updates

    if ALL[name].only == UPDATES:
        return sim_updates.find(name, draws, seed)
    said = fuzz.find(name, ALL[name].only, draws, seed, deadline_s=HANGS_S)
    return {"found": bool(said["failures"]), "how": said["how"], "draws": said["draws"]}


def find_by_checker(name: str, draws: int, seed: int) -> dict[str, object]:
    """Run a step under the stream checker on CPUs; `how` is the kind of its first finding."""
    from tests.support import checked, fuzz
    from tests.support.ranks import run_ranks

    args = fuzz.parser().parse_args(
        ["--only", f"dtype=float64,aux=none,{ALL[name].only}", "--draws", "1", "--seed", str(seed)]
    )
    (life,) = fuzz.lives(args)
    outcomes = run_ranks(life.config.world, checked.run_planted, name, life.config, new=True)
    how = [str(outcome).splitlines()[-1] for outcome in outcomes if outcome.value is None]
    for rank in (outcome.value for outcome in outcomes if outcome.value is not None):
        how += [finding.kind.value for finding in rank.findings] + rank.wrong
    return {"found": bool(how), "how": how[0] if how else "", "draws": 1}


Output = dict[str, dict[str, Any]]


def read_output(path: Path) -> Output:
    """The lines of `--streams`, by mistake."""
    return {said["plant"]: said for said in map(json.loads, path.read_text().splitlines())}


def table(both: list[Output]) -> Iterator[str]:
    """Lines of Markdown, a row for each mistake in both outputs."""
    yield "| mistake | on `sim` | under the stream checker |"
    yield "|---|---|---|"
    for name in both[0]:
        if name in both[1]:
            yield f"| {STREAM_PLANTS[name].about} | {' | '.join(sight(part[name]) for part in both)} |"


def sight(said: dict[str, Any]) -> str:
    """How a mistake shows."""
    how = said["how"]
    if not said["found"]:
        return "not found"
    for part, name in (("nan", "NaN"), ("pageable", "the host waits"), ("is off", "wrong numbers")):
        if part in how:
            return name
    raised = re.findall(r"\w+Error", how)
    return f"`{raised[-1]}`" if raised else "wrong numbers" if "the loss is" in how else f"finding: {how}"


def main() -> int:
    """Runs the command: a line of JSON a plant, and exits with 1 where one is not found."""
    parser = ArgumentParser(description="Which planted races does the fuzzer find, and at which draw.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}; all if none is given")
    parser.add_argument("--draws", type=int, default=200, help="at most, for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", action="store_true", help="those that only a device shows")
    parser.add_argument(
        "--table", nargs=2, type=Path, metavar="FILE", help="of two outputs, of the device and the checker"
    )
    args = parser.parse_args()
    if args.table:
        both = [read_output(path) for path in args.table]
        print(*table(both), sep="\n")  # noqa: T201 - a command
        return int(any(not any(part[name]["found"] for part in both) for name in both[0].keys() & both[1].keys()))
    from tests.support import devices, fuzz

    on_device = STREAM_PLANTS | UPDATE_PLANTS
    checked = STREAM_PLANTS if devices.DEVICE_TYPE == "cpu" else on_device  # the checker runs steps
    known = checked if args.streams else PLANTS
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"there is no plant {unknown[0]!r}; there are {', '.join(known)}")
    missed = 0
    for name in args.names or known:
        if not args.streams:
            said = fuzz.find(name, PLANTS[name].only, args.draws, args.seed)
            missed += not said["failures"]
        else:
            find = find_by_checker if devices.DEVICE_TYPE == "cpu" else find_on_device
            said = find(name, args.draws, args.seed)
        print(json.dumps({"plant": name, **said}), flush=True)  # noqa: T201 - a command
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
