"""The CSV form of torch.distributed.pipelining: a line a rank, an entry a cell, named by stage.

    0F0,0F1,0B0,0B1                     3F1: stage 3, forward, micro-batch 1; B, I and W likewise
    1F0,1B0,1F1,1B1                     (4F1;3B0)OVERLAP_F_B: an overlapped cell; an empty entry: a bubble

torch's own files may hold the messages too (its compute_comms form), and what FSDP does:

    0F0,0SEND_F0,0RECV_B0,0B0           0SEND_F0: stage 0 sends what it made of micro-batch 0
    1RECV_F0,1F0,1B0,1SEND_B0           1RECV_F0: stage 1 takes what its forward reads

torch 2.15 and later also write where a rank waits for the end of a send: `0WAIT_SEND_F0`, until stage 1 has posted
`1RECV_F0`. `parse` reads all of them and keeps their order (`Schedule.issue`). `dump` writes the messages of a schedule
that has an order of issue, else cells only: torch adds the rest when it loads the file. A rank's chunks are its stages
from the lowest up. The form has one rank for each stage and counts nothing that no entry names: `dump` refuses what it
would lose. torch takes `0F0x` for `0F0`; here an entry is read whole or not at all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from treadle.ir import Action, Cell, Channel, Kind, Pair, Placement, Schedule
from treadle.ir.dependency import RULE
from treadle.ir.ops import LaneKind
from treadle.ir.program import Program
from treadle.ir.text import ParseError
from treadle.ir.turn import CELL, Turn
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder

_NUMBER = "(0|[1-9][0-9]*)"
_ACTION = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")
_PAIR = re.compile(rf"\({_NUMBER}(F){_NUMBER};{_NUMBER}(B){_NUMBER}\)OVERLAP_F_B")
_MESSAGE = re.compile(f"{_NUMBER}(SEND|RECV|WAIT_SEND)_([FB]){_NUMBER}")
_SHARDING = re.compile(f"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)")
_ENTRIES = (
    "0F0, 0B0, 0I0, 0W0, (1F1;0B0)OVERLAP_F_B, 0SEND_F0, 1RECV_F0, 0WAIT_SEND_F0, 1SEND_B0, 0RECV_B0, 1WAIT_SEND_B0, "
    "0UNSHARD, 0RESHARD, 0REDUCE_GRAD or 0WAIT_REDUCE_GRAD"
)

_STEP = {kind: need.step for kind in (Kind.F, Kind.B) for need in RULE[kind] if need.step != 0}
"""Stages along the pipe from the reader of a message to its maker."""


def dump(schedule: Schedule) -> str:
    """A line a rank: the cells, and the messages if their order is given. A ValueError names what cannot be carried."""
    if schedule.issue:
        return "".join(",".join(entry.word for entry in entries) + "\n" for entries in issued(schedule))
    _check_carried(schedule)
    lines = (
        ",".join(_entry(schedule.placement.stages[rank], cell) for cell in row)
        for rank, row in enumerate(schedule.rows)
    )
    return "\n".join(lines) + "\n"


def _check_carried(schedule: Schedule) -> None:
    lost = _lost(schedule)
    if lost is not None:
        raise ValueError(f"torch's CSV cannot carry {schedule.name}: {lost}")


def _lost(schedule: Schedule) -> str | None:
    """Say which part of a schedule the file cannot hold, and the way out; None if it holds all."""
    placement, wayout = schedule.placement, "use `format='text'` or `format='json'`"
    if placement.num_pipes > 1:
        return (
            f"it has one rank for each stage, and the second direction of a {placement.name} placement, "
            f"which puts each stage on two, would be lost; generate dualpipev instead, or {wayout}"
        )
    if any(turn.joined for turns in schedule.issue for turn in turns):
        return f"it issues messages in batches; {wayout}"
    if schedule.receives and not schedule.issue:
        channels = ", ".join(f"{src}>{dst}" for src, dst in sorted(schedule.receives))
        return f"the order of receives given for {channels} would be lost; {wayout}"
    for rank, stages in enumerate(placement.stages):
        chunks = {action.chunk for action in schedule.actions(rank)}
        for chunk in sorted(chunks - set(range(placement.vpp))):
            return f"chunk {chunk} of rank {rank} has no stage to name it by; give it one, or {wayout}"
        for chunk in sorted(set(range(placement.vpp)) - chunks):
            return f"stage {stages[chunk]} has no cell that would show it; give it its cells, or {wayout}"
    seen = 1 + max(action.mb for rank in range(schedule.pp) for action in schedule.actions(rank))
    if seen != schedule.num_microbatches:
        return (
            f"it counts micro-batches by their cells, which would make {schedule.num_microbatches} of them "
            f"{seen}; add the missing cells, or {wayout}"
        )
    return None


def _entry(stages: tuple[int, ...], cell: Cell) -> str:
    words = [f"{stages[a.chunk]}{a.kind.name}{a.mb}" for a in cell.actions]
    return words[0] if isinstance(cell, Action) else f"({';'.join(words)})OVERLAP_F_B"


class Issued(NamedTuple):
    """An entry as it is written; `cell` is None for a message and for the wait for one."""

    word: str
    cell: Cell | None = None


def issued(schedule: Schedule) -> Iterator[list[Issued]]:
    """Yield each rank's entries in its order of issue. A ValueError names what cannot be carried."""
    _check_carried(schedule)
    program = lower_cells(schedule)
    order, placement = IssueOrder.given(schedule, program), schedule.placement
    for rank, (start, stop) in enumerate(pairwise(order.ptr.tolist())):
        entries = []
        for item in range(start, stop):
            op = program.op(int(order.op[item]))
            if op.lane.kind is LaneKind.COMPUTE:
                if not program.joined[op.index]:
                    cell = schedule.rows[rank][op.cell]
                    entries.append(Issued(_entry(placement.stages[rank], cell), cell))
                continue
            label = _label(program, op.index)
            channel = (rank, op.lane.peer) if op.kind.is_send else (op.lane.peer, rank)
            verb = "WAIT_SEND" if order.waits[item] else op.kind.name[:4]
            entries.append(Issued(_message_word(placement, channel, label, verb)))
        yield entries


