"""Random damage to Programs, of the kinds that people, generators and files do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from treadle.ir.ops import COMMUNICATION, RECOMPUTE, STEP_END, STEP_ENDS, LaneKind, OpKind
from treadle.ir.program import NEVER, Layout, Program

COLLECTIVE = (LaneKind.EP, LaneKind.DP, LaneKind.TIED, LaneKind.WORLD)


@dataclass(eq=False)
class Record:
    """An op that keeps its identity wherever it goes. A dependency that is None is on NEVER."""

    kind: int
    mb: int
    chunk: int
    layer: int
    cell: int
    launch: int
    size_bytes: int
    joined: bool
    deps: list[Record | None]


@dataclass(eq=False)
class Queue:
    """A lane that can be changed."""

    rank: int
    kind: LaneKind
    peer: int
    group: int
    ops: list[Record]


@dataclass(eq=False)
class Draft:
    """A Program that can be changed."""

    layout: Layout
    lanes: list[Queue]

    @property
    def ops(self) -> list[Record]:
        return [op for lane in self.lanes for op in lane.ops]

    @property
    def given(self) -> bool:
        """Is there a launch order."""
        return any(op.launch != -1 for op in self.ops)


Mutation = Callable[[Draft, Random], bool]
"""Changes a draft, or says False where it has nothing to change."""


def mutate_program(program: Program, random: Random, first: Mutation | None = None) -> Program:
    """One to three random mutations, the first of this kind if it has something to change."""
    draft = thaw(program)
    left = random.choice((1, 1, 1, 2, 3))
    if first is not None:
        left -= first(draft, random)
    for _ in range(100):
        if left == 0 or not draft.ops:
            break
        left -= random.choice(MUTATIONS)(draft, random)
    # else hardly a launch order would stay one, and none of those that cannot be would be seen
    if draft.given and random.random() < 0.8:
        _renumber(draft)
    return freeze(draft)


def thaw(program: Program) -> Draft:
    """The columns as records."""
    ops = [
        Record(kind, mb, chunk, layer, cell, launch, size_bytes, joined, [])
        for kind, mb, chunk, layer, cell, launch, size_bytes, joined in zip(
            program.kind.tolist(),
            program.mb.tolist(),
            program.chunk.tolist(),
            program.layer.tolist(),
            program.cell.tolist(),
            program.launch.tolist(),
            program.size_bytes.tolist(),
            program.joined.tolist(),
            strict=True,
        )
    ]
    for i, op in enumerate(ops):
        op.deps = [None if dep == NEVER else ops[dep] for dep in program.deps(i)]
    bounds, groups = program.lane_ptr.tolist(), program.lane_group.tolist()
    lanes = []
    for i in range(program.num_lanes):
        lane = program.lane(i)
        lanes.append(Queue(lane.rank, lane.kind, lane.peer, groups[i], ops[bounds[i] : bounds[i + 1]]))
    return Draft(program.layout, lanes)


def freeze(draft: Draft) -> Program:
    """The records as columns. A dependency on an op that is gone is on NEVER."""
    ops, lanes = draft.ops, draft.lanes
    index = {op: i for i, op in enumerate(ops)}
    deps = [[NEVER if dep is None else index.get(dep, NEVER) for dep in op.deps] for op in ops]
    return Program(
        layout=draft.layout,
        kind=np.array([op.kind for op in ops], dtype=np.uint8),
        mb=np.array([op.mb for op in ops], dtype=np.int32),
        chunk=np.array([op.chunk for op in ops], dtype=np.int16),
        layer=np.array([op.layer for op in ops], dtype=np.int16),
        cell=np.array([op.cell for op in ops], dtype=np.int32),
        launch=np.array([op.launch for op in ops], dtype=np.int32),
        size_bytes=np.array([op.size_bytes for op in ops], dtype=np.int64),
        joined=np.array([op.joined for op in ops], dtype=np.bool_),
        lane_ptr=np.cumsum([0, *(len(lane.ops) for lane in lanes)], dtype=np.int64),
        lane_rank=np.array([lane.rank for lane in lanes], dtype=np.int32),
        lane_kind=np.array([lane.kind for lane in lanes], dtype=np.uint8),
        lane_peer=np.array([lane.peer for lane in lanes], dtype=np.int32),
        lane_group=np.array([lane.group for lane in lanes], dtype=np.int32),
        dep_ptr=np.cumsum([0, *map(len, deps)], dtype=np.int64),
        dep=np.array([d for row in deps for d in row], dtype=np.int32),
    )


def drop(draft: Draft, random: Random) -> bool:
    """An op is left out. Those that wait for it wait for ever, or for what it waited for."""
    lane, place = _somewhere(draft, random)
    _leave_out(draft, lane, place, inherit=random.random() < 0.5)
    return True


def drop_together(draft: Draft, random: Random) -> bool:
    """An op and all that it goes with are left out; what waited for them waits for what they waited for."""
    groups = sorted({lane.group for lane in draft.lanes if lane.group != -1 and lane.ops})
    if not groups:
        return False
    group = random.choice(groups)
    members = [lane for lane in draft.lanes if lane.group == group]
    shortest = min(len(lane.ops) for lane in members)
    if not shortest:
        return False
    place = random.randrange(shortest)
    for lane in members:
        _leave_out(draft, lane, place, inherit=True)
    return True


def double(draft: Draft, random: Random) -> bool:
    """An op runs again somewhere on its lane; now and then so does all that it goes with."""
    lane, place = _somewhere(draft, random)
    to = random.randrange(len(lane.ops) + 1)
    members = [other for other in draft.lanes if other is lane or (lane.group != -1 and other.group == lane.group)]
    for member in members if random.random() < 0.4 else [lane]:
        if max(place, to - 1) < len(member.ops):
            op = member.ops[place]
            member.ops.insert(to, replace(op, deps=list(op.deps), joined=False))
    return True


def swap(draft: Draft, random: Random) -> bool:
    """Two ops of a lane change places, near ones more often; their dependencies go with them."""
    lane, place = _somewhere(draft, random)
    _swap(lane, place, _near(place, len(lane.ops), random))
    return True


def move(draft: Draft, random: Random) -> bool:
    """An op goes elsewhere on its lane, or now and then to another lane."""
    lane, place = _somewhere(draft, random)
    op = lane.ops.pop(place)
    to = lane if random.random() < 0.85 else random.choice(draft.lanes)
    to.ops.insert(_near(min(place, len(to.ops)), len(to.ops) + 1, random), op)
    return True


def relabel(draft: Draft, random: Random) -> bool:
    """An op gets another micro-batch, chunk, layer or kind; now and then one that there is not."""
    lane, place = _somewhere(draft, random)
    op, layout = lane.ops[place], draft.layout
    beyond = random.random() < 0.1
    what = random.choice(("mb", "chunk", "layer", "kind"))
    if what == "kind":
        values = [int(kind) for kind in OpKind if beyond or kind.lane == lane.kind]
    else:
        deepest = max(layout.max_layers, len(layout.tied))
        most = {"mb": layout.num_mb, "chunk": layout.placement.vpp, "layer": deepest}[what]
        values = [-1, most] if beyond else list(range(most))
    others = [value for value in values if value != getattr(op, what)]
    if others:
        setattr(op, what, random.choice(others))
    return bool(others)


def drop_dependency(draft: Draft, random: Random) -> bool:
    """An op no longer waits for something."""
    return _alter_dependency([op for op in draft.ops if op.deps], [None], random, 0.0)


def add_dependency(draft: Draft, random: Random) -> bool:
    """An op waits for another as well, or for what nothing provides."""
    ops = draft.ops
    op = random.choice(ops)
    op.deps.insert(random.randrange(len(op.deps) + 1), None if random.random() < 0.1 else random.choice(ops))
    return True


def redirect_dependency(draft: Draft, random: Random) -> bool:
    """An op waits for another op than it should, often one of the same lane."""
    lane, _ = _somewhere(draft, random)
    others = lane.ops if random.random() < 0.5 else draft.ops
    return _alter_dependency([op for op in draft.ops if op.deps], [*others], random, 1.0)


def swap_on_one_member(draft: Draft, random: Random) -> bool:
    """One member of a collective does two of its ops in another order than the others."""
    lanes = [lane for lane in draft.lanes if lane.group != -1 and len(lane.ops) > 1]
    collective = [lane for lane in lanes if lane.kind in COLLECTIVE]
    if not lanes:
        return False
    lane = random.choice(collective or lanes)
    place = random.randrange(len(lane.ops))
    _swap(lane, place, _near(place, len(lane.ops), random))
    return True


def resize(draft: Draft, random: Random) -> bool:
    """An op moves another number of bytes, more often one of a group; now and then all of it agree."""
    grouped = [lane for lane in draft.lanes if lane.group != -1 and lane.ops]
    lane = random.choice(grouped) if grouped and random.random() < 0.8 else _somewhere(draft, random)[0]
    place, size = random.randrange(len(lane.ops)), random.choice((0, 1, 5, 1 << 40))
    together = [other for other in draft.lanes if lane.group != -1 and other.group == lane.group]
    for member in together if random.random() < 0.3 else [lane]:
        if place < len(member.ops):
            member.ops[place].size_bytes = size
    return True


def swap_receives(draft: Draft, random: Random) -> bool:
    """Two receives are posted in the other order."""
    lanes = [lane for lane in draft.lanes if lane.kind == LaneKind.RECV and len(lane.ops) > 1]
    if not lanes:
        return False
    lane = random.choice(lanes)
    place = random.randrange(len(lane.ops))
    _swap(lane, place, _near(place, len(lane.ops), random))
    return True


def repair(draft: Draft, random: Random) -> bool:
    """A pair is split, or an op is joined to the one before it, or to one that is brought next to it."""
    anywhere = random.random() < 0.2
    lanes = [lane for lane in draft.lanes if (anywhere or lane.kind == LaneKind.COMPUTE) and len(lane.ops) > 1]
    if not lanes or (draft.layout.by_layer and random.random() < 0.7):
        return False
    lane = random.choice(lanes)
    joined = [op for op in lane.ops if op.joined]
    if joined and random.random() < 0.5:
        random.choice(joined).joined = False
        return True
    place = random.randrange(len(lane.ops))
    if random.random() < 0.6:
        partner = lane.ops.pop(_near(place, len(lane.ops), random))
        place = min(place, len(lane.ops) - 1)
        lane.ops.insert(place + 1, partner)
        place += 1
    # at place 0 there is nothing to be joined to, and that too comes in from files
    lane.ops[place].joined = True
    return True


def swap_launches(draft: Draft, random: Random) -> bool:
    """Two numbers of a rank's launch order change places, near ones more often."""
    rank = random.choice(draft.lanes).rank
    launched = [op for lane in draft.lanes if lane.rank == rank for op in lane.ops if op.launch != -1]
    if len(launched) < 2:
        return False
    launched.sort(key=lambda op: op.launch)
    place = random.randrange(len(launched))
    one, other = launched[place], launched[_near(place, len(launched), random)]
    one.launch, other.launch = other.launch, one.launch
    return True


