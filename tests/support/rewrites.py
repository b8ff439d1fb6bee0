"""One step written in other columns: lanes, dependencies, names in another order, longer chains, more of the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from tests.support.program_mutations import Queue, Record, freeze, thaw
from treadle.ir.execute import execute
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program

Rewrite = Callable[[Program, Random, int], Program]
"""Returns the same step in other columns; every op takes so many ticks."""


def lanes_in_another_order(program: Program, random: Random, ticks: int) -> Program:
    del ticks
    draft = thaw(program)
    random.shuffle(draft.lanes)
    return freeze(draft)


def receives_first(program: Program, random: Random, ticks: int) -> Program:
    del random, ticks
    draft = thaw(program)
    draft.lanes.sort(key=lambda lane: lane.kind is not LaneKind.RECV)
    return freeze(draft)


def dependencies_in_another_order(program: Program, random: Random, ticks: int) -> Program:
    del ticks
    draft = thaw(program)
    for op in draft.ops:
        random.shuffle(op.deps)
    return freeze(draft)


def longer_chains(program: Program, random: Random, ticks: int) -> Program:
    """Each dependency becomes one on an op that has waited for it, and has ended by then."""
    draft, times = thaw(program), execute(program, np.full(program.num_ops, ticks, np.int64))
    ops, number = draft.ops, {id(op): at for at, op in enumerate(draft.ops)}
    after: dict[int, list[Record]] = {}
    for op in ops:
        for dep in op.deps:
            after.setdefault(id(dep), []).append(op)
    for op in ops:
        start = times.start[number[id(op)]]
        for at, dep in enumerate(op.deps):
            between = [mid for mid in after.get(id(dep), ()) if 0 <= times.end[number[id(mid)]] <= start]
            if dep is not None and start >= 0 and between and random.random() < 0.7:
                op.deps[at] = random.choice(between)
    return freeze(draft)


def micro_batches_renamed(program: Program, random: Random, ticks: int) -> Program:
    del ticks
    draft, num_mb = thaw(program), program.layout.num_mb
    names = random.sample(range(num_mb), num_mb)
    for op in draft.ops:
        op.mb = names[op.mb] if 0 <= op.mb < num_mb else op.mb
    scale = program.layout.mb_scale  # pipe after pipe
    renamed = [0.0] * len(scale)
    for at, factor in enumerate(scale):
        renamed[at - at % num_mb + names[at % num_mb]] = factor
    return freeze(replace(draft, layout=replace(draft.layout, mb_scale=tuple(renamed))))


def ranks_renamed(program: Program, random: Random, ticks: int) -> Program:
    """Stages live on other ranks, each with all of its replicas."""
    del ticks
    draft, layout = thaw(program), program.layout
    pp, replicas = layout.placement.pp, layout.num_replicas
    rows = random.sample(range(pp), pp)

    def renamed(rank: int) -> int:
        return rows[rank // replicas] * replicas + rank % replicas if 0 <= rank < layout.num_ranks else rank

    for lane in draft.lanes:
        lane.rank = renamed(lane.rank)
        lane.peer = renamed(lane.peer) if lane.kind in (LaneKind.SEND, LaneKind.RECV) else lane.peer
    stages = tuple(layout.placement.stages[rows.index(row)] for row in range(pp))
    placement = replace(layout.placement, name="renamed", stages=stages)
    return freeze(replace(draft, layout=replace(layout, placement=placement)))


def groups_renamed(program: Program, random: Random, ticks: int) -> Program:
    del ticks
    draft = thaw(program)
    groups = sorted({lane.group for lane in draft.lanes} - {-1})
    names = dict(zip(groups, random.sample(groups, len(groups)), strict=True)) | {-1: -1}
    for lane in draft.lanes:
        lane.group = names[lane.group]
    return freeze(draft)


FIRST_OF_STEP = (OpKind.GATHER_PARAMS,)
"""With buckets; without, it ends the step as the others that are of no micro-batch do."""


def more_micro_batches(program: Program, times: int) -> Program:
    """The step with its micro-batches several times over, one after the other on each lane."""
    layout = program.layout
    drafts = [thaw(program) for _ in range(times)]
    lanes = [Queue(lane.rank, lane.kind, lane.peer, lane.group, []) for lane in drafts[0].lanes]
    kept: dict[int, Record] = {}
    places = [{id(op): at for at, op in enumerate(draft.ops)} for draft in drafts]
    for number, draft in enumerate(drafts):
        only = 0 if layout.buckets else times - 1
        for lane, made in zip(lanes, draft.lanes, strict=True):
            for op in made.ops:
                whose = only if op.kind in FIRST_OF_STEP else times - 1
                if op.mb == -1 and whose != number:
                    continue
                if op.mb == -1:
                    kept[places[number][id(op)]] = op
                op.mb = op.mb if op.mb == -1 else op.mb + number * layout.num_mb
                lane.ops.append(op)
    for place, draft in zip(places, drafts, strict=True):
        for op in draft.ops:
            op.deps = [kept.get(place[id(dep)], dep) if dep is not None else None for dep in op.deps]
    return freeze(replace(drafts[0], lanes=lanes, layout=replace(layout, num_mb=times * layout.num_mb)))


REWRITES: tuple[Rewrite, ...] = (
    lanes_in_another_order,
    receives_first,
    dependencies_in_another_order,
    micro_batches_renamed,
    ranks_renamed,
    groups_renamed,
    longer_chains,
)