@dataclass(frozen=True)
class _Line:
    """A line of the file: a rank."""

    source: str
    number: int
    text: str

    def error(self, message: str, column: int = 0) -> ParseError:
        return ParseError(message, self.source, self.number, self.text, column)


class _Part(NamedTuple):
    """An action as the file names it: which chunk its stage is shows when all lines are read."""

    stage: int
    kind: Kind
    mb: int


@dataclass(frozen=True)
class _Entry:
    """One entry: a cell (`verb` is empty), a message (SEND, RECV, WAIT_SEND), or what FSDP does at `stage`."""

    verb: str
    stage: int
    parts: tuple[_Part, ...]
    word: str
    line: _Line
    column: int

    def error(self, message: str) -> ParseError:
        return self.line.error(message, self.column)


_Rank: TypeAlias = tuple[_Line, list[_Entry]]


def parse(text: str, source: str = "<text>") -> Schedule:
    """Read torch's and torchtitan's files, with messages or without; bubbles and FSDP's entries are dropped.

    RECV entries become `receives` where they differ from the sender's order; with SEND entries beside them, the order
    of all entries becomes `issue`. SEND entries must say what a
    schedule does anyway: send in the order in which the actions run. WAIT_SEND entries must not hold it up for ever.
    """
    ranks = [_read_line(_Line(source, number, line)) for number, line in enumerate(text.splitlines(), 1)]
    if not any(entries for _, entries in ranks):
        raise ValueError(f"{source}: no entries; torch's CSV has a line such as 0F0,0B0 for each rank")
    placement = _placement(source, ranks)
    rows = tuple(tuple(_cells(placement, entries)) for _, entries in ranks)
    num_mb = 1 + max(action.mb for row in rows for cell in row for action in cell.actions)
    return _with_messages(Schedule("custom", placement, num_mb, rows), ranks)


def _read_line(line: _Line) -> _Rank:
    entries, start = [], 0
    for field in line.text.split(","):
        word = field.strip()  # torch strips them too
        if word:
            entries.append(_read_entry(word, line, start + field.index(word)))
        start += len(field) + 1
    return line, entries


