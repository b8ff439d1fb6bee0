"""Verifying: does this schedule finish, with the right data, within its memory. ARCHITECTURE.md has the semantics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.ir.action import Action, Kind
from weft.ir.dependency import needs
from weft.ir.program import NEVER, LaneKind, Op, OpKind, Program
from weft.ir.schedule import Schedule
from weft.passes.cells import ReceiveOrder, lower_cells
from weft.verify.codes import CODES, Explanation, explain
from weft.verify.finding import Finding, Report
from weft.verify.graph import Edge, Graph, Matching, match
from weft.verify.structure import MOST, check_actions, check_limit, peak_activations


def verify(
    schedule: Schedule,
    *,
    eager: bool = False,
    receives: ReceiveOrder = "sender",
    ring: int | None = None,
    max_activations: int | None = None,
) -> Report:
    """Everything there is to object to, worst first: what is wrong in the rows, then what goes wrong when run.

    `eager`: sends do not wait for their receives. `receives`: the order they are posted in where the schedule
    does not say. `ring`: buffers on each channel. `max_activations`: alive at once on a rank.
    """
    if ring is not None and ring < 1:
        raise ValueError(f"a ring has at least 1 buffer, got {ring}")
    actions = schedule.columns
    program = lower_cells(schedule, receives=receives)
    findings = list(check_actions(schedule, actions))
    findings += check_execution(program, schedule, eager=eager, ring=ring)
    if max_activations is not None:
        findings += check_limit(schedule, actions, max_activations)
    return Report(
        schedule.pp,
        schedule.num_cells,
        program.num_ops,
        peak_activations(schedule, actions),
        tuple(findings),
    )


def check_execution(program: Program, schedule: Schedule, *, eager: bool, ring: int | None) -> Iterator[Finding]:
    """W103, W104, W201 to W204: what happens when the lanes run."""
    matching = match(program)
    yield from _out_of_order(program)
    yield from _never_provided(program, schedule)
    yield from _unmatched(program, matching)
    yield from _crossings(program, matching)
    graph = Graph.of(program, matching, eager=eager, ring=ring)
    stuck = graph.stuck()
    if stuck.any():
        yield _deadlock(program, graph, graph.cycle(stuck), int(stuck[graph.node].sum()))


def _out_of_order(program: Program) -> Iterator[Finding]:
    """W103, W104: an action needs one that stands behind it in its own row, or in its own cell."""
    lane = program.lane_of
    op = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    late = np.flatnonzero((program.dep > op) & (lane[program.dep] == lane[op]))
    same_cell = np.flatnonzero((program.dep != NEVER) & (lane[program.dep] == lane[op]))
    same_cell = same_cell[program.cell[program.dep[same_cell]] == program.cell[op[same_cell]]]
    for edge in same_cell[:MOST]:
        first, second = program.op(int(program.dep[edge])), program.op(int(op[edge]))
        message = f"{second} needs {first}, but both are halves of one overlapped cell"
        yield Finding("W104", second.lane.rank, second.cell, message)
    for edge in np.setdiff1d(late, same_cell)[:MOST]:
        behind, early = program.op(int(program.dep[edge])), program.op(int(op[edge]))
        yield Finding("W103", early.lane.rank, early.cell, f"{early} stands before {behind}, which it needs")


def _never_provided(program: Program, schedule: Schedule) -> Iterator[Finding]:
    """W203: a need that no action and no receive fills."""
    op = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    for index in np.unique(op[program.dep == NEVER])[:MOST]:
        waiting = program.op(int(index))
        what = " and ".join(_unfilled(program, schedule, waiting))
        yield Finding("W203", waiting.lane.rank, waiting.cell, f"{waiting} waits for ever: {what}")


def _unfilled(program: Program, schedule: Schedule, op: Op) -> Iterator[str]:
    """Which needs of an op nothing fills, in words."""
    action = Action(Kind(int(op.kind)), op.mb, op.chunk)
    filled = [program.op(dep) for dep in program.deps(op.index) if dep != NEVER]
    for peer, candidates in needs(schedule.placement, op.lane.rank, action):
        here = peer == op.lane.rank
        if here and not any(f.label == str(c) and f.lane == op.lane for f in filled for c in candidates):
            yield f"no {' or '.join(map(str, candidates))} in the row of rank {peer}"
        if not here and not any(f.lane.kind is LaneKind.RECV and f.lane.peer == peer for f in filled):
            yield f"no receive from rank {peer} is posted for it"


def _unmatched(program: Program, matching: Matching) -> Iterator[Finding]:
    """W202: the surplus of one side of a channel."""
    for index in matching.unmatched[:MOST]:
        op = program.op(int(index))
        other = "receives" if op.kind.is_send else "sends"
        count = int(index - program.lane_ptr[program.lane_of[index]])
        message = f"{op} is number {count + 1} on its channel, but rank {op.lane.peer} {other} only {count}"
        yield Finding("W202", op.lane.rank, None, message)


def _crossings(program: Program, matching: Matching) -> Iterator[Finding]:
    """W204: a match between different names."""
    send, recv = matching.send, matching.recv
    what = program.kind[send].astype(np.int32) - OpKind.SEND_F != program.kind[recv].astype(np.int32) - OpKind.RECV_F
    differs = what | (program.mb[send] != program.mb[recv]) | (program.chunk[send] != program.chunk[recv])
    for k in np.flatnonzero(differs)[:MOST]:
        sent, received = program.op(int(send[k])), program.op(int(recv[k]))
        place = int(send[k] - program.lane_ptr[program.lane_of[send[k]]]) + 1
        yield Finding(
            "W204",
            received.lane.rank,
            None,
            f"{received.label} is filled with {sent.label}: both are number {place} "
            f"on the channel from rank {sent.lane.rank}",
        )


_BECAUSE = {
    Edge.LANE: "is behind",
    Edge.NEED: "needs",
    Edge.RING: "needs the buffer that is freed by",
    Edge.ARRIVAL: "waits for",
}


def _deadlock(program: Program, graph: Graph, cycle: list[int], num_stuck: int) -> Finding:
    """W201, with the chain of ops that leads back to its beginning."""
    steps = []
    arrived: Op | None = program.op(int(graph.source[cycle[-1]]))
    for edge in cycle:
        waiting, wanted = program.op(int(graph.target[edge])), program.op(int(graph.source[edge]))
        meets = f" (together with {arrived})" if arrived is not None and arrived.index != waiting.index else ""
        steps.append(f"rank {waiting.lane.rank}: {waiting}{meets} {_BECAUSE[Edge(int(graph.kind[edge]))]} {wanted}")
        arrived = wanted
    places = [program.op(int(graph.target[edge])) for edge in cycle]
    shown = next((op for op in places if op.lane.kind is LaneKind.COMPUTE), places[0])
    circle = f"{len(steps)} ops wait for each other in a circle" if len(steps) > 1 else "an op waits for itself"
    message = f"deadlock: {circle}; {num_stuck} of {program.num_ops} ops never end"
    return Finding("W201", shown.lane.rank, shown.cell if shown.cell != NEVER else None, message, tuple(steps))


__all__ = ["CODES", "Explanation", "Finding", "Report", "check_execution", "explain", "verify"]
