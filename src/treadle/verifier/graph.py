"""The graph of a Program: what must end before what, with ops that go together taken as one node.

Edges lead to a node from the op before it on its lane and from what it needs; with a ring of buffers, from the reader
that frees the buffer it fills; with launch orders, from what its rank launches before it. A Program deadlocks exactly
if this graph has a cycle, or a node can never end for another reason (no match, a need that nothing provides).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from treadle.ir.execute import leaders
from treadle.ir.kernel import kernel
from treadle.ir.ops import LaneKind
from treadle.ir.program import Bools, Bytes, Ints, Longs, Program
from treadle.passes.edges import launch_edges, need_edges
from treadle.passes.ring import ring_edges
from treadle.verifier.finding import Finding


class Edge(IntEnum):
    """Why one op waits for another."""

    LANE = 0
    NEED = 1
    RING = 2
    LAUNCH = 3


@dataclass(frozen=True)
class Graph:
    """`node[op]`, and edges between ops: `source` must end before `target` starts.

    Edges are kept between ops, so that a witness can say which of a node's ops waits for which.
    """

    node: Ints
    num_nodes: int
    source: Ints
    target: Ints
    kind: Bytes

    @classmethod
    def of(cls, program: Program, *, ring: int | None = None, launch: bool = False) -> Graph:
        """Return the graph of a program: `ring` buffers on each channel, `launch` order kept."""
        together = leaders(program)
        edges = {Edge.LANE: lane_edges(program), Edge.NEED: need_edges(program)}
        if ring is not None:
            edges[Edge.RING] = ring_edges(program, ring)
        if launch:
            edges[Edge.LAUNCH] = launch_edges(program)
        leads = together == np.arange(program.num_ops)
        node = (np.cumsum(leads, dtype=np.int32) - 1)[together]
        source, target = (np.concatenate([pair[side] for pair in edges.values()]) for side in (0, 1))
        kinds = np.repeat(np.array(list(edges), np.uint8), [len(pair[0]) for pair in edges.values()])
        return cls(node.astype(np.int32), int(leads.sum()), source, target, kinds)

    def stuck(self) -> Bools:
        """The nodes that cannot end: on a cycle, or behind one."""
        ptr, heads = _successors(self.node[self.source], self.node[self.target], self.num_nodes)
        return _stuck(ptr, heads, self.num_nodes)

    def cycle(self, stuck: Bools) -> list[int]:
        """A short cycle among stuck nodes, as edge indices; each edge's source node is the next one's target node."""
        src, dst = self.node[self.source], self.node[self.target]
        inside = np.flatnonzero(stuck[src] & stuck[dst])
        ptr, position = _successors(dst[inside], np.arange(len(inside), dtype=np.int32), self.num_nodes)
        waits_for = src[inside]
        start = _walk_back(ptr, position, waits_for, int(np.argmax(stuck)), self.num_nodes)
        best: list[int] = []
        node = start
        for _ in range(32):  # the cycle the walk found is rarely the shortest through its own nodes
            found = [int(e) for e in _shortest(ptr, position, waits_for, node, self.num_nodes)]
            if not best or len(found) < len(best):
                best = found
            node = int(waits_for[found[0]])
            if node == start:
                break
        return [int(inside[edge]) for edge in best]


def lane_edges(program: Program) -> tuple[Ints, Ints]:
    """List edges from each op to the next of its lane."""
    after = np.ones(program.num_ops, bool)
    after[program.lane_ptr[:-1][np.diff(program.lane_ptr) > 0]] = False
    after &= ~program.joined
    target = np.flatnonzero(after).astype(np.int32)
    return target - 1, target


@kernel
def _successors(source: Ints, value: Ints, num_nodes: int) -> tuple[Longs, Ints]:
    """List for each node the values of the edges that leave it, compressed."""
    ptr = np.zeros(num_nodes + 1, np.int64)
    for node in source:
        ptr[node + 1] += 1
    for node in range(num_nodes):
        ptr[node + 1] += ptr[node]
    fill = ptr[:-1].copy()
    values = np.empty(len(source), np.int32)
    for edge in range(len(source)):
        node = source[edge]
        values[fill[node]] = value[edge]
        fill[node] += 1
    return ptr, values


@kernel
def _stuck(ptr: Longs, heads: Ints, num_nodes: int) -> Bools:
    """End whatever can end, one after the other; what is left cannot."""
    waiting = np.zeros(num_nodes, np.int32)
    for head in heads:
        waiting[head] += 1
    stuck = np.ones(num_nodes, np.bool_)
    ready = np.empty(num_nodes, np.int32)
    count = 0
    for node in range(num_nodes):
        if waiting[node] == 0:
            ready[count] = node
            count += 1
    while count:
        count -= 1
        node = ready[count]
        stuck[node] = False
        for edge in range(ptr[node], ptr[node + 1]):
            head = heads[edge]
            waiting[head] -= 1
            if waiting[head] == 0:
                ready[count] = head
                count += 1
    return stuck


@kernel
def _walk_back(ptr: Longs, position: Ints, waits_for: Ints, start: int, num_nodes: int) -> int:
    """Follow what is waited for until a node comes again: that node is on a cycle."""
    seen = np.zeros(num_nodes, np.bool_)
    node = start
    while not seen[node]:
        seen[node] = True
        node = waits_for[position[ptr[node]]]
    return int(node)


@kernel
def _shortest(ptr: Longs, position: Ints, waits_for: Ints, start: int, num_nodes: int) -> npt.NDArray[np.int32]:
    """The shortest way from a node back to itself, breadth first; the edges in order of waiting."""
    via = np.full(num_nodes, -1, np.int32)
    origin = np.full(num_nodes, -1, np.int32)
    queue = np.empty(num_nodes + 1, np.int32)
    queue[0] = start
    head, tail, last = 0, 1, -1
    while head < tail and last < 0:
        node = queue[head]
        head += 1
        for k in range(ptr[node], ptr[node + 1]):
            edge = position[k]
            nxt = waits_for[edge]
            if nxt == start:
                last = edge
                origin[start] = node
                break
            if via[nxt] < 0:
                via[nxt] = edge
                origin[nxt] = node
                queue[tail] = nxt
                tail += 1
    backwards = [np.int32(last)]
    node = origin[start]
    while node != start:
        backwards.append(via[node])
        node = origin[node]
    return np.array(backwards[::-1], dtype=np.int32)


_BECAUSE = {
    Edge.LANE: "is behind",
    Edge.NEED: "needs",
    Edge.RING: "needs the buffer that is freed by",
    Edge.LAUNCH: "is launched after",
}


def deadlock(program: Program, graph: Graph, stuck: Bools, num_never: int, code: str = "T201") -> Finding:
    """T201 (T206 where the launch order makes it), with the chain of ops that leads back to its beginning."""
    cycle = graph.cycle(stuck)
    steps = []
    arrived = program.op(int(graph.source[cycle[-1]]))
    for edge in cycle:
        waiting, wanted = program.op(int(graph.target[edge])), program.op(int(graph.source[edge]))
        meets = f" (together with {arrived})" if arrived.index != waiting.index else ""
        steps.append(f"rank {waiting.lane.rank}: {waiting}{meets} {_BECAUSE[Edge(int(graph.kind[edge]))]} {wanted}")
        arrived = wanted
    places = [program.op(int(graph.target[edge])) for edge in cycle]
    shown = next((op for op in places if op.lane.kind is LaneKind.COMPUTE), places[0])
    circle = f"{len(steps)} ops wait for each other in a circle" if len(steps) > 1 else "an op waits for itself"
    what = "deadlock" if code == "T201" else "no launch order"
    message = f"{what}: {circle}; {num_never} of {program.num_ops} ops never end"
    return Finding.at(code, shown, message, tuple(steps))