def _read_entry(word: str, line: _Line, column: int) -> _Entry:
    if match := _ACTION.fullmatch(word) or _PAIR.fullmatch(word):
        numbers = iter(match.groups())
        parts = tuple(_Part(int(s), Kind[k], int(m)) for s, k, m in zip(numbers, numbers, numbers, strict=True))
        return _Entry("", parts[0].stage, parts, word, line, column)
    if match := _MESSAGE.fullmatch(word):
        part = _Part(int(match[1]), Kind[match[3]], int(match[4]))
        return _Entry(match[2], part.stage, (part,), word, line, column)
    if match := _SHARDING.fullmatch(word):
        return _Entry(match[2], int(match[1]), (), word, line, column)
    good = (pattern.match(word) for pattern in (_ACTION, _PAIR, _MESSAGE, _SHARDING))
    junk = max((match.end() for match in good if match), default=0)
    raise line.error(f"{word!r} is not an entry of torch's CSV; entries are {_ENTRIES}", column + junk)


def _placement(source: str, ranks: list[_Rank]) -> Placement:
    """Each rank holds the stages it computes."""
    holder: dict[int, int] = {}
    for rank, (_, entries) in enumerate(ranks):
        for entry in entries:
            for part in entry.parts if not entry.verb else ():
                if holder.setdefault(part.stage, rank) != rank:
                    raise entry.error(
                        f"stage {part.stage} is on rank {holder[part.stage]} and on rank {rank}; this form "
                        "has one rank for each stage (two directions need the text or the JSON form)"
                    )
    table = [tuple(sorted(s for s in holder if holder[s] == rank)) for rank in range(len(ranks))]
    for rank, (line, entries) in enumerate(ranks):
        if len(table[rank]) != len(table[0]) or not table[rank]:
            raise line.error(
                f"rank {rank} computes {_stages(table[rank])}, rank 0 computes {_stages(table[0])}; "
                "a line is a rank, and every rank holds as many stages as the others"
            )
        for entry in entries:
            if holder.get(entry.stage) != rank:
                raise entry.error(f"{entry.word} is of a stage that rank {rank} does not compute; move it to its rank")
    try:
        return Placement.table(tuple(table))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _stages(stages: tuple[int, ...]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if stages else "no stage"


def _cells(placement: Placement, entries: list[_Entry]) -> Iterator[Cell]:
    for entry in entries:
        if not entry.verb:
            actions = [Action(kind, mb, placement.holder(stage)[1]) for stage, kind, mb in entry.parts]
            yield actions[0] if len(actions) == 1 else Pair(*actions)


class _Posted(NamedTuple):
    """A SEND or RECV: its label, and how many cells of its rank stand before it."""

    label: Action
    num_before: int
    entry: _Entry


_Posts: TypeAlias = dict[Channel, list[_Posted]]


def _posts(placement: Placement, ranks: list[_Rank], verb: str) -> _Posts:
    """All entries of this verb, channel by channel."""
    found: _Posts = defaultdict(list)
    for _, entries in ranks:
        num_before = 0
        for entry in entries:
            num_before += not entry.verb
            if entry.verb == verb:
                channel, label = _message(placement, entry)
                found[channel].append(_Posted(label, num_before, entry))
    return found


def _message(placement: Placement, entry: _Entry) -> tuple[Channel, Action]:
    """The channel and the label of a SEND or WAIT_SEND, which name the maker's stage, or of a RECV, the reader's."""
    stage, kind, mb = entry.parts[0]
    reader = stage if entry.verb == "RECV" else stage - _STEP[kind]
    maker = reader + _STEP[kind]
    for end in (maker, reader):
        if not 0 <= end < placement.num_stages:
            last = placement.num_stages - 1
            raise entry.error(f"{entry.word} needs a stage {end}, and the stages are 0 to {last}; leave it out")
    (src, _), (dst, chunk) = placement.holder(maker), placement.holder(reader)
    if src == dst:
        raise entry.error(
            f"{entry.word} is no message: stages {maker} and {reader} are both on rank {src}; leave it out"
        )
    return (src, dst), Action(kind, mb, chunk)


def _with_messages(schedule: Schedule, ranks: list[_Rank]) -> Schedule:
    """Check the sends and take over the receives of a file that has them."""
    sends, receives, waits = (_posts(schedule.placement, ranks, verb) for verb in ("SEND", "RECV", "WAIT_SEND"))
    if sends:
        _check_sends(schedule, sends, [line for line, _ in ranks])
    if waits:
        _check_waits(schedule.placement, ranks)
    if not receives:
        return schedule
    schedule = _with_receives(schedule, receives)
    _check_receives(schedule, receives)
    return replace(schedule, issue=_issue(schedule.placement, ranks)) if sends else schedule


def _issue(placement: Placement, ranks: list[_Rank]) -> tuple[tuple[Turn, ...], ...]:
    """The order of each rank's cells and messages."""
    rows = []
    for _, entries in ranks:
        sent: dict[int, list[Action]] = defaultdict(list)
        turns = []
        for entry in entries:
            if not entry.verb:
                turns.append(CELL)
            elif entry.verb in ("SEND", "RECV", "WAIT_SEND"):
                (src, dst), label = _message(placement, entry)
                if entry.verb == "RECV":
                    turns.append(Turn("<", src))
                elif entry.verb == "SEND":
                    sent[dst].append(label)
                    turns.append(Turn(">", dst))
                else:
                    turns.append(Turn("wait>", dst, place=sent[dst].index(label)))
        rows.append(tuple(turns))
    return tuple(rows)


def _lanes(program: Program, kind: LaneKind) -> dict[Channel, range]:
    """The ops of each channel's lane at one end."""
    lanes = {}
    for index in range(program.num_lanes):
        lane = program.lane(index)
        if lane.kind is kind:
            channel = (lane.rank, lane.peer) if kind is LaneKind.SEND else (lane.peer, lane.rank)
            lanes[channel] = range(int(program.lane_ptr[index]), int(program.lane_ptr[index + 1]))
    return lanes


def _label(program: Program, op: int) -> Action:
    kind = Kind[program.op(op).kind.name[-1]]
    return Action(kind, int(program.mb[op]), int(program.chunk[op]))


def _check_sends(schedule: Schedule, sends: _Posts, lines: list[_Line]) -> None:
    """Each channel's k-th SEND is of the k-th message that the sender's cells make, and after its cell."""
    program = lower_cells(schedule)
    lanes = _lanes(program, LaneKind.SEND)
    for channel in sorted(set(lanes) | set(sends)):
        made = [(_label(program, op), int(program.cell[program.deps(op)[0]])) for op in lanes.get(channel, ())]
        for k, (label, num_before, entry) in enumerate(sends.get(channel, ())):
            if k >= len(made):
                raise entry.error(f"{entry.word} sends again, or what rank {channel[0]} never makes; leave it out")
            if label != made[k][0]:
                due = _message_word(schedule.placement, channel, made[k][0])
                raise entry.error(
                    f"{entry.word} is out of turn: a schedule sends in the order in which its actions run, "
                    f"and {due} is next from rank {channel[0]} to rank {channel[1]}"
                )
            if num_before <= made[k][1]:
                raise entry.error(f"{entry.word} stands before the action that makes it; move it after")
        num_sent = len(sends.get(channel, ()))
        if num_sent < len(made):
            due = _message_word(schedule.placement, channel, made[num_sent][0])
            raise lines[channel[0]].error(
                f"rank {channel[0]} never does {due}; add it, or leave out all SEND entries: they follow from the cells"
            )


def _message_word(placement: Placement, channel: Channel, label: Action, verb: str = "SEND") -> str:
    """The entry of a message: a SEND or WAIT_SEND names the maker's stage, a RECV the reader's."""
    reader = placement.stage(channel[1], label.chunk)
    return f"{reader if verb == 'RECV' else reader + _STEP[label.kind]}{verb}_{label.kind.name}{label.mb}"


def _with_receives(schedule: Schedule, posted: _Posts) -> Schedule:
    """`receives` for the channels whose RECV entries are not what follows from the cells anyway."""
    program = lower_cells(schedule)
    default = {
        channel: tuple(_label(program, op) for op in ops) for channel, ops in _lanes(program, LaneKind.RECV).items()
    }
    given = {channel: tuple(post.label for post in posts) for channel, posts in posted.items()}
    channels = sorted(set(default) | set(given))
    differing = {c: given.get(c, ()) for c in channels if given.get(c, ()) != default.get(c, ())}
    return replace(schedule, receives=differing)


def _check_receives(schedule: Schedule, posted: _Posts) -> None:
    """A RECV stands before the cell that reads it: a schedule cannot say otherwise, nor torch run it."""
    program = lower_cells(schedule)
    reader = {need: op for op in range(program.num_ops) for need in program.deps(op)}
    for channel, ops in _lanes(program, LaneKind.RECV).items():
        for op, (_, num_before, entry) in zip(ops, posted[channel], strict=True):
            if op in reader and num_before > program.cell[reader[op]]:
                raise entry.error(f"{entry.word} stands after the action that reads it; move it before")


_Post: TypeAlias = tuple[str, _Part]
"""A SEND or a RECV."""


class _Blocked(NamedTuple):
    """An entry at which a rank stops for ever, and the post of another rank that it waits for."""

    entry: _Entry
    post: _Post


def _check_waits(placement: Placement, ranks: list[_Rank]) -> None:
    """Each SEND is waited for once, after it, and no wait is part of a deadlock."""
    for _, entries in ranks:
        pending: dict[_Part, _Entry] = {}
        for entry in entries:
            if entry.verb == "SEND":
                pending[entry.parts[0]] = entry
            elif entry.verb == "WAIT_SEND" and pending.pop(entry.parts[0], None) is None:
                send = entry.word.replace("WAIT_", "")
                raise entry.error(
                    f"{entry.word} waits for no send: it stands once, after {send}; move it, or leave it out"
                )
        for entry in pending.values():
            wait = entry.word.replace("SEND", "WAIT_SEND")
            raise entry.error(
                f"nothing waits for {entry.word}; add {wait} after it, or leave out all WAIT_SEND entries"
            )
    blocked = _run(ranks, waits=True)
    if blocked and not _run(ranks, waits=False):  # else the cells are a deadlock without waits: the verifier reports it
        _refuse_wait(placement, blocked)


def _run(ranks: list[_Rank], *, waits: bool) -> dict[int, _Blocked]:
    """Run the entries of all ranks in order, with waits or without, and return the ranks that do not end."""
    rows = [[e for e in entries if e.parts and (waits or e.verb != "WAIT_SEND")] for _, entries in ranks]
    missing = {(entry.verb, entry.parts[0]) for row in rows for entry in row if entry.verb in ("SEND", "RECV")}
    at = [0] * len(rows)
    blocked: dict[int, _Blocked] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            blocked.pop(rank, None)
            while at[rank] < len(row) and rank not in blocked:
                entry = row[at[rank]]
                for post in _awaited(entry):
                    if post in missing:
                        blocked[rank] = _Blocked(entry, post)
                        break
                else:
                    missing.discard((entry.verb, entry.parts[0]))
                    at[rank] += 1
                    moved = True
    return blocked


def _awaited(entry: _Entry) -> Iterator[_Post]:
    """The posts without which an entry does not end; those that are not in the file never hold it up."""
    for stage, kind, mb in entry.parts:
        if entry.verb == "WAIT_SEND":
            yield "RECV", _Part(stage - _STEP[kind], kind, mb)
        for need in RULE[kind] if not entry.verb else ():
            if need.step != 0:
                yield "SEND", _Part(stage + need.step, need.kinds[0], mb)


def _refuse_wait(placement: Placement, blocked: dict[int, _Blocked]) -> None:
    """Name a wait in a circle of ranks that wait for each other."""
    rank, passed = min(blocked), list[int]()
    while rank not in passed:
        passed.append(rank)
        rank = placement.holder(blocked[rank].post[1].stage)[0]
    circle = [blocked[rank] for rank in passed[passed.index(rank) :]]
    entry, (_, (stage, kind, mb)) = next(each for each in circle if each.entry.verb == "WAIT_SEND")
    peer = placement.holder(stage)[0]
    raise entry.error(
        f"{entry.word} is part of a deadlock: it lasts until rank {peer} does {stage}RECV_{kind.name}{mb}, which comes "
        f"after {blocked[peer].entry.word}, which needs this rank to go on; move {entry.word} to the end of its line"
    )
