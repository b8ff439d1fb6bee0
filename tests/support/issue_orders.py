"""Random orders of issue: steps of every schedule, messages issued in one order over the step, then disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from tests.support.brute_force import Compute, Machine
from treadle.ir import Action, Schedule
from treadle.ir.turn import CELL, Turn
from treadle.schedules import SCHEDULES


@dataclass(frozen=True)
class Item:
    """A turn, with its cell: itself, the maker of a send, the reader of a receive; and with the name of its message."""

    turn: Turn
    cell: int
    name: Action | None = None


Row = list[Item]
Rows = list[Row]


def random_issue(random: Random) -> tuple[Schedule, list[str]]:
    """Return a schedule with an order of issue, and the names of what was done to it."""
    schedule = _random_schedule(random)
    rows = _one_order(schedule, random)
    done: list[str] = []
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 5, 9))):
        name = random.choice(list(MUTATIONS))
        changed = MUTATIONS[name]([list(row) for row in rows], random)
        if changed is not None and all(map(_in_turn, changed)):
            rows, done = changed, [*done, name]
    return _with_issue(schedule, rows), done


def _random_schedule(random: Random) -> Schedule:
    while True:
        family = SCHEDULES[random.choice(list(SCHEDULES))]
        pp, vpp, num_mb = random.choice((2, 2, 3, 4, 4, 5, 6, 8)), random.choice((1, 2, 2, 3)), random.randint(1, 10)
        try:
            return family.generate(family.size(pp, vpp if not family.vpps else None, num_mb))
        except ValueError:
            continue


def _one_order(schedule: Schedule, random: Random) -> Rows:
    """Run the cells one after the other, in any order that they allow; both ends issue a message when it is made."""
    machine = Machine(schedule, None, "sender")
    cells = [list(lane) for lane in machine.compute]
    sends: dict[int, list[tuple[int, int, Action]]] = {}
    for (src, dst), link in machine.links.items():
        for send in link.sends:
            (maker,) = send.needs
            sends.setdefault(id(maker), []).append((src, dst, send.what))
    readers = {
        (src, dst, receive.what): cells[dst].index(receive.reader)
        for (src, dst), link in machine.links.items()
        for receive in link.receives
        if isinstance(receive.reader, Compute)
    }
    rows: Rows = [[] for _ in cells]
    at = [0] * len(cells)
    came: set[tuple[int, int, Action]] = set()
    while True:
        ready = [
            rank
            for rank, row in enumerate(cells)
            if at[rank] < len(row)
            and not any(
                dst == rank and reader == at[rank] and (src, dst, name) not in came
                for (src, dst, name), reader in readers.items()
            )
        ]
        if not ready:
            return rows
        rank = random.choice(ready)
        cell = at[rank]
        rows[rank].append(Item(CELL, cell))
        at[rank] += 1
        for src, dst, name in sends.get(id(cells[rank][cell]), ()):
            rows[src].append(Item(Turn(">", dst), cell, name))
            rows[dst].append(Item(Turn("<", src), readers[src, dst, name], name))
            came.add((src, dst, name))


def _in_turn(row: Row) -> bool:
    """A send after its cell, a receive before its reader, sends of a channel and cells in order, waits after sends."""
    cell, sent = -1, dict[int, list[int]]()
    for place, item in enumerate(row):
        turn = item.turn
        if turn.joined and (place == 0 or row[place - 1].turn.verb not in "<>"):
            return False
        if turn.verb == ".":
            if item.cell != cell + 1:
                return False
            cell += 1
        elif turn.verb == ">":
            sent.setdefault(turn.peer, []).append(place)
            if item.cell > cell:
                return False
        elif turn.verb == "<":
            if item.cell <= cell:
                return False
        elif turn.place >= len(sent.get(turn.peer, ())):
            return False
    return True


def _with_issue(schedule: Schedule, rows: Rows) -> Schedule:
    receives: dict[tuple[int, int], list[Action]] = {}
    for src in range(len(rows)):
        for item in rows[src]:
            if item.turn.verb == ">":
                receives.setdefault((src, item.turn.peer), [])
    for dst, row in enumerate(rows):
        for item in row:
            if item.turn.verb == "<" and item.name is not None:
                receives.setdefault((item.turn.peer, dst), []).append(item.name)
    issue = tuple(tuple(item.turn for item in row) for row in rows)
    return replace(schedule, receives={key: tuple(names) for key, names in receives.items()}, issue=issue)


# -- what is done to orders -----------------------------------------------------------------------------------------


def _places(row: Row, verbs: str) -> list[int]:
    return [place for place, item in enumerate(row) if item.turn.verb in verbs]


def _anywhere(rows: Rows, verbs: str, random: Random) -> tuple[Row, int] | None:
    found = [(row, place) for row in rows for place in _places(row, verbs)]
    return random.choice(found) if found else None


def _swap_neighbours(rows: Rows, random: Random) -> Rows | None:
    found = _anywhere(rows, ".<>", random)
    if found is not None:
        row, place = found
        if place + 1 < len(row):
            row[place], row[place + 1] = _alone(row[place + 1]), _alone(row[place])
    return rows


def _alone(item: Item) -> Item:
    return replace(item, turn=item.turn._replace(joined=False))


def _move(verbs: str, way: int) -> Callable[[Rows, Random], Rows | None]:
    def move(rows: Rows, random: Random) -> Rows | None:
        found = _anywhere(rows, verbs, random)
        if found is None:
            return None
        row, place = found
        item = _alone(row.pop(place))
        _part(row, place)
        target = min(max(0, place + way * random.randint(1, 8)), len(row))
        _part(row, target)
        row.insert(target, item)
        return rows

    return move


def _part(row: Row, place: int) -> None:
    """What stands here begins a batch."""
    if place < len(row):
        row[place] = _alone(row[place])


def _defer(row: Row) -> Row:
    """Each receive just before its reader."""
    cells_first = [_alone(item) for item in row if item.turn.verb != "<"]
    late: Row = []
    for item in cells_first:
        if item.turn.verb == ".":
            late += [_alone(each) for each in row if each.turn.verb == "<" and each.cell == item.cell]
        late.append(item)
    return late


def _defer_rank(rows: Rows, random: Random) -> Rows:
    rank = random.randrange(len(rows))
    rows[rank] = _defer(rows[rank])
    return rows


def _defer_all(rows: Rows, random: Random) -> Rows:
    return [_defer(row) for row in rows]


def _batch(rows: Rows, random: Random) -> Rows | None:
    places = [(row, p) for row in rows for p in _places(row, "<>") if p and row[p - 1].turn.verb in "<>"]
    if not places:
        return None
    row, place = random.choice(places)
    joined = row[place].turn.joined
    row[place] = replace(row[place], turn=row[place].turn._replace(joined=not joined))
    return rows


def _batch_rank(rows: Rows, random: Random) -> Rows:
    row = random.choice(rows)
    for place in range(1, len(row)):
        if row[place].turn.verb in "<>" and row[place - 1].turn.verb in "<>":
            row[place] = replace(row[place], turn=row[place].turn._replace(joined=True))
    return rows


def _wait(rows: Rows, random: Random) -> Rows | None:
    found = _anywhere(rows, ">", random)
    if found is None:
        return None
    row, place = found
    peer = row[place].turn.peer
    number = sum(item.turn.verb == ">" and item.turn.peer == peer for item in row[:place])
    target = min(place + random.randint(1, 6), len(row))
    _part(row, target)
    row.insert(target, Item(Turn("wait>", peer, place=number), -1))
    return rows


def _cross(rows: Rows, random: Random) -> Rows | None:
    """Two receives of a channel change places."""
    found = _anywhere(rows, "<", random)
    if found is None:
        return None
    row, place = found
    later = [p for p in _places(row, "<") if p > place and row[p].turn.peer == row[place].turn.peer]
    if later:
        first, second = row[place], row[later[0]]
        row[place] = replace(second, turn=first.turn)
        row[later[0]] = replace(first, turn=second.turn)
    return rows


def _drop_receive(rows: Rows, random: Random) -> Rows | None:
    if random.random() < 0.8:  # it never ends, so it shows little
        return None
    found = _anywhere(rows, "<", random)
    if found is None:
        return None
    row, place = found
    del row[place]
    _part(row, place)
    return rows


MUTATIONS: dict[str, Callable[[Rows, Random], Rows | None]] = {
    "neighbours swapped": _swap_neighbours,
    "receive earlier": _move("<", -1),
    "receive later": _move("<", 1),
    "send later": _move(">", 1),
    "a rank's receives before their readers": _defer_rank,
    "all receives before their readers": _defer_all,
    "joined or parted": _batch,
    "a rank's neighbours joined": _batch_rank,
    "wait": _wait,
    "receives crossed": _cross,
    "receive dropped": _drop_receive,
}


def random_issues(seed: int, num: int) -> Iterator[tuple[Schedule, list[str]]]:
    """Return `num` of them."""
    random = Random(seed)
    for _ in range(num):
        yield random_issue(random)
