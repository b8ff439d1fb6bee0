"""Parts -> Trace: one file that holds all ranks, or many that hold some each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from treadle.files.checked_columns import DTYPES, TIME_COLUMNS, Column, fingerprint, make_program, make_trace, reordered
from treadle.files.chrome.other_steps import read_steps
from treadle.files.chrome.read import TracePart, read_part
from treadle.files.header import Timing
from treadle.ir.program import Longs, Program
from treadle.ir.steps import Steps
from treadle.ir.trace import Trace

_OP_COLUMNS = ("kind", "mb", "chunk", "layer", "cell", "launch", "size_bytes", "joined")
_LANE_COLUMNS = {"rank": "lane_rank", "kind": "lane_kind", "peer": "lane_peer", "group": "lane_group"}


def load(path: str | Path) -> Trace:
    """The Trace of a file that holds all ranks; a ValueError says what is wrong with it."""
    part = read_part(path)
    if not part.is_whole:
        raise ValueError(
            f"{path}: holds {_named(part.ranks)} of {part.layout.num_ranks} only; merge it with the files of the others"
        )
    return _assemble([part])


def load_steps(path: str | Path) -> Steps:
    """All steps of the run that a file shows one of; that one alone where the file has no others."""
    part = read_part(path)
    if not part.is_whole:
        raise ValueError(f"{path}: holds {_named(part.ranks)} of {part.layout.num_ranks} only; a run is read whole")
    trace = _assemble([part])
    return Steps.of(trace) if part.steps is None else read_steps(part.steps, trace)


def merge(paths: Iterable[str | Path]) -> Trace:
    """One Trace of files that hold some ranks each, all of one program and every rank once."""
    parts = [read_part(path) for path in paths]
    if not parts:
        raise ValueError("no files to merge; give those of all ranks")
    for part in parts[1:]:
        _check_alike(parts[0], part)
    _check_ranks(parts)
    return _assemble(parts)


def _check_alike(first: TracePart, part: TracePart) -> None:
    if part.program != first.program or part.layout != first.layout:
        raise ValueError(
            f"{first.source} and {part.source} are of different programs ({_size(first)}, and {_size(part)}); "
            "merge files of one run"
        )
    for what in ("clock", "measured"):
        here, there = getattr(first.timing, what), getattr(part.timing, what)
        if here != there:
            raise ValueError(
                f"{first.source} and {part.source} differ in {what} ({here} and {there}); merge files of one run"
            )


def _size(part: TracePart) -> str:
    layout = part.layout
    return f"{part.num_ops} ops on {layout.num_ranks} ranks, {layout.num_mb} micro-batches, {layout.placement.name}"


def _check_ranks(parts: Sequence[TracePart]) -> None:
    """Every rank once."""
    ordered = sorted(parts, key=lambda part: part.ranks.start)
    for part, after in pairwise(ordered):
        if after.ranks.start < part.ranks.stop:
            rank = after.ranks.start
            raise ValueError(f"rank {rank} is in {part.source} and in {after.source}; leave one of them out")
    num_ranks = parts[0].layout.num_ranks
    starts, stops = [part.ranks.start for part in ordered], [part.ranks.stop for part in ordered]
    for missing, found in zip([0, *stops], [*starts, num_ranks], strict=True):
        if missing != found:
            named = _named(range(missing, found))
            raise ValueError(f"none of the {len(parts)} files holds {named} of {num_ranks}; add the one that does")


def _named(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _assemble(parts: Sequence[TracePart]) -> Trace:
    first = parts[0]
    source = first.source if len(parts) == 1 else f"{first.source} and {len(parts) - 1} more"
    lanes = {key: np.concatenate([part.lanes[key] for part in parts]) for key in first.lanes}
    by_lane = _order(lanes["lane"], first.num_lanes, "lane", "an entry in treadle.lanes", source)
    ops = {key: np.concatenate([part.ops[key] for part in parts]) for key in first.ops}
    by_index = _order(ops["index"], first.num_ops, "op", "an event", source)
    columns: dict[str, Column] = {name: ops[name][by_index] for name in (*_OP_COLUMNS, *TIME_COLUMNS)}
    columns |= {name: lanes[key][by_lane].astype(DTYPES[name]) for key, name in _LANE_COLUMNS.items()}
    columns["lane_ptr"] = np.append(lanes["first"][by_lane], first.num_ops)
    dep_ptr, dep = np.r_[0, np.cumsum(ops["num_deps"])], np.concatenate([part.dep for part in parts])
    columns["dep_ptr"], columns["dep"] = reordered(dep_ptr, dep, by_index)
    program = make_program(first.layout, columns, source)
    _check_program(program, first, lanes["num_ops"][by_lane], source)
    return make_trace(program, columns, _timing(parts), source)


def _order(number: Longs, count: int, what: str, has: str, source: str) -> Longs:
    """Return the place of each of `count` things, if each is there once."""
    order = np.argsort(number, kind="stable")
    differs = np.flatnonzero(number[order] != np.arange(len(number)))
    if len(number) == count and not len(differs):
        return order
    place = int(differs[0]) if len(differs) else min(len(number), count)
    wrong = min(place, int(number[order[place]])) if len(differs) else place  # one that is there again, or is not there
    came = f"{what} {wrong} has {int((number == wrong).sum())}"
    raise ValueError(f"{source}: each {what} from 0 to {count - 1} has {has}, and one only, but {came}")


def _check_program(program: Program, part: TracePart, num_ops: Longs, source: str) -> None:
    """The lanes as long as the table says, and the whole as it was written."""
    wrong = np.flatnonzero(np.diff(program.lane_ptr) != num_ops)
    if len(wrong):
        lane = int(wrong[0])
        raise ValueError(f"{source}: treadle.lanes: the num_ops of lane {lane} do not end where the next lane begins")
    if fingerprint(program, part.layout_keys) != part.program:
        raise ValueError(
            f"{source}: the events and lanes are not those of program {part.program}, which treadle.program names: "
            "something was changed; write the trace again"
        )


def _timing(parts: Sequence[TracePart]) -> Timing:
    """Join the statements of the files, each with its ranks if they differ."""
    timing = parts[0].timing
    if len({part.timing.about for part in parts}) == 1:
        return timing
    ordered = sorted(parts, key=lambda part: part.ranks.start)
    return timing._replace(about="; ".join(f"{_named(part.ranks)}: {part.timing.about}" for part in ordered))
