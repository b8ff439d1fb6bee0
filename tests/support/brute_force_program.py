"""A brute-force executor of Programs: the oracle that tests hold the verifier of Programs against.

It was written from "Programs" of docs/reference/semantics.md alone. It takes the data types of
`treadle.ir` and nothing else, and restates what ops need of each other (`brute_force_labels`) and what they hold
(`brute_force_memory`), so as to share no mistake with what it checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import ceil
from typing import TypeAlias

from tests.support.brute_force_labels import (
    COPIES,
    MESSAGES,
    OF_BUCKETS,
    RECEIVES,
    SENDS,
    STEP_ENDS,
    Name,
    Rules,
)
from tests.support.brute_force_memory import Memory
from treadle.ir.ops import COMMUNICATION, LaneKind, OpKind
from treadle.ir.program import Program

FORWARD_MESSAGES = (OpKind.SEND_F, OpKind.RECV_F)
CHANNEL_LANES = (LaneKind.SEND, LaneKind.RECV)
REDUCTIONS = (OpKind.REDUCE_GRAD, OpKind.REDUCE_SCATTER, OpKind.REDUCE_TIED)

MOST_STUCK_NOTED = 20


@dataclass(frozen=True)
class Outcome:
    """What became of an execution. `peak` (bytes a rank) and `makespan` are of one that ends."""

    symptoms: frozenset[str]
    peak: tuple[int, ...] | None
    makespan: int | None
    notes: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.symptoms


Note: TypeAlias = tuple[str, str]
"""A symptom and what shows it."""


@dataclass(eq=False, slots=True)
class Op:
    """One thing a lane does. A dependency that is None is one that nothing provides."""

    index: int
    kind: OpKind
    name: Name
    lane: Lane
    size: int
    launch: int
    joined: bool
    known: bool = False
    deps: list[Op | None] = field(default_factory=list)
    step: Step = field(init=False)

    def __post_init__(self) -> None:
        self.step = Step([self])

    def __str__(self) -> str:
        return f"op {self.index} ({self.name})"


@dataclass(eq=False, slots=True)
class Lane:
    """An in-order queue of a rank."""

    rank: int
    kind: LaneKind
    peer: int
    group: int
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Step:
    """Ops that start and end as one, and what they wait for."""

    ops: list[Op]
    waits: set[Step] = field(default_factory=set)
    never: str = ""


Span: TypeAlias = tuple[int, int]
"""A start and an end."""


class Machine:
    """A Program as ops on lanes, those that go together as one step."""

    def __init__(self, program: Program, dur: Sequence[int]) -> None:
        self.rules = Rules(program.layout)
        self.lanes, self.ops = _read(program)
        self._dur = dur
        for op in self.ops:
            op.known = self.rules.knows(op.name, op.lane.kind, op.lane.peer)
        self.groups = self._groups()
        self._join()
        self.steps = list(dict.fromkeys(op.step for op in self.ops))
        self._wait()

    def _groups(self) -> list[list[Lane]]:
        groups: dict[int, list[Lane]] = defaultdict(list)
        for lane in self.lanes:
            if lane.group != -1:
                groups[lane.group].append(lane)
        return list(groups.values())

    def _join(self) -> None:
        """Makes one step of what goes together, and marks what never ends for want of its like."""
        for lane in self.lanes:
            for before, op in pairwise(lane.ops):
                if op.joined:
                    _merge(before, op)
        for group in self.groups:
            shortest = min(len(lane.ops) for lane in group)
            for k, together in enumerate(_kth_ops(group)):
                for before, op in pairwise(together):
                    _merge(before, op)
                if k >= shortest:
                    together[0].step.never = "a lane of its group is shorter"
                elif any(_mismatch(a, b) for a, b in combinations(together, 2)):
                    together[0].step.never = "it differs from what it goes with"

    def _wait(self) -> None:
        for lane in self.lanes:
            for before, op in pairwise(lane.ops):
                # a joined op starts with the op before it, so it is not after it
                if not op.joined:
                    op.step.waits.add(before.step)
        for op in self.ops:
            for dep in op.deps:
                if dep is None:
                    op.step.never = f"{op} waits for what nothing provides"
                else:
                    op.step.waits.add(dep.step)

    def run(self, besides: Iterable[tuple[Op, Op]] = ()) -> dict[Step, Span]:
        """When each step starts and ends, as soon as it can, in an order they can end in; those that never end are
        not there. `besides`: pairs of ops of which the second also waits for the first.
        """
        waits = {step: set(step.waits) for step in self.steps}
        for first, second in besides:
            waits[second.step].add(first.step)
        followers = _turned(waits)
        spans: dict[Step, Span] = {}
        start = dict.fromkeys(self.steps, 0)
        ready = deque(step for step in self.steps if not waits[step] and not step.never)
        while ready:
            step = ready.popleft()
            end = start[step] + max(self._dur[op.index] for op in step.ops)
            spans[step] = (start[step], end)
            for follower in followers[step]:
                waits[follower].remove(step)
                start[follower] = max(start[follower], end)
                if not waits[follower] and not follower.never:
                    ready.append(follower)
        return spans

    def befores(self, order: Iterable[Step]) -> dict[Step, int]:
        """For each step the set of steps that a chain leads from to it, as bits by their place in `steps`.

        Looks at steps until nothing changes, first in `order`, which is sound in any order and fast in a good one.
        """
        bit = self.bits()
        followers = _turned({step: step.waits for step in self.steps})
        found = dict.fromkeys(self.steps, 0)
        todo = deque(dict.fromkeys((*order, *self.steps)))
        waiting = set(todo)
        while todo:
            step = todo.popleft()
            waiting.remove(step)
            reached = 0
            for before in step.waits:
                reached |= found[before] | bit[before]
            if reached != found[step]:
                found[step] = reached
                again = [follower for follower in followers[step] if follower not in waiting]
                todo += again
                waiting.update(again)
        return found

    def bits(self) -> dict[Step, int]:
        return {step: 1 << place for place, step in enumerate(self.steps)}


def execute(program: Program, dur: Sequence[int]) -> Outcome:
    """Runs a Program to its end, or to where it can do no more; `dur` is a time for each op."""
    machine = Machine(program, dur)
    spans = machine.run()
    hangs = len(spans) < len(machine.steps)
    notes = list(_miscounted(machine))
    notes += _stuck(machine, spans)
    notes += _wrong_data(machine, spans)
    notes += _crossings(machine)
    notes += _launch_order(machine, hangs)
    return Outcome(
        frozenset(symptom for symptom, _ in notes),
        None if hangs else _peaks(machine, spans),
        None if hangs else max((end for _, end in spans.values()), default=0),
        tuple(f"{symptom}: {text}" for symptom, text in notes),
    )


def _read(program: Program) -> tuple[list[Lane], list[Op]]:
    columns = (program.kind, program.mb, program.chunk, program.layer, program.size_bytes, program.launch)
    kinds, mbs, chunks, layers, sizes, launches = (column.tolist() for column in columns)
    joined, bounds = program.joined.tolist(), program.lane_ptr.tolist()
    lanes, ops = [], []
    for index in range(program.num_lanes):
        header = program.lane(index)
        lane = Lane(header.rank, header.kind, header.peer, int(program.lane_group[index]))
        for i in range(bounds[index], bounds[index + 1]):
            name = Name(OpKind(kinds[i]), lane.rank, chunks[i], mbs[i], layers[i])
            lane.ops.append(Op(i, name.kind, name, lane, sizes[i], launches[i], joined[i]))
        lanes.append(lane)
        ops += lane.ops
    starts, deps = program.dep_ptr.tolist(), program.dep.tolist()
    for op in ops:
        op.deps = [ops[d] if d >= 0 else None for d in deps[starts[op.index] : starts[op.index + 1]]]
    return lanes, ops


def _kth_ops(group: list[Lane]) -> Iterator[list[Op]]:
    """The k-th ops of the lanes of a group, of those that have one."""
    for k in range(max(len(lane.ops) for lane in group)):
        yield [lane.ops[k] for lane in group if k < len(lane.ops)]


def _turned(waits: dict[Step, set[Step]]) -> dict[Step, list[Step]]:
    """Who waits for each step."""
    followers: dict[Step, list[Step]] = {step: [] for step in waits}
    for step, befores in waits.items():
        for before in befores:
            followers[before].append(step)
    return followers


def _merge(a: Op, b: Op) -> None:
    kept, gone = a.step, b.step
    if kept is gone:
        return
    kept.ops += gone.ops
    kept.never = kept.never or gone.never
    for op in gone.ops:
        op.step = kept


def _mismatch(a: Op, b: Op) -> bool:
    """Do two ops that should go together differ in size or kind."""
    return a.size != b.size or (a.kind != b.kind and not _is_message(a, b) and not _is_message(b, a))


def _is_message(send: Op, receive: Op) -> bool:
    return (
        send.kind in SENDS
        and receive.kind in RECEIVES
        and (send.lane.kind, receive.lane.kind) == (LaneKind.SEND, LaneKind.RECV)
    )


def _miscounted(machine: Machine) -> Iterator[Note]:
    for op in machine.ops:
        if not op.known:
            yield "unknown", str(op)
    counts = Counter(_counted_as(op) for op in machine.ops if op.known)
    for (name, _), count in counts.items():
        if count > 1:
            yield "double", str(name)
    for required in machine.rules.required():
        if required not in counts:
            yield "missing", str(required[0])
    yield from _miscounted_copies(counts)
    yield from _miscounted_reductions(machine, counts)
    if not machine.rules.by_layer:
        yield from _miscounted_cells(machine.rules, counts)


def _counted_as(op: Op) -> tuple[Name, int]:
    """Sends of one name to different peers are different messages."""
    return op.name, op.lane.peer if op.kind in SENDS else -1


def _miscounted_copies(counts: Counter[tuple[Name, int]]) -> Iterator[Note]:
    for name in [name for name, _ in counts if name.kind in COPIES]:
        other = name._replace(kind=OpKind.ONLOAD if name.kind == OpKind.OFFLOAD else OpKind.OFFLOAD)
        if (other, -1) not in counts:
            yield "missing", str(other)


def _miscounted_reductions(machine: Machine, counts: Counter[tuple[Name, int]]) -> Iterator[Note]:
    rules = machine.rules
    required: list[Name] = []
    if any(name.kind == OpKind.REDUCE_GRAD for name, _ in counts):
        required += (Name(OpKind.REDUCE_GRAD, *holder, -1, 0) for holder in product(rules.ranks, rules.chunks))
    for kind in OF_BUCKETS if rules.layout.buckets else ():
        if any(name.kind == kind for name, _ in counts):
            for holder in product(rules.ranks, rules.chunks):
                required += (Name(kind, *holder, -1, number) for number in range(len(rules.buckets(*holder))))
    if any(rules.is_backward(name.kind) for name, _ in counts):
        required += rules.required_once_a_step()
    yield from (("missing", str(name)) for name in required if (name, -1) not in counts)


def _miscounted_cells(rules: Rules, counts: Counter[tuple[Name, int]]) -> Iterator[Note]:
    for rank, chunk, mb in product(rules.ranks, rules.chunks, rules.mbs):
        f, b, i, w = (counts[Name(kind, rank, chunk, mb, 0), -1] for kind in (OpKind.F, OpKind.B, OpKind.I, OpKind.W))
        if not f:
            yield "missing", str(Name(OpKind.F, rank, chunk, mb, 0))
        if not (b or (i and w)):
            yield "missing", f"backward of {mb}.{chunk} on rank {rank}"
        if b and (i or w):
            yield "double", f"backward of {mb}.{chunk} on rank {rank}"


def _stuck(machine: Machine, spans: dict[Step, Span]) -> Iterator[Note]:
    stuck = [step for step in machine.steps if step not in spans]
    for step in stuck[:MOST_STUCK_NOTED]:
        what = " with ".join(map(str, step.ops))
        yield "hang", f"{what} never ends" + (f": {step.never}" if step.never else "")


def _wrong_data(machine: Machine, spans: dict[Step, Span]) -> Iterator[Note]:
    befores = machine.befores(spans)
    bit = machine.bits()
    for op, needed, names in _needs(machine):
        if needed is None:
            what = " or ".join(map(str, names)) or "an op"
            yield "wrong data", f"{op} needs {what}, which does not exist"
        elif not befores[op.step] & bit[needed.step]:
            yield "wrong data", f"{op} does not wait for {needed}"


def _needs(machine: Machine) -> Iterator[tuple[Op, Op | None, tuple[Name, ...]]]:
    """Each op with each op it needs (None if there is none), and the names that would do."""
    first: dict[Name, Op] = {}
    for op in machine.ops:
        if op.known:
            first.setdefault(op.name, op)
    copied = {name for name in first if name.kind in COPIES}
    for op in machine.ops:
        if not op.known:
            continue
        yield from ((op, needed, ()) for needed in _once_a_step_needs(machine, op))
        for names in machine.rules.needs(op.name, op.lane.peer, copied):
            found = [first[name] for name in names if name in first]
            yield op, min(found, key=lambda it: it.index) if found else None, names


def _once_a_step_needs(machine: Machine, op: Op) -> Iterator[Op | None]:
    """What reductions and the end of a step need."""
    rank, step_end = op.name.rank, machine.rules.layout.step_end
    if op.kind == OpKind.REDUCE_GRAD:
        yield from _some(_gradients(machine, rank, op.name.chunk))
    elif op.kind == OpKind.REDUCE_SCATTER:
        first = machine.rules.buckets(rank, op.name.chunk)[op.name.layer]
        made = [it for it in _gradients(machine, rank, op.name.chunk) if machine.rules.block(it.name) >= first]
        yield from _some(made)
    elif (op.kind, op.name.layer) in machine.rules.chains(rank, op.name.chunk).forward:
        yield from _gathers_needed(machine, op)
    elif op.kind == OpKind.REDUCE_TIED:
        for chunk in machine.rules.tied_chunks(rank, op.name.layer):
            yield from _some(_gradients(machine, rank, chunk))
    elif op.kind == OpKind.CLIP or (op.kind == OpKind.OPTIMIZER and OpKind.CLIP not in step_end):
        for chunk in machine.rules.chunks:
            yield from _gradients(machine, rank, chunk)
        yield from (it for it in _known(machine, rank) if it.kind in REDUCTIONS)
    elif op.kind in (OpKind.OPTIMIZER, OpKind.GATHER_PARAMS) and op.kind in step_end:
        wanted = OpKind.CLIP if op.kind == OpKind.OPTIMIZER else OpKind.OPTIMIZER
        yield next((it for it in _known(machine, rank) if it.kind == wanted), None)


def _some(ops: list[Op]) -> list[Op | None]:
    """Ops of which there must be one."""
    return [*ops] if ops else [None]


def _gathers_needed(machine: Machine, op: Op) -> Iterator[Op]:
    """The gathers of the buckets whose blocks a forward op is of, or after."""
    rules, (rank, chunk) = machine.rules, (op.name.rank, op.name.chunk)
    if op.lane.kind != LaneKind.COMPUTE:
        return
    for number, first in enumerate(rules.buckets(rank, chunk)):
        if rules.block(op.name) >= first:
            wanted = Name(OpKind.GATHER_PARAMS, rank, chunk, -1, number)
            yield from [it for it in _known(machine, rank) if it.name == wanted][:1]


def _known(machine: Machine, rank: int) -> list[Op]:
    return [op for op in machine.ops if op.known and op.name.rank == rank]


def _gradients(machine: Machine, rank: int, chunk: int) -> list[Op]:
    """What makes a weight gradient of a chunk; such ops, where known, are on a compute lane."""
    ops = _known(machine, rank)
    return [op for op in ops if op.name.chunk == chunk and machine.rules.makes_gradient(op.kind)]


def _crossings(machine: Machine) -> Iterator[Note]:
    for group in machine.groups:
        channel = all(lane.kind in CHANNEL_LANES for lane in group)
        for together in _kth_ops(group):
            labels = {_message_label(op) if channel else _group_label(machine.rules, op) for op in together}
            if len(labels) > 1:
                yield "wrong data", " together with ".join(map(str, together))


def _message_label(op: Op) -> tuple[str, int, int]:
    """F or B, micro-batch and chunk; what is no message is neither F nor B."""
    direction = "F" if op.kind in FORWARD_MESSAGES else "B" if op.kind in MESSAGES else op.kind.name.lower()
    return direction, op.name.mb, op.name.chunk


def _group_label(rules: Rules, op: Op) -> tuple[int, int, int | None]:
    of_no_stage = op.kind in (OpKind.REDUCE_TIED, *STEP_ENDS)
    of_no_stage &= not (rules.layout.buckets and op.kind in OF_BUCKETS)
    stage = None if of_no_stage else rules.stage(op.name.rank, op.name.chunk)
    return op.name.mb, op.name.layer, stage


def _launch_order(machine: Machine, hangs: bool) -> Iterator[Note]:
    if all(op.launch == -1 for op in machine.ops):
        return
    launched: dict[int, list[Op]] = defaultdict(list)
    malformed = []
    for op in machine.ops:
        if op.lane.kind in COMMUNICATION:
            launched[op.name.rank].append(op)
        elif op.launch != -1:
            malformed.append(f"{op} is no communication but has launch number {op.launch}")
    for rank, ops in launched.items():
        ops.sort(key=lambda op: op.launch)
        if [op.launch for op in ops] != list(range(len(ops))):
            malformed.append(f"the launch numbers of rank {rank} are not 0 to {len(ops) - 1}")
    yield from (("launch order", text) for text in malformed)
    if not malformed and not hangs:
        spans = machine.run(pair for ops in launched.values() for pair in pairwise(ops))
        if len(spans) < len(machine.steps):
            yield "launch order", "no one order of all launches"


def _peaks(machine: Machine, spans: dict[Step, Span]) -> tuple[int, ...]:
    """The most that each rank holds at once."""
    memory = Memory(machine.rules)
    changes: dict[int, dict[int, Fraction]] = {rank: defaultdict(Fraction) for rank in machine.rules.ranks}
    for op in machine.ops:
        if op.known:
            start, end = spans[op.step]
            taken, given = memory.changes(op.name)
            changes[op.name.rank][start] += taken
            changes[op.name.rank][end] -= given
    return tuple(ceil(_most(changes[rank])) for rank in machine.rules.ranks)


def _most(changes: dict[int, Fraction]) -> Fraction:
    """As giving back comes before taking, the most is what is held after all changes of some time."""
    held = most = Fraction(0)
    for time in sorted(changes):
        held += changes[time]
        most = max(most, held)
    return most
