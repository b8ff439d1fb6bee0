"""A brute-force executor of Programs: the oracle that tests hold the verifier of Programs against.

It was written from "What the verifier promises about Programs" in ARCHITECTURE.md alone. It takes the data types of
`treadle.ir` and nothing else, and restates what ops need of each other, so as to share no mistake with what it checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import combinations, pairwise, product
from math import ceil
from typing import NamedTuple, TypeAlias

from treadle.ir.program import COMMUNICATION, LANE_OF, LaneKind, Layout, OpKind, Program

MESSAGES = (OpKind.SEND_F, OpKind.SEND_B, OpKind.RECV_F, OpKind.RECV_B)
SENDS = (OpKind.SEND_F, OpKind.SEND_B)
RECEIVES = (OpKind.RECV_F, OpKind.RECV_B)
FORWARD_MESSAGES = (OpKind.SEND_F, OpKind.RECV_F)
COPIES = (OpKind.OFFLOAD, OpKind.ONLOAD)
EMBEDDING = (OpKind.EMBED_F, OpKind.EMBED_B)
HEAD = (OpKind.HEAD_F, OpKind.HEAD_B, OpKind.HEAD_W)
CHANNEL_LANES = (LaneKind.SEND, LaneKind.RECV)

WEIGHT_HALF = {
    OpKind.MLP_B: OpKind.MLP_W,
    OpKind.ATTN_B: OpKind.ATTN_W,
    OpKind.HEAD_B: OpKind.HEAD_W,
    OpKind.I: OpKind.W,
}
INPUT_HALF = {weight: backward for backward, weight in WEIGHT_HALF.items()}
MAY_MAKE_GRADIENTS = (OpKind.MLP_B, OpKind.ATTN_B, OpKind.HEAD_B, OpKind.B, OpKind.EMBED_B)
FORWARD_OF = {
    OpKind.B: OpKind.F,
    OpKind.I: OpKind.F,
    OpKind.W: OpKind.F,
    OpKind.COMBINE_B: OpKind.COMBINE_F,
    OpKind.DISPATCH_B: OpKind.DISPATCH_F,
    OpKind.MLP_B: OpKind.MLP_F,
    OpKind.MLP_W: OpKind.MLP_F,
    OpKind.ATTN_B: OpKind.ATTN_F,
    OpKind.ATTN_W: OpKind.ATTN_F,
    OpKind.EMBED_B: OpKind.EMBED_F,
    OpKind.HEAD_B: OpKind.HEAD_F,
    OpKind.HEAD_W: OpKind.HEAD_F,
}
"""Whose bytes a backward op or a weight half gives back."""

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


class Name(NamedTuple):
    """The label of an op. A message's chunk is its reader's."""

    kind: OpKind
    rank: int
    chunk: int
    mb: int
    layer: int

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind.name} {self.mb}.{self.chunk} L{self.layer}"


Holder: TypeAlias = tuple[int, int]
"""A rank and one of its chunks."""

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


class Rules:
    """What the text says of the labels of a layout: which there are, and what they need of each other."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.by_layer = any(layers > 0 for layers in layout.layers) and OpKind.F not in layout.forward
        self._placement = layout.placement
        self._replicas = layout.dp * layout.ep
        self.ranks = range(len(self._placement.stages) * self._replicas)
        self.chunks = range(len(self._placement.pipes))
        self.mbs = range(layout.num_mb)
        self._holder = {
            (self._placement.pipes[chunk], stage): (row, chunk)
            for row, stages in enumerate(self._placement.stages)
            for chunk, stage in enumerate(stages)
        }

    @cached_property
    def forward(self) -> tuple[OpKind, ...]:
        return self.layout.forward if self.by_layer else (OpKind.F,)

    @cached_property
    def backward(self) -> tuple[OpKind, ...]:
        return self.layout.backward if self.by_layer else (OpKind.B,)

    @cached_property
    def weights(self) -> tuple[OpKind, ...]:
        """The weight halves of a layer, so not the head's."""
        return tuple(kind for kind in self.layout.weights if kind not in HEAD) if self.by_layer else (OpKind.W,)

    @cached_property
    def embedding(self) -> tuple[OpKind, ...]:
        return EMBEDDING if self.layout.embedding else ()

    @cached_property
    def head(self) -> tuple[OpKind, ...]:
        if not self.layout.head:
            return ()
        return HEAD if OpKind.HEAD_W in self.layout.weights else HEAD[:2]

    @cached_property
    def kinds(self) -> frozenset[OpKind]:
        halves = () if self.by_layer else (OpKind.I,)
        rest = (*MESSAGES, *(COPIES if self.by_layer else ()), OpKind.REDUCE_GRAD)
        return frozenset((*self.forward, *self.backward, *self.weights, *halves, *self.embedding, *self.head, *rest))

    def split(self, kind: OpKind) -> bool:
        """Has a backward op a weight half of its own."""
        return WEIGHT_HALF.get(kind) in (*self.weights, *self.head)

    def stage(self, rank: int, chunk: int) -> int | None:
        """The stage that a rank's chunk is, if there are such."""
        if rank not in self.ranks or chunk not in self.chunks:
            return None
        return self._placement.stages[rank // self._replicas][chunk]

    def beside(self, rank: int, chunk: int, step: int) -> Holder | None:
        """Who holds the stage so many further along the same pipe, in the same replica."""
        stage = self.stage(rank, chunk)
        if stage is None:
            return None
        held = self._holder.get((self._placement.pipes[chunk], stage + step))
        if held is None:
            return None
        return held[0] * self._replicas + rank % self._replicas, held[1]

    def layers(self, rank: int, chunk: int) -> range:
        """The layers of the stage that a rank's chunk is; at the grain of cells layer 0."""
        stage = self.stage(rank, chunk)
        if stage is None:
            return range(0)
        return range(self.layout.layers[stage] if self.by_layer else 1)

    def ends(self, rank: int, chunk: int) -> tuple[OpKind, ...]:
        """The ops of the embedding, if a rank's chunk is the first stage, and of the head, if it is the last."""
        stage = self.stage(rank, chunk)
        first = self.embedding if stage == 0 else ()
        return first + (self.head if stage == len(self.layout.layers) - 1 else ())

    def knows(self, op: Op) -> bool:
        kind, rank, chunk, mb, layer = op.name
        mbs = (-1,) if kind == OpKind.REDUCE_GRAD else self.mbs
        in_no_layer = kind in (*MESSAGES, *EMBEDDING, *HEAD, OpKind.REDUCE_GRAD)
        layers = (0,) if in_no_layer else self.layers(rank, chunk)
        exists = rank in self.ranks and chunk in self.chunks and mb in mbs and layer in layers
        if not exists or kind not in self.kinds or op.lane.kind != LANE_OF[kind]:
            return False
        if kind in (*EMBEDDING, *HEAD):
            return kind in self.ends(rank, chunk)
        return kind not in SENDS or self._feeder(op)[0] == rank

    def _feeder(self, send: Op) -> Holder:
        """Who makes what the reader of a send, at its lane's peer, reads."""
        step = -1 if send.kind == OpKind.SEND_F else +1
        return self.beside(send.lane.peer, send.name.chunk, step) or (-1, -1)

    def needs(self, op: Op, copied: set[Name]) -> Iterator[tuple[Name, ...]]:
        """What a known op needs, each as the names that will do. REDUCE_GRAD is not for names to say."""
        kind, rank, chunk, mb, layer = op.name
        if kind in self.forward:
            yield from self._forward_needs(op.name)
        elif kind in self.backward or kind == OpKind.I:
            yield from self._backward_needs(op.name)
            if kind == self.backward[0] and not copied.isdisjoint(op.name._replace(kind=copy) for copy in COPIES):
                yield (op.name._replace(kind=OpKind.ONLOAD),)
        elif kind in (*self.weights, OpKind.HEAD_W):
            yield (op.name._replace(kind=INPUT_HALF[kind]),)
        elif kind == OpKind.HEAD_F:
            yield (self._leaves((rank, chunk), mb),)
        elif kind == OpKind.HEAD_B:
            yield (op.name._replace(kind=OpKind.HEAD_F),)
        elif kind == OpKind.EMBED_B:
            yield self._returns((rank, chunk), mb)
        elif kind == OpKind.SEND_F:
            yield (self._leaves(self._feeder(op), mb),)
        elif kind == OpKind.SEND_B:
            yield self._returns(self._feeder(op), mb)
        elif kind == OpKind.OFFLOAD:
            yield (Name(self.forward[-1], rank, chunk, mb, layer),)
        elif kind == OpKind.ONLOAD:
            yield (op.name._replace(kind=OpKind.OFFLOAD),)

    def _forward_needs(self, name: Name) -> Iterator[tuple[Name, ...]]:
        part = self.forward.index(name.kind)
        if part > 0:
            yield (name._replace(kind=self.forward[part - 1]),)
        elif name.layer > 0:
            yield (name._replace(kind=self.forward[-1], layer=name.layer - 1),)
        else:
            origin = self.beside(name.rank, name.chunk, -1)
            if origin is not None and origin[0] != name.rank:
                yield (name._replace(kind=OpKind.RECV_F),)
            elif origin is not None:
                yield (self._leaves(origin, name.mb),)
            if OpKind.EMBED_F in self.ends(name.rank, name.chunk):
                yield (name._replace(kind=OpKind.EMBED_F),)

    def _backward_needs(self, name: Name) -> Iterator[tuple[Name, ...]]:
        part = 0 if name.kind == OpKind.I else self.backward.index(name.kind)
        if part > 0:
            yield (name._replace(kind=self.backward[part - 1]),)
        elif name.layer < self.layers(name.rank, name.chunk)[-1]:
            yield (name._replace(kind=self.backward[-1], layer=name.layer + 1),)
        else:
            yield (name._replace(kind=self.forward[-1]),)
            origin = self.beside(name.rank, name.chunk, +1)
            if origin is not None and origin[0] != name.rank:
                yield (name._replace(kind=OpKind.RECV_B, layer=0),)
            elif origin is not None:
                yield self._returns(origin, name.mb)
            if OpKind.HEAD_B in self.ends(name.rank, name.chunk):
                yield (name._replace(kind=OpKind.HEAD_B, layer=0),)

    def _leaves(self, holder: Holder, mb: int) -> Name:
        """What makes a stage's output: the last forward part of its last layer."""
        return Name(self.forward[-1], *holder, mb, len(self.layers(*holder)) - 1)

    def _returns(self, holder: Holder, mb: int) -> tuple[Name, ...]:
        """What makes the gradient of a stage's input: the last backward part of layer 0; of cells B or I."""
        kinds = self.backward[-1:] if self.by_layer else (OpKind.B, OpKind.I)
        return tuple(Name(kind, *holder, mb, 0) for kind in kinds)

    def makes_gradient(self, kind: OpKind) -> bool:
        """Does a kind make a weight gradient: a weight half, or a backward op that has none split off."""
        whole = kind in self.kinds and kind in MAY_MAKE_GRADIENTS and not self.split(kind)
        return whole or kind in (*self.weights, OpKind.HEAD_W)

    def required(self) -> Iterator[tuple[Name, int]]:
        """What must be there once, with the peer of a send (else -1). Copies, REDUCE_GRAD and cells come besides."""
        for rank, chunk, mb in product(self.ranks, self.chunks, self.mbs):
            if self.by_layer:
                for layer in self.layers(rank, chunk):
                    for kind in (*self.forward, *self.backward, *self.weights):
                        yield Name(kind, rank, chunk, mb, layer), -1
            for kind in self.ends(rank, chunk):
                yield Name(kind, rank, chunk, mb, 0), -1
            for step, receive, send in ((-1, OpKind.RECV_F, OpKind.SEND_F), (+1, OpKind.RECV_B, OpKind.SEND_B)):
                origin = self.beside(rank, chunk, step)
                if origin is not None and origin[0] != rank:
                    yield Name(receive, rank, chunk, mb, 0), -1
                    yield Name(send, origin[0], chunk, mb, 0), rank


class Machine:
    """A Program as ops on lanes, those that go together as one step."""

    def __init__(self, program: Program, dur: Sequence[int]) -> None:
        self.rules = Rules(program.layout)
        self.lanes, self.ops = _read(program)
        self._dur = dur
        for op in self.ops:
            op.known = self.rules.knows(op)
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
    if not any(op.kind == OpKind.REDUCE_GRAD and op.known for op in machine.ops):
        return
    for rank, chunk in product(machine.rules.ranks, machine.rules.chunks):
        name = Name(OpKind.REDUCE_GRAD, rank, chunk, -1, 0)
        if (name, -1) not in counts:
            yield "missing", str(name)


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
            what = " or ".join(map(str, names)) or "a weight gradient"
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
        if op.kind == OpKind.REDUCE_GRAD:
            yield op, _last_gradient(machine, op), ()
        for names in machine.rules.needs(op, copied):
            found = [first[name] for name in names if name in first]
            yield op, min(found, key=lambda it: it.index) if found else None, names


def _last_gradient(machine: Machine, reduction: Op) -> Op | None:
    last = None
    for lane in machine.lanes:
        if lane.rank == reduction.name.rank and lane.kind == LaneKind.COMPUTE:
            for op in lane.ops:
                mine = op.known and op.name.chunk == reduction.name.chunk
                if mine and machine.rules.makes_gradient(op.kind):
                    last = op
    return last


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
    return op.name.mb, op.name.layer, rules.stage(op.name.rank, op.name.chunk)


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
    """The most bytes that each rank holds at once."""
    memory = Memory(machine.rules)
    changes: dict[int, Counter[int]] = {rank: Counter() for rank in machine.rules.ranks}
    for op in machine.ops:
        if op.name.rank in changes:
            start, end = spans[op.step]
            changes[op.name.rank][start] += memory.taken[op.kind]
            changes[op.name.rank][end] -= memory.given[op.kind]
    return tuple(ceil(Fraction(_most(changes[rank]), memory.unit)) for rank in machine.rules.ranks)


def _most(changes: Counter[int]) -> int:
    """As giving back comes before taking, the most is what is held after all changes of some time."""
    held = most = 0
    for time in sorted(changes):
        held += changes[time]
        most = max(most, held)
    return most


class Memory:
    """What ops of each kind take at their start and give back at their end, in `unit`-ths of a byte.

    The unit makes whole numbers of the fraction that is kept.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        # through text, for 0.1 to be a tenth
        self._kept = Fraction(str(rules.layout.kept))
        self.unit = self._kept.denominator
        self.taken = {kind: int(self._taken(kind) * self.unit) for kind in OpKind}
        self.given = {kind: int(self._given(kind) * self.unit) for kind in OpKind}

    def _taken(self, kind: OpKind) -> Fraction:
        if kind == OpKind.ONLOAD:
            return self._layer()
        saves = kind in self._rules.kinds and kind in (*self._rules.forward, OpKind.EMBED_F, OpKind.HEAD_F)
        return self._saved(kind) if saves else Fraction(0)

    def _given(self, kind: OpKind) -> Fraction:
        if kind == OpKind.OFFLOAD:
            return self._layer()
        if kind not in self._rules.kinds or kind not in FORWARD_OF:
            return Fraction(0)
        saved = self._saved(FORWARD_OF[kind])
        if kind in (*self._rules.weights, OpKind.HEAD_W):
            return saved * self._kept
        return saved * (1 - self._kept) if self._rules.split(kind) else saved

    def _saved(self, kind: OpKind) -> Fraction:
        return Fraction(self._rules.layout.saved.get(kind, 0))

    def _layer(self) -> Fraction:
        return sum(map(self._saved, self._rules.forward), Fraction(0))
