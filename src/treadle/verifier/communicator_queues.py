"""Judges an order of issue on communicators that channels share: does the step end, or in which circle does it hang.

Rules: docs/reference/semantics.md, "Shared communicators". Every op has two nodes, its start and its end; a cell has
one. The step hangs exactly if the edges between them have a cycle, or a message has no partner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.ops import COMMUNICATION, LaneKind, OpKind, column
from treadle.ir.program import NEVER, Bools, Ints, Longs, Program
from treadle.passes.issue_order import IssueOrder
from treadle.verifier.graph import Graph

Communicators: TypeAlias = Literal["channel", "direction", "pair", "group"]
COMMUNICATORS: tuple[Communicators, ...] = ("channel", "direction", "pair", "group")
"""One for each ordered pair of ranks; one for each direction of the pipe; one for each pair of ranks; one in all."""

Creation: TypeAlias = Literal["before", "lazy", "lazy-device"]
"""Before the step; at a communicator's first op; there, and the device must have done what was issued before."""

When: TypeAlias = Literal["never", "large", "always"]
"""When a step hangs: `large` if messages are larger than the backend's buffer."""

_GRADIENT: Bools = column(lambda kind: kind in (OpKind.SEND_B, OpKind.RECV_B), np.bool_)


class Why(IntEnum):
    """Why one item waits for another."""

    OWN = 0
    STREAM = 1
    NEED = 2
    ISSUE = 3
    MEET = 4
    HOST = 5
    DEVICE = 6


_WORDS = {
    Why.STREAM: "is behind",
    Why.NEED: "needs",
    Why.ISSUE: "is issued after",
    Why.MEET: "waits for its partner,",
    Why.HOST: "is issued after",
    Why.DEVICE: "waits for the device to end",
}


class CircleStep(NamedTuple):
    """One step of a circle: an op waits for another, or for NEVER if it has no partner.

    The first op on a communicator stands for its creation.
    """

    waiting: int
    why: Why
    wanted: int
    words: str


@dataclass(frozen=True)
class Judgement:
    """When the step hangs on these communicators, and the circle; which receives get another's message.

    `crossed` has pairs (send, receive) of ops, `unmatched` messages without a partner: they never end either.
    """

    communicators: Communicators
    hangs: When
    circle: tuple[CircleStep, ...]
    crossed: tuple[tuple[int, int], ...]
    unmatched: tuple[int, ...]

    @property
    def ends(self) -> bool:
        """True if every op ends, each receive with its own message."""
        return self.hangs == "never" and not self.crossed

    @property
    def word(self) -> str:
        """The verdict as a table shows it."""
        hangs = {"never": [], "large": ["hangs when large"], "always": ["hangs"]}[self.hangs]
        return ", ".join([*hangs, *(["crossing"] if self.crossed else [])]) or "ends"


def judge(
    program: Program, order: IssueOrder, communicators: Communicators = "pair", *, creation: Creation = "before"
) -> Judgement:
    """Judge whether a step ends, if each rank issues its ops in this order on these communicators.

    Args:
        program: the ops, with what they need; at the grain of layers an op waits for its dependencies alone, at the
            grain of cells also for the cells that its host issued before it.
        order: what each rank issues, in order; what an op needs of its rank stands before it (`out_of_turn`).
        communicators: which channels share one. Lanes of other groups (collectives) have one each.
        creation: when communicators are made.

    Example:
        >>> program = lower_cells(treadle.generate("1f1b", pp=2, microbatches=4))
        >>> judge(program, IssueOrder.at_use(program), "pair").word
        'hangs when large'

    """
    queues = Queues(program, order, communicators)
    circle = queues.circle(eager=False, creation=creation)
    hangs: When = "never"
    if circle is not None or len(queues.unmatched):
        eager = queues.circle(eager=True, creation=creation)
        hangs = "always" if eager is not None or len(queues.unmatched) else "large"
        circle = eager or circle
    crossed = tuple((int(a), int(b)) for a, b in queues.crossed)
    return Judgement(communicators, hangs, circle or (), crossed, tuple(map(int, queues.unmatched)))


