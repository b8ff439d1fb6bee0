"""Who waits for whom in a hung step: the graph of its order of issue, without what has ended.

To the edges of `verifier/communicator_queues.py` comes one: what a rank has not launched waits for the cell at which
its host is. As nothing moves any more, each op that has not ended leads to a circle, or to one that waits for nothing:
the cause.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.ir.program import NEVER, Bools
from treadle.recorder.launched_order import HungStep
from treadle.verifier.communicator_queues import CircleStep, Communicators, Queues, Why
from treadle.verifier.graph import Graph

_HOST_IS_AT = 255
"""An edge of the kind that this module adds."""

_Edge: TypeAlias = int


@dataclass(frozen=True, eq=False)
class Waiting:
    """The graph of a hung step, on communicators that channels share."""

    hung: HungStep
    communicators: Communicators

    @cached_property
    def queues(self) -> Queues:
        """The order of issue on communicators."""
        return Queues(self.hung.plan.program, self.hung.order, self.communicators)

    @cached_property
    def item(self) -> npt.NDArray[np.int64]:
        """The item of each op in the order of issue."""
        order = self.queues.order
        found = np.full(self.hung.plan.program.num_ops, NEVER, np.int64)
        issued = np.flatnonzero(~order.waits)
        found[order.op[issued]] = issued
        return found

    def row(self, rank: int) -> list[int]:
        """Return the ops of a rank in the order of issue."""
        order = self.queues.order
        return [int(order.op[i]) for i in range(int(order.ptr[rank]), int(order.ptr[rank + 1])) if not order.waits[i]]

    @cached_property
    def cells(self) -> list[list[int]]:
        """The cells of each rank."""
        ends = self.hung.plan.ends
        return [[op for op in self.row(rank) if op not in ends] for rank in range(self.hung.plan.program.num_ranks)]

    # -- how far ranks came ------------------------------------------------------------------------------------------

    def _up_to(self, reached: Bools) -> Bools:
        """The cells that stand before the last of these sends of their rank; of a given order, of these messages."""
        ends, found = self.hung.plan.ends, np.zeros(len(reached), bool)
        given = bool(self.hung.plan.schedule.issue)
        for rank in range(self.hung.plan.program.num_ranks):
            row = self.row(rank)
            seen = [place for place, op in enumerate(row) if op in ends and reached[op]]
            shows = [place for place in seen if given or ends[row[place]].is_send]
            found[[op for op in row[: max(shows, default=0)] if op not in ends]] = True
        return found

    @cached_property
    def _hosts(self) -> list[tuple[int | None, list[int]]]:
        """For each rank the cell at which its host is, and the cells before it of which no message says so.

        A cell that sends nothing leaves no entry. Where one after it waits for a receive, the host has come so far.
        """
        hung, ends = self.hung, self.hung.plan.ends
        passed, program = self._up_to(hung.launched), hung.plan.program
        makers = {program.deps(op)[0] for op, end in ends.items() if end.is_send}
        found: list[tuple[int | None, list[int]]] = []
        for rank, cells in enumerate(self.cells):
            left = [op for op in cells if not passed[op]]
            at: tuple[int | None, list[int]] = (None, left)
            for place, op in enumerate(left):
                missing = [need for need in self._needs(op) if need in ends and not hung.completed[need]]
                if missing and (rank not in hung.placed or all(hung.launched[need] for need in missing)):
                    at = op, left[:place]
                elif missing or op in makers:
                    at = left[0], []
                else:
                    continue
                break
            found.append(at)
        return found

    def _needs(self, cell: int) -> set[int]:
        """What a cell waits for; an overlapped pair waits for the inputs of both."""
        program = self.hung.plan.program
        first, after = cell, cell + 1
        while program.joined[first]:
            first -= 1
        while after < program.num_ops and program.joined[after]:
            after += 1
        return {need for op in range(first, after) for need in program.deps(op)}

    @cached_property
    def _silent(self) -> Bools:
        found = np.zeros(self.hung.plan.program.num_ops, bool)
        found[[op for _, ops in self._hosts for op in ops]] = True
        return found

    @cached_property
    def issued(self) -> Bools:
        """The cells that hosts have come past, and the messages that were launched."""
        return self._up_to(self.hung.launched) | self.hung.launched | self._silent

    @cached_property
    def ended(self) -> Bools:
        """The cells that are known to have ended: a message that was launched after them has started."""
        return self._up_to(self.hung.started) | self._silent

    def host_at(self, rank: int) -> int | None:
        """Return the first cell of a rank that its host is not known to have come past, or None."""
        return self._hosts[rank][0]

    # -- the graph ---------------------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph:
        """The edges of the order of issue, and those to the cells at which hosts are."""
        graph = self.queues.graph(eager=False, creation="before")
        host, pairs = list(self._host_edges()), list(self._pair_edges())
        target = np.concatenate([graph.target, np.array([a for a, _ in (*host, *pairs)], np.int32)])
        source = np.concatenate([graph.source, np.array([b for _, b in (*host, *pairs)], np.int32)])
        kinds = np.repeat(np.array([_HOST_IS_AT, Why.NEED], np.uint8), [len(host), len(pairs)])
        kind = np.concatenate([graph.kind, kinds])
        return Graph(graph.node, graph.num_nodes, source.astype(np.int32), target.astype(np.int32), kind)

    def _host_edges(self) -> Iterator[tuple[int, int]]:
        program = self.hung.plan.program
        for rank in range(program.num_ranks):
            cell = self.host_at(rank)
            if cell is None:
                continue
            needs = self._needs(cell)
            for op in self.row(rank):
                if op in self.hung.plan.ends and not self.issued[op] and op not in needs:
                    yield int(self.item[op]), int(self.item[cell])

    def _pair_edges(self) -> Iterator[tuple[int, int]]:
        """From the first op of each overlapped pair to the ends of the messages that the second one waits for."""
        program, ends = self.hung.plan.program, self.hung.plan.ends
        for second in np.flatnonzero(program.joined).tolist():
            for need in program.deps(second):
                if need in ends:
                    yield int(self.item[second - 1]), self.queues.num + int(self.item[need])

    @cached_property
    def done(self) -> Bools:
        """The nodes that have ended: of a message its start and its end are two."""
        queues, graph = self.queues, self.graph
        op, num = queues.order.op, queues.num
        ended = self.hung.completed | self.ended
        places = np.concatenate([(self.hung.started | self.ended)[op], ended[op]])
        cell = np.isin(op, [op for row in self.cells for op in row])
        launched = np.concatenate([self.issued[op], (self.issued[op] & cell)])
        node = graph.node[: 2 * num]
        done = np.ones(graph.num_nodes, bool)
        np.logical_and.at(done, node, places)
        can = np.ones(graph.num_nodes, bool)
        np.logical_and.at(can, node, places | launched)
        while (more := can & ~done & ~self._blocked(done)).any():  # with nothing before it: it has started
            done |= more
        return done

    def _blocked(self, done: Bools) -> Bools:
        """The nodes that wait for one that has not ended."""
        graph = self.graph
        blocked = np.zeros(graph.num_nodes, bool)
        waited = ~done[graph.node[graph.source]]
        blocked[graph.node[graph.target[waited]]] = True
        return blocked

    @cached_property
    def roots(self) -> list[int]:
        """The nodes that have not ended, and wait for nothing."""
        return [int(node) for node in np.flatnonzero(~self.done & ~self._blocked(self.done))]

    @cached_property
    def circle(self) -> tuple[CircleStep, ...]:
        """Ops that wait for each other: among what was launched, or among all where nothing else is waited for.

        What leads to a host that has stopped does not count: a step that would hang with large messages has circles
        that a run with small ones, or one that has stopped before, never comes to.
        """
        hosts = [cell for rank in range(len(self.cells)) if (cell := self.host_at(rank)) is not None]
        reached = self.issued.copy()
        reached[hosts] = True
        inside = np.zeros(self.graph.num_nodes, bool)
        both = np.tile(reached[self.queues.order.op], 2)
        inside[self.graph.node[: 2 * self.queues.num][both]] = True
        inside &= ~self.done & ~self._leads_to(self.stopped)
        for nodes in (inside, *([~self.done] if not self.roots else [])):
            found = self._circle_among(nodes)
            if found:
                return found
        return ()

    @cached_property
    def stopped(self) -> list[int]:
        """The roots that are no message in flight."""
        ends, launched = self.hung.plan.ends, self.hung.launched
        return [node for node in self.roots if (op := self.op_of(node)) not in ends or not launched[op]]

    def _leads_to(self, roots: Sequence[int]) -> Bools:
        """The nodes that wait for one of these."""
        found = np.zeros(self.graph.num_nodes, bool)
        found[list(roots)] = True
        waiting, wanted = self.graph.node[self.graph.target], self.graph.node[self.graph.source]
        open_edges = ~self.done[waiting]
        count = -1
        while count != (count := int(found.sum())):
            found[waiting[open_edges & found[wanted]]] = True
        return found

    def _circle_among(self, nodes: Bools) -> tuple[CircleStep, ...]:
        graph = self.graph
        kept = nodes[graph.node[graph.source]] & nodes[graph.node[graph.target]]
        part = Graph(graph.node, graph.num_nodes, graph.source[kept], graph.target[kept], graph.kind[kept])
        stuck = part.stuck()
        if not stuck.any():
            return ()
        edges = [(int(part.target[e]), int(part.kind[e]), int(part.source[e])) for e in part.cycle(stuck)]
        return tuple(self._step(*edge) for edge in edges if edge[1] != Why.OWN)

    def _step(self, waiting: int, kind: int, wanted: int) -> CircleStep:
        queues = self.queues
        if kind != _HOST_IS_AT:
            return queues.step(waiting, Why(kind), wanted)
        op, cell = (int(queues.order.op[place % queues.num]) for place in (waiting, wanted))
        program, rank = self.hung.plan.program, int(queues.rank[waiting % queues.num])
        words = f"rank {rank}: {program.op(op)} is not launched, as its host is at {program.op(cell)}"
        return CircleStep(op, Why.HOST, cell, words)

    # -- chains ------------------------------------------------------------------------------------------------------

    @cached_property
    def _waits(self) -> dict[int, list[_Edge]]:
        """The edges of each node that has not ended to others that have not."""
        graph, found = self.graph, defaultdict(list)
        waited = ~self.done[graph.node[graph.source]] & ~self.done[graph.node[graph.target]]
        for edge in np.flatnonzero(waited).tolist():
            found[int(graph.node[graph.target[edge]])].append(edge)
        return found

    def begins(self, rank: int) -> int | None:
        """Return the node that a rank waits at: its first message that has not ended, else the cell of its host."""
        num = self.queues.num
        for op in self.row(rank):
            if op in self.hung.plan.ends and self.hung.launched[op] and not self.hung.completed[op]:
                return int(self.graph.node[num + self.item[op]])
        cell = self.host_at(rank)
        return int(self.graph.node[self.item[cell]]) if cell is not None else None

    def chain(self, start: int, goals: set[int]) -> tuple[list[CircleStep], int] | None:
        """Return the shortest way from a node to one of these, in words, and that node; None if there is none."""
        via: dict[int, _Edge | None] = {start: None}
        queue = deque([start])
        graph = self.graph
        while queue:
            node = queue.popleft()
            if node in goals:
                return self._back(node, via), node
            for edge in self._waits.get(node, ()):
                wanted = int(graph.node[graph.source[edge]])
                if wanted not in via:
                    via[wanted] = edge
                    queue.append(wanted)
        return None

    def _back(self, node: int, via: dict[int, _Edge | None]) -> list[CircleStep]:
        steps = []
        while (edge := via[node]) is not None:
            kind = int(self.graph.kind[edge])
            if kind != Why.OWN:
                steps.append(self._step(int(self.graph.target[edge]), kind, int(self.graph.source[edge])))
            node = int(self.graph.node[self.graph.target[edge]])
        return steps[::-1]

    def op_of(self, node: int) -> int:
        """Return an op of a node."""
        place = int(np.argmax(self.graph.node == node))
        return int(self.queues.order.op[place % self.queues.num])
