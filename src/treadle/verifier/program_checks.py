"""Verify a Program: labels, groups, waits, execution, launch order, memory. Rules: docs/reference/semantics.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from treadle.ir.execute import execute
from treadle.ir.index import Index
from treadle.ir.kernel import kernel
from treadle.ir.memory import in_unit, peaks
from treadle.ir.needs import unmet_needs
from treadle.ir.ops import COMMUNICATION
from treadle.ir.program import Bools, Ints, Longs, Program
from treadle.ir.show import show_bytes
from treadle.passes.issue_order import IssueOrder
from treadle.passes.ring import with_ring
from treadle.verifier.communicator_checks import check_queues
from treadle.verifier.communicator_queues import Communicators
from treadle.verifier.finding import Finding, VerifyReport, worst_first
from treadle.verifier.graph import Graph, deadlock
from treadle.verifier.op_groups import check_groups
from treadle.verifier.op_labels import check_labels
from treadle.verifier.waits import check_never, check_waits


def verify_program(
    program: Program,
    dur: Longs,
    *,
    ring: int | None = None,
    memory_limit: int | None = None,
    communicators: Communicators | None = None,
    lazy: bool = False,
) -> VerifyReport:
    """Check a program: labels, groups, waits, execution, launch order, memory.

    Args:
        program: a training step, sound or not.
        dur: ticks of each op; only memory depends on them.
        ring: receive buffers on each channel; None for as many as there are messages.
        memory_limit: the most bytes of activations that a rank may hold at once.
        communicators: which channels share one, as ranks launch their ops; None to judge each lane by itself.
        lazy: communicators are made at their first op.

    Returns:
        All findings, worst first, and each rank's peak, in bytes where the program knows what is saved.

    Raises:
        ValueError: the program is a weight update; or there is a limit, and the program does not know what is saved.

    Example:
        >>> program = treadle.lower(treadle.generate("zb-v", pp=2, microbatches=4), treadle.load_costs("unit"))
        >>> verify_program(program, program.size_bytes + 1).clean
        True

    """
    if program.layout.is_update:
        raise ValueError("this Program is a weight update, which treadle.weights.update_checks.verify_update judges")
    if memory_limit is not None and program.layout.saved_unit != "bytes":
        raise ValueError(
            "a limit on bytes needs a program that knows what its layers save, and this one counts "
            f"{program.layout.saved_unit}; lower it with costs that have [saved_bytes] attn and mlp (embed and head "
            "too, if they have [ends])"
        )
    pipeline, program = program, with_ring(program, ring)
    # Kernels hold no lock, so what does not depend on each other runs side by side.
    with ThreadPoolExecutor(max_workers=2) as pool:
        executed = pool.submit(execute, program, dur)
        launched = pool.submit(_launches, pipeline, program, dur, ring)
        index = Index.of(program)
        unmet = unmet_needs(program, index)
        times, launch_findings = executed.result(), launched.result()
    findings = [*check_labels(program, index), *check_never(program), *check_groups(program)]
    findings += check_waits(program, unmet, times)
    if not times.finished:
        findings += _deadlocks(Graph.of(pipeline, ring=ring), pipeline, times.num_left)
    hangs = not times.finished or any(finding.code == "T205" for finding in findings)
    findings += [finding for finding in launch_findings if finding.steps == () or not hangs]
    order = IssueOrder.early(program) if communicators is not None and not hangs else None
    if communicators is not None and order is not None:
        findings += check_queues(program, order, communicators, lazy=lazy)
    layout, sizes = program.layout, []
    if times.finished:
        sizes = [int(size) for size in peaks(program, times).size]
        findings += _over(sizes, memory_limit)
    held = tuple(in_unit(layout, size) for size in sizes)
    return VerifyReport(program.num_ranks, 0, program.num_ops, worst_first(findings), (), held, layout.saved_unit)


def _deadlocks(graph: Graph, program: Program, num_never: int, code: str = "T201") -> Iterator[Finding]:
    stuck = graph.stuck()
    if stuck.any():
        yield deadlock(program, graph, stuck, num_never, code)


def _launches(pipeline: Program, program: Program, dur: Longs, ring: int | None) -> list[Finding]:
    """T206: the ranks' launch orders are none, or, taken together, lead in a circle."""
    if not (program.launch >= 0).any():
        return []
    malformed = _malformed_launch(program)
    if malformed is not None:
        return [malformed]
    previous = _previous(program.launch, program.lane_ptr, program.lane_rank, program.num_ranks)
    times = execute(program, dur, after=previous)
    if times.finished:
        return []
    return list(_deadlocks(Graph.of(pipeline, ring=ring, launch=True), pipeline, times.num_left, "T206"))


def _malformed_launch(program: Program) -> Finding | None:
    wrong = _misnumbered(
        program.launch,
        program.lane_ptr,
        program.lane_rank,
        np.isin(program.lane_kind, COMMUNICATION),
        program.num_ranks,
    )
    if wrong < 0:
        return None
    op = program.op(int(wrong))
    message = f"{op} is launched as number {int(program.launch[wrong])}: a rank numbers its communication 0, 1, 2, ..."
    return Finding.at("T206", op, message)


@kernel
def _misnumbered(launch: Ints, lane_ptr: Longs, lane_rank: Ints, talks: Bools, num_ranks: int) -> int:
    """The first op whose launch number is not one of its rank's, or taken, or should not be; -1 if all is well."""
    count = np.zeros(num_ranks + 1, np.int64)
    for lane in range(len(lane_rank)):
        if talks[lane]:
            count[lane_rank[lane] + 1] += lane_ptr[lane + 1] - lane_ptr[lane]
    for rank in range(num_ranks):
        count[rank + 1] += count[rank]
    taken = np.zeros(count[num_ranks], np.bool_)
    for lane in range(len(lane_rank)):
        rank = lane_rank[lane]
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            place = count[rank] + launch[op]
            if not talks[lane]:
                if launch[op] != -1:
                    return op
                continue
            if launch[op] < 0 or place >= count[rank + 1] or taken[place]:
                return op
            taken[place] = True
    return -1


@kernel
def _previous(launch: Ints, lane_ptr: Longs, lane_rank: Ints, num_ranks: int) -> Ints:
    """Return for each communication op the one its rank launches before it, or -1."""
    count = np.zeros(num_ranks + 1, np.int64)
    for lane in range(len(lane_rank)):
        if lane_ptr[lane] < lane_ptr[lane + 1] and launch[lane_ptr[lane]] >= 0:
            count[lane_rank[lane] + 1] += lane_ptr[lane + 1] - lane_ptr[lane]
    for rank in range(num_ranks):
        count[rank + 1] += count[rank]
    order = np.empty(count[num_ranks], np.int32)
    for lane in range(len(lane_rank)):
        for op in range(lane_ptr[lane], lane_ptr[lane + 1]):
            if launch[op] >= 0:
                order[count[lane_rank[lane]] + launch[op]] = op
    previous = np.full(len(launch), -1, np.int32)
    for rank in range(num_ranks):
        for place in range(count[rank] + 1, count[rank + 1]):
            previous[order[place]] = order[place - 1]
    return previous


def _over(sizes: list[int], limit: int | None) -> Iterator[Finding]:
    for rank, size in enumerate(sizes):
        if limit is not None and size > limit:
            held, most = show_bytes(size), show_bytes(limit)
            if held == most:  # alike when rounded
                held, most = f"{size} bytes", f"{limit} bytes"
            yield Finding("T302", rank, None, f"holds {held} of activations at once, over the limit of {most}")