def out_of_turn(program: Program, order: IssueOrder) -> list[tuple[int, int]]:
    """List (op, one it needs of its own rank) where the host issues the second after the first."""
    place = np.full(program.num_ops, NEVER, np.int64)
    items = np.flatnonzero(~order.waits)
    place[order.op[items]] = items
    op = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    rank = program.lane_rank[program.lane_of]
    here = (program.dep != NEVER) & (rank[program.dep] == rank[op])
    op, dep = op[here], program.dep[here]
    late = place[dep] > place[op]
    return list(zip(op[late].tolist(), dep[late].tolist(), strict=True))


_Pairs: TypeAlias = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
"""Nodes that wait, and the nodes they wait for."""


class Queues:
    """An order of issue on communicators, in columns over items.

    Item i starts at place i and ends at place num + i; the creation of the c-th communicator is place 2 * num + c.
    """

    def __init__(self, program: Program, order: IssueOrder, communicators: Communicators) -> None:
        self.program, self.order = program, order
        self.num, self.rank = order.num_items, order.rank
        lane = program.lane_of[order.op]
        kind = program.lane_kind[lane]
        self.sends = (kind == LaneKind.SEND) & ~order.waits
        self.receives = (kind == LaneKind.RECV) & ~order.waits
        self.messages = self.sends | self.receives
        self.talks = np.isin(kind, COMMUNICATION) & ~order.waits
        self.computes = (kind == LaneKind.COMPUTE) | order.waits
        self.lane = np.where(order.waits, NEVER, lane)
        peer = program.lane_peer[lane]
        self.src = np.where(self.sends, self.rank, peer)
        self.dst = np.where(self.sends, peer, self.rank)
        self.communicator = self._communicators(communicators, lane)
        self._match()

    def _communicators(self, communicators: Communicators, lane: Ints) -> Longs:
        """A number for the communicator of each item, or NEVER."""
        ranks, replicas = self.program.num_ranks, self.program.layout.num_replicas
        low, high, replica = np.minimum(self.src, self.dst), np.maximum(self.src, self.dst), self.rank % replicas
        numbers: dict[Communicators, Longs] = {
            "channel": self.src.astype(np.int64) * ranks + self.dst,
            "pair": low.astype(np.int64) * ranks + high,
            "direction": replica.astype(np.int64) * 2 + _GRADIENT[self.program.kind[self.order.op]],
            "group": replica.astype(np.int64),
        }
        group = ranks * ranks + self.program.lane_group[lane].astype(np.int64)
        found: Longs = np.select([self.messages, self.talks], [numbers[communicators], group], NEVER)
        return found

    def _match(self) -> None:
        """The k-th send from a to b on a communicator meets the k-th receive at b from a."""
        ranks = self.program.num_ranks
        key = (self.communicator * ranks + self.src) * ranks + self.dst
        key = np.unique(key, return_inverse=True)[1]  # small numbers
        sends, receives = np.flatnonzero(self.sends), np.flatnonzero(self.receives)
        sends, receives = (items[np.argsort(key[items], kind="stable")] for items in (sends, receives))
        sent, received = _numbered(key[sends]), _numbered(key[receives])
        _, at, to = np.intersect1d(sent, received, assume_unique=True, return_indices=True)
        self.met_send, self.met_receive = sends[at], receives[to]
        self._alone = np.concatenate([np.delete(sends, at), np.delete(receives, to)])
        self.unmatched = self.order.op[self._alone]

    @property
    def crossed(self) -> npt.NDArray[np.int32]:
        """Pairs of ops: a send and the receive it fills, of different names."""
        program = self.program
        send, receive = self.order.op[self.met_send], self.order.op[self.met_receive]
        differ = (program.mb[send] != program.mb[receive]) | (program.chunk[send] != program.chunk[receive])
        differ |= _GRADIENT[program.kind[send]] != _GRADIENT[program.kind[receive]]
        return np.stack([send[differ], receive[differ]], axis=1)

    @cached_property
    def _numbers(self) -> Longs:
        """The communicators, NEVER among them, in the order of their creations' places."""
        return np.unique(self.communicator)

    @cached_property
    def node(self) -> Ints:
        """The node of each place. A cell has one, as the starts of a batch or a collective and a batch's ends have."""
        start = np.arange(self.num)
        first = np.where(self.order.joined, 0, start)
        batch = np.maximum.accumulate(first)
        lead = self._collectives(batch)
        end = np.where(self.talks, self.num + batch, lead)
        creations = 2 * self.num + np.arange(len(self._numbers))
        places = np.concatenate([lead, end, creations])
        return np.unique(places, return_inverse=True)[1].astype(np.int32)

    def _collectives(self, batch: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """The first of the items that start together, for each."""
        members = np.flatnonzero(self.talks & ~self.messages)
        if not len(members):
            return batch
        key = self.communicator[members] * self.num + _count(self.lane[members])
        _, first, of = np.unique(key, return_index=True, return_inverse=True)
        lead = batch.copy()
        lead[members] = members[first][of]
        return lead

    # -- edges: (waits, for what) ----------------------------------------------------------------------------------

    def circle(self, *, eager: bool, creation: Creation) -> tuple[CircleStep, ...] | None:
        """The circle in which the step hangs, or None."""
        graph = self.graph(eager=eager, creation=creation)
        stuck = graph.stuck()
        return tuple(self._words(graph, stuck)) if stuck.any() else None

    def graph(self, *, eager: bool, creation: Creation) -> Graph:
        """Return the graph of starts and ends; edges are between places."""
        num = self.num
        talks = np.flatnonzero(self.talks)
        edges: list[tuple[Why, _Pairs]] = [
            (Why.OWN, (talks + num, talks)),
            (Why.STREAM, self._streams()),
            (Why.NEED, self._needs()),
            (Why.MEET, (self.met_receive + num, self.met_send)),
        ]
        if not eager:
            edges.append((Why.MEET, (self.met_send + num, self.met_receive)))
        if not self.program.layout.by_layer:
            edges.append((Why.ISSUE, self._issued()))
        if creation != "before":
            edges += self._creations(device=creation == "lazy-device")
        alone = self._alone[self.receives[self._alone]] if eager else self._alone
        edges.append((Why.MEET, (alone + num, alone + num)))
        target = np.concatenate([pair[0] for _, pair in edges]).astype(np.int32)
        source = np.concatenate([pair[1] for _, pair in edges]).astype(np.int32)
        kind = np.repeat(np.array([why for why, _ in edges], np.uint8), [len(pair[0]) for _, pair in edges])
        return Graph(self.node, int(self.node.max(initial=-1)) + 1, source, target, kind)

    def _streams(self) -> _Pairs:
        """Each op after the one before it on its stream: of its communicator, else of its lane."""
        lanes = self.program.num_lanes
        other = np.where(self.computes, NEVER, self.lane)  # waits and cells share the compute stream
        stream = np.where(self.talks, lanes + self.communicator, other).astype(np.int64)
        order = np.lexsort((stream, self.rank))
        same = (np.diff(stream[order]) == 0) & (np.diff(self.rank[order]) == 0)
        waits, wanted = order[1:][same], order[:-1][same]
        apart = self.node[waits] != self.node[wanted]  # not two of one batch
        return waits[apart], wanted[apart] + self.num

    def _needs(self) -> _Pairs:
        """Each op after what it needs; and a wait for the send it is of."""
        program, op = self.program, self.order.op
        item = np.full(program.num_ops + 1, NEVER, np.int64)
        issued = np.flatnonzero(~self.order.waits)
        item[op[issued]] = issued
        reader = item[np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))]
        need = item[program.dep]  # of NEVER the last entry, which no op has
        both = (reader != NEVER) & (need != NEVER)
        waits = np.flatnonzero(self.order.waits)
        return np.concatenate([reader[both], waits]), np.concatenate([need[both], item[op[waits]]]) + self.num

    def _issued(self) -> _Pairs:
        """Each communication op after the last cell or wait that its host issued before it."""
        last = np.maximum.accumulate(np.where(self.computes, np.arange(self.num), NEVER))
        known = self.talks & (last >= self.order.ptr[self.rank])
        return np.flatnonzero(known), last[known] + self.num

    def _creations(self, *, device: bool) -> Iterator[tuple[Why, _Pairs]]:
        """A communicator's first op stops its host until each member has come to its own."""
        of = np.searchsorted(self._numbers, self.communicator)
        made: list[tuple[int, int]] = []
        blocked: list[tuple[int, int]] = []
        drained: list[tuple[int, int]] = []
        for rank in range(len(self.order.ptr) - 1):
            first, last = int(self.order.ptr[rank]), int(self.order.ptr[rank + 1])
            numbers, at = np.unique(of[first:last], return_index=True)
            stops = sorted((first + int(i), 2 * self.num + int(c)) for i, c in zip(at, numbers, strict=True))
            stops = [stop for stop in stops if self._numbers[stop[1] - 2 * self.num] != NEVER]
            made += [(after[1], before[1]) for before, after in pairwise(stops)]
            for (start, creation), end in zip(stops, [*(stop[0] for stop in stops[1:]), last], strict=True):
                blocked += [(item, creation) for item in range(start, end)]
            for start, creation in stops if device else ():
                while self.order.joined[start]:  # its batch is not issued yet
                    start -= 1
                drained += [(creation, self.num + item) for item in self._tails(first, start)]
        for why, pairs in ((Why.HOST, made + blocked), (Why.DEVICE, drained)):
            waits = np.array(pairs, np.intp).reshape(-1, 2)
            yield why, (waits[:, 0], waits[:, 1])

    def _tails(self, first: int, start: int) -> list[int]:
        """The last item of each stream among these: when they have ended, all have."""
        stream = np.where(self.computes, NEVER, self.lane)[first:start]
        reverse = stream[::-1]
        return [start - 1 - int(at) for at in np.unique(reverse, return_index=True)[1]]

    # -- the witness -----------------------------------------------------------------------------------------------

    def _words(self, graph: Graph, stuck: Bools) -> Iterator[CircleStep]:
        for edge in graph.cycle(stuck):
            why = Why(int(graph.kind[edge]))
            if why is not Why.OWN:
                yield self.step(int(graph.target[edge]), why, int(graph.source[edge]))

    def step(self, waiting: int, why: Why, wanted: int) -> CircleStep:
        """Return one edge between two places in words."""
        if waiting == wanted:
            return CircleStep(self._op(waiting), why, NEVER, f"{self._name(waiting)} has no partner")
        words = f"{self._name(waiting)} {_WORDS[why]} {self._name(wanted, seen_from=waiting)}"
        return CircleStep(self._op(waiting), why, self._op(wanted), words)

    def _op(self, place: int) -> int:
        if place < 2 * self.num:
            return int(self.order.op[place % self.num])
        return int(self.order.op[np.argmax(self.communicator == self._numbers[place - 2 * self.num])])

    def _name(self, place: int, *, seen_from: int | None = None) -> str:
        if place >= 2 * self.num:
            number = self._numbers[place - 2 * self.num]
            ranks = sorted({int(rank) for rank in self.rank[self.communicator == number]})
            return f"the creation of the communicator of ranks {', '.join(map(str, ranks))}"
        item = place % self.num
        wait = "the wait for " if self.order.waits[item] else ""
        name, rank = f"{wait}{self.program.op(int(self.order.op[item]))}", int(self.rank[item])
        alone = seen_from is not None and seen_from < 2 * self.num and int(self.rank[seen_from % self.num]) == rank
        return name if alone else f"rank {rank}: {name}"


def _count(key: npt.NDArray[np.integer[Any]]) -> Longs:
    """Count for each entry the entries before it with the same key."""
    order = np.argsort(key, kind="stable")
    place = np.arange(len(key))
    opens = np.r_[True, np.diff(key[order]) != 0][: len(key)]
    count = np.empty(len(key), np.int64)
    count[order] = place - np.maximum.accumulate(np.where(opens, place, 0))
    return count


def _numbered(key: npt.NDArray[np.intp]) -> Longs:
    """Return a number for each (key, how many of it came before): equal on both sides of a match."""
    return key * np.int64(1 << 32) + _count(key)
