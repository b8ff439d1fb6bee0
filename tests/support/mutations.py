"""Random damage to schedules, of the kinds that people and generators do to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from treadle.ir import Action, Cell, Kind, Pair, Schedule
from treadle.ir.ops import LaneKind
from treadle.passes.cells import lower_cells

Rows = list[list[Cell]]
Mutation = Callable[[Schedule, Random], Schedule]


def mutate(schedule: Schedule, random: Random, first: Mutation) -> Schedule:
    """One to three random mutations, the first of this kind."""
    schedule = first(schedule, random)
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        schedule = random.choice(MUTATIONS)(schedule, random)
    return schedule


def drop(schedule: Schedule, random: Random) -> Schedule:
    """An action is left out; of a pair the other half stays."""
    rows, rank, place = _somewhere(schedule, random)
    cell = rows[rank][place]
    rows[rank][place : place + 1] = [] if isinstance(cell, Action) else [random.choice(cell)]
    return _with(schedule, rows)


def double(schedule: Schedule, random: Random) -> Schedule:
    """An action runs again somewhere in its row."""
    rows, rank, place = _somewhere(schedule, random)
    copy = random.choice(rows[rank][place].actions)
    rows[rank].insert(random.randrange(len(rows[rank]) + 1), copy)
    return _with(schedule, rows)


def swap(schedule: Schedule, random: Random) -> Schedule:
    """Two cells of a row change places, near ones more often."""
    rows, rank, place = _somewhere(schedule, random)
    other = _near(place, len(rows[rank]), random)
    row = rows[rank]
    row[place], row[other] = row[other], row[place]
    return _with(schedule, rows)


def move(schedule: Schedule, random: Random) -> Schedule:
    """A cell goes elsewhere in its row, or now and then to another rank."""
    rows, rank, place = _somewhere(schedule, random)
    cell = rows[rank].pop(place)
    to = rank if random.random() < 0.85 else random.randrange(len(rows))
    rows[to].insert(_near(min(place, len(rows[to])), len(rows[to]) + 1, random), cell)
    return _with(schedule, rows)


def repair(schedule: Schedule, random: Random) -> Schedule:
    """A pair is split, two neighbours become a pair, or two pairs change partners."""
    rows, rank, place = _somewhere(schedule, random)
    row = rows[rank]
    cell, after = row[place], row[(place + 1) % len(row)]
    if isinstance(cell, Pair) and isinstance(after, Pair):
        row[place] = Pair(cell.forward, after.backward)
        row[(place + 1) % len(row)] = Pair(after.forward, cell.backward)
    elif isinstance(cell, Pair):
        row[place : place + 1] = list(cell)
    else:
        forwards = [i for i, c in enumerate(row) if isinstance(c, Action) and c.kind is Kind.F]
        backwards = [i for i, c in enumerate(row) if isinstance(c, Action) and c.kind is Kind.B]
        if forwards and backwards:
            forward = random.choice(forwards)
            backward = min(backwards, key=lambda i: abs(i - forward - random.randrange(6)))
            pair = Pair(row[forward].actions[0], row[backward].actions[0])
            row[forward] = pair
            del row[backward]
    return _with(schedule, rows)


def relabel(schedule: Schedule, random: Random) -> Schedule:
    """An action gets another micro-batch, chunk or kind; now and then one that there is not."""
    rows, rank, place = _somewhere(schedule, random)
    cell = rows[rank][place]
    action = random.choice(cell.actions)
    last_mb = schedule.microbatches_per_pipe + (random.random() < 0.1)
    last_chunk = schedule.vpp + (random.random() < 0.1)
    changed = random.choice(
        (
            action._replace(mb=random.randrange(last_mb)),
            action._replace(chunk=random.randrange(last_chunk)),
            action._replace(kind=random.choice(list(Kind))),
        )
    )
    if isinstance(cell, Action):
        rows[rank][place] = changed
    else:
        halves = [changed if half == action else half for half in cell]
        kinds = (halves[0].kind, halves[1].kind)
        rows[rank][place : place + 1] = [Pair(*halves)] if kinds == (Kind.F, Kind.B) else halves
    return _with(schedule, rows)


def receive(schedule: Schedule, random: Random) -> Schedule:
    """The receives of a channel: two swapped, one moved, left out or posted twice."""
    orders = receive_orders(schedule)
    if not orders:
        return schedule
    channel = random.choice(sorted(orders))
    labels = list(orders[channel])
    if not labels:
        return schedule
    place = random.randrange(len(labels))
    what = random.random()
    if what < 0.5:
        other = _near(place, len(labels), random)
        labels[place], labels[other] = labels[other], labels[place]
    elif what < 0.8:
        label = labels.pop(place)
        labels.insert(_near(place, len(labels) + 1, random), label)
    elif what < 0.9:
        del labels[place]
    else:
        labels.insert(place, labels[place])
    return replace(schedule, receives={**schedule.receives, channel: tuple(labels)})


MUTATIONS: tuple[Mutation, ...] = (
    drop,
    double,
    swap,
    move,
    repair,
    relabel,
    receive,
)


def receive_orders(schedule: Schedule) -> dict[tuple[int, int], tuple[Action, ...]]:
    """The receives of every channel as they are posted now."""
    program = lower_cells(schedule)
    orders = {}
    for index in range(program.num_lanes):
        lane = program.lane(index)
        if lane.kind is LaneKind.RECV:
            ops = (program.op(i) for i in range(program.lane_ptr[index], program.lane_ptr[index + 1]))
            orders[lane.peer, lane.rank] = tuple(Action(Kind[op.label[0]], op.mb, op.chunk) for op in ops)
    return orders


def _somewhere(schedule: Schedule, random: Random) -> tuple[Rows, int, int]:
    rows = [list(row) for row in schedule.rows]
    rank = random.choice([r for r, row in enumerate(rows) if row])
    return rows, rank, random.randrange(len(rows[rank]))


def _near(place: int, length: int, random: Random) -> int:
    if random.random() < 0.3:
        return random.randrange(length)
    return max(0, min(length - 1, place + random.choice((-3, -2, -1, 1, 2, 3))))


def _with(schedule: Schedule, rows: Rows) -> Schedule:
    return replace(schedule, rows=tuple(map(tuple, rows)))
