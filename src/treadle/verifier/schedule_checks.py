"""Verify a schedule: it finishes, with the right data, within its memory. Rules: docs/reference/semantics.md."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treadle.ir.action import Action, Kind
from treadle.ir.dependency import needs
from treadle.ir.execute import execute
from treadle.ir.ops import LaneKind
from treadle.ir.program import NEVER, Op, Program
from treadle.ir.schedule import Schedule
from treadle.passes.cells import ReceiveOrder, lower_cells
from treadle.passes.issue_order import issue_order
from treadle.passes.ring import with_ring
from treadle.verifier.communicator_checks import check_queues
from treadle.verifier.communicator_queues import Communicators
from treadle.verifier.finding import MOST, Finding, VerifyReport, worst_first
from treadle.verifier.graph import Graph, deadlock
from treadle.verifier.op_groups import check_groups
from treadle.verifier.row_checks import check_actions, check_limit, peak_activations


def verify_schedule(
    schedule: Schedule,
    *,
    receives: ReceiveOrder = "sender",
    ring: int | None = None,
    max_activations: int | None = None,
    communicators: Communicators | None = None,
    lazy: bool = False,
) -> VerifyReport:
    """Check a schedule: are its actions complete, does it finish, with the right data, within its memory.

    Args:
        schedule: sound or not.
        receives: the order in which receives are posted where the schedule does not say.
        ring: receive buffers on each channel; None for as many as there are messages.
        max_activations: the most activations of (mb, chunk) that a rank may hold at once.
        communicators: which channels share one; None to judge each channel by itself.
        lazy: communicators are made at their first message.

    Returns:
        All findings, worst first, and each rank's peak of activations.

    Example:
        >>> print(verify_schedule(treadle.generate("dualpipe", pp=4, microbatches=8)))
        clean: 4 ranks, 62 cells, peak 5 activations

    """
    actions = schedule.columns
    program = lower_cells(schedule, receives=receives)
    findings = list(check_actions(schedule, actions))
    findings += check_execution(program, schedule, ring=ring)
    if communicators is not None:
        findings = _with_queues(findings, program, schedule, receives, communicators, lazy=lazy)
    if max_activations is not None:
        findings += check_limit(schedule, actions, max_activations)
    peaks = peak_activations(schedule, actions)
    return VerifyReport(schedule.pp, schedule.num_cells, program.num_ops, worst_first(findings), peak_activations=peaks)


_MATCHED_BY_CHANNEL = {"T201", "T202", "T204"}


def _with_queues(
    findings: list[Finding],
    program: Program,
    schedule: Schedule,
    receives: ReceiveOrder,
    communicators: Communicators,
    *,
    lazy: bool,
) -> list[Finding]:
    """Add what happens on shared communicators, unless a channel by itself hangs already."""
    order = issue_order(schedule, program, receives=receives)
    if communicators == "direction" and order is not None:
        findings = [finding for finding in findings if finding.code not in _MATCHED_BY_CHANNEL]
    if order is None or any(finding.code in ("T201", "T202") for finding in findings):
        return findings
    return [*findings, *check_queues(program, order, communicators, lazy=lazy)]


def check_execution(program: Program, schedule: Schedule, *, ring: int | None) -> Iterator[Finding]:
    """T103, T104, T201 to T204: what happens when the lanes run."""
    yield from _out_of_order(program)
    yield from _never_provided(program, schedule)
    yield from check_groups(program)
    times = execute(with_ring(program, ring), np.zeros(program.num_ops, np.int64))
    if times.finished:
        return
    graph = Graph.of(program, ring=ring)
    stuck = graph.stuck()
    if stuck.any():
        yield deadlock(program, graph, stuck, times.num_left)


def _out_of_order(program: Program) -> Iterator[Finding]:
    """T103, T104: an action needs one that stands behind it in its own row, or in its own cell."""
    lane = program.lane_of
    op = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    late = np.flatnonzero((program.dep > op) & (lane[program.dep] == lane[op]))
    same_cell = np.flatnonzero((program.dep != NEVER) & (lane[program.dep] == lane[op]))
    same_cell = same_cell[program.cell[program.dep[same_cell]] == program.cell[op[same_cell]]]
    for edge in same_cell[:MOST]:
        first, second = program.op(int(program.dep[edge])), program.op(int(op[edge]))
        message = f"{second} needs {first}, but both are halves of one overlapped cell"
        yield Finding.at("T104", second, message)
    for edge in np.setdiff1d(late, same_cell)[:MOST]:
        behind, early = program.op(int(program.dep[edge])), program.op(int(op[edge]))
        yield Finding.at("T103", early, f"{early} stands before {behind}, which it needs")


def _never_provided(program: Program, schedule: Schedule) -> Iterator[Finding]:
    """T203: a need that no action and no receive fills."""
    op = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
    for index in np.unique(op[program.dep == NEVER])[:MOST]:
        waiting = program.op(int(index))
        what = " and ".join(_unfilled(program, schedule, waiting))
        yield Finding.at("T203", waiting, f"{waiting} waits for ever: {what}")


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