def misnumber_launches(draft: Draft, random: Random) -> bool:
    """A number of a launch order is given twice, left out, or given to an op that launches nothing."""
    ops = draft.ops
    if not draft.given or random.random() < 0.7:
        return False
    random.choice(ops).launch = random.choice((-1, 0, random.randrange(len(ops))))
    return True


Damage = Callable[[Draft, Random, Queue, int], bool]
"""Changes the op at a place of a lane, or says False where it has nothing to change."""


def spoil(kinds: tuple[OpKind, ...], on: tuple[LaneKind, ...], damages: tuple[tuple[float, Damage], ...]) -> Mutation:
    """A mutation of one op of these kinds on these lanes. Each damage has a bound: the chance of it or one before."""

    def mutation(draft: Draft, random: Random) -> bool:
        spots = [
            (lane, place)
            for lane in draft.lanes
            if lane.kind in on
            for place, op in enumerate(lane.ops)
            if op.kind in kinds
        ]
        if not spots:
            return False
        lane, place = random.choice(spots)
        what = random.random()
        damage = next(damage for bound, damage in damages if what < bound)
        return damage(draft, random, lane, place)

    return mutation


def leaving_out(inherit: float) -> Damage:
    """The op is left out; with this chance those that wait for it wait for what it waited for."""

    def damage(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
        _leave_out(draft, lane, place, inherit=random.random() < inherit)
        return True

    return damage


def swap_near(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
    """The op changes places with another of its lane."""
    _swap(lane, place, _near(place, len(lane.ops), random))
    return True


def unread(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
    """One that waits for the op does so no longer, or waits for another."""
    op = lane.ops[place]
    readers = [reader for reader in draft.ops if op in reader.deps]
    return _alter_dependency(readers, [random.choice(draft.ops)], random, 0.3)


def unwait(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
    """The op no longer waits for something, or waits for another."""
    op = lane.ops[place]
    return _alter_dependency([op] if op.deps else [], [random.choice(draft.ops)], random, 0.5)


def renaming(kinds: tuple[OpKind, ...]) -> Damage:
    """The op becomes another one of these."""

    def damage(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
        op = lane.ops[place]
        op.kind = random.choice([kind for kind in kinds if kind != op.kind])
        return True

    return damage


def run_again(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
    """The op runs again near by."""
    op = lane.ops[place]
    to = _near(place, len(lane.ops) + 1, random)
    lane.ops.insert(to, replace(op, deps=list(op.deps), joined=False))
    return True


def change_layer(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
    """The op becomes one of the next layer, MTP block or tie, or of the one before."""
    lane.ops[place].layer += random.choice((-1, 1))
    return True


def change_rank(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
    """The op goes to another lane of its kind."""
    others = [other for other in draft.lanes if other.kind == lane.kind and other is not lane]
    if others:
        random.choice(others).ops.append(lane.ops.pop(place))
    return bool(others)


def change_stage(draft: Draft, random: Random, lane: Queue, place: int) -> bool:
    """The op goes to some rank and some chunk."""
    to = random.choice([other for other in draft.lanes if other.kind == LaneKind.COMPUTE])
    op = lane.ops[place]
    to.ops.insert(_near(min(place, len(to.ops)), len(to.ops) + 1, random), lane.ops.pop(place))
    op.chunk = random.randrange(draft.layout.placement.vpp)
    return True


spoil_copy = spoil(
    (OpKind.OFFLOAD, OpKind.ONLOAD),
    tuple(LaneKind),
    ((0.3, leaving_out(inherit=0.5)), (0.5, swap_near), (0.7, unread), (1.0, unwait)),
)
BLOCK_ENDS = tuple(kind for kind in OpKind if set(kind.blocks) & set("EmL"))
spoil_end = spoil(
    BLOCK_ENDS,
    (LaneKind.COMPUTE,),
    (
        (0.2, leaving_out(inherit=0.7)),
        (0.45, swap_near),
        (0.6, renaming(BLOCK_ENDS)),
        (0.65, change_layer),
        (0.8, change_stage),
        (1.0, unread),
    ),
)
spoil_recomputation = spoil(
    tuple(RECOMPUTE),
    (LaneKind.COMPUTE,),
    (
        (0.2, leaving_out(inherit=0.7)),
        (0.3, run_again),
        (0.6, swap_near),
        (0.7, renaming((*RECOMPUTE, *RECOMPUTE.values()))),
        (0.8, change_layer),
        (0.9, unread),
        (1.0, unwait),
    ),
)
ENDS_OF_STEP = (OpKind.REDUCE_GRAD, OpKind.REDUCE_SCATTER, OpKind.REDUCE_TIED, *STEP_END)
spoil_step = spoil(
    ENDS_OF_STEP,
    tuple(LaneKind),
    (
        (0.15, leaving_out(inherit=0.7)),
        (0.25, run_again),
        (0.45, swap_near),
        (0.5, renaming(ENDS_OF_STEP)),
        (0.6, change_layer),
        (0.65, change_rank),
        (0.75, unread),
        (1.0, unwait),
    ),
)


def misstate_layout(draft: Draft, random: Random) -> bool:
    """The layout says something else than the ops were made for."""
    layout = draft.layout
    stages = layout.placement.num_stages
    rows = list(layout.blocks)
    stage = random.randrange(stages)
    rows[stage] = random.choice(RELETTERINGS)(rows[stage])
    changed = random.choice(
        (
            {"blocks": tuple(rows)},
            {"blocks": tuple(rows)},
            {"recomputed": random.choice(((), (OpKind.ATTN_R,), (OpKind.MLP_R,), tuple(RECOMPUTE)))},
            {"step_end": random.choice(STEP_ENDS)},
            {"tied": layout.tied[1:] or ((0, stages - 1),)},
            {"tied": layout.tied[::-1]},
            {"buckets": layout.buckets[::-1]},
            {"buckets": random.choice(((), ((0,),) * stages))},
            {
                "buckets": tuple(
                    random.choice((firsts, firsts[1:], (len(row) - 1, *firsts)))
                    for row, firsts in zip(rows, layout.buckets, strict=False)
                )
            },
            {"weights": layout.weights[1:]},
        )
    )
    try:
        draft.layout = replace(layout, **changed)
    except ValueError:
        return False
    return draft.layout != layout


RELETTERINGS: tuple[Callable[[str], str], ...] = (
    lambda row: row.replace("d", "t"),
    lambda row: row.replace("t", "d"),
    lambda row: row[::-1],
    lambda row: row[1:],
    lambda row: row[:-1],
    lambda row: row + row[-1:],
    lambda row: row[:1] + row,
)
"""Other blocks of a stage. Those out of their order are refused, so that some of these change nothing."""


MUTATIONS: tuple[Mutation, ...] = (
    drop,
    drop_together,
    double,
    swap,
    swap,
    move,
    relabel,
    relabel,
    drop_dependency,
    drop_dependency,
    add_dependency,
    redirect_dependency,
    swap_on_one_member,
    resize,
    swap_receives,
    repair,
    swap_launches,
    swap_launches,
    misnumber_launches,
    spoil_copy,
    spoil_end,
    spoil_recomputation,
    spoil_step,
    misstate_layout,
)


def _somewhere(draft: Draft, random: Random) -> tuple[Queue, int]:
    """An op, of any lane that has some: compute lanes are long and would else get all the damage."""
    lane = random.choice([lane for lane in draft.lanes if lane.ops])
    return lane, random.randrange(len(lane.ops))


def _near(place: int, length: int, random: Random) -> int:
    if random.random() < 0.3:
        return random.randrange(length)
    return max(0, min(length - 1, place + random.choice((-3, -2, -1, 1, 2, 3))))


def _swap(lane: Queue, place: int, other: int) -> None:
    lane.ops[place], lane.ops[other] = lane.ops[other], lane.ops[place]


def _leave_out(draft: Draft, lane: Queue, place: int, *, inherit: bool) -> None:
    gone = lane.ops.pop(place)
    if inherit:
        if place < len(lane.ops) and not gone.joined:
            lane.ops[place].joined = False
        for op in draft.ops:
            op.deps = list(_without(op.deps, gone))


def _without(deps: list[Record | None], gone: Record) -> Iterator[Record | None]:
    for dep in deps:
        if dep is gone:
            yield from (its for its in gone.deps if its is not gone)
        else:
            yield dep


def _alter_dependency(readers: list[Record], others: list[Record | None], random: Random, redirected: float) -> bool:
    """One dependency of one of the readers goes, or with this chance turns to one of the others."""
    if not readers:
        return False
    reader = random.choice(readers)
    place = random.randrange(len(reader.deps))
    reader.deps[place : place + 1] = [random.choice(others)] if random.random() < redirected else []
    return True


def _renumber(draft: Draft) -> None:
    """Makes launch numbers 0, 1, 2, ... again, in the order they are in."""
    launched: dict[int, list[Record]] = {}
    for lane in draft.lanes:
        for op in lane.ops:
            if lane.kind in COMMUNICATION:
                launched.setdefault(lane.rank, []).append(op)
            else:
                op.launch = -1
    for ops in launched.values():
        for number, op in enumerate(sorted(ops, key=lambda op: op.launch)):
            op.launch = number
