"""Verifying the Program of an update: does it end, in every order of events, with every byte read before it is
overwritten.

The checks are the verifier's own: groups, waits, deadlocks. What they are held against is the rule of updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from treadle.ir.execute import Times, execute
from treadle.ir.ops import BUCKET_COMES, LaneKind, OpKind
from treadle.ir.program import NEVER, Ints, Longs, Op, Program
from treadle.ir.show import show_bytes
from treadle.verifier.finding import MOST, Finding, VerifyReport, worst_first
from treadle.verifier.graph import Graph, deadlock
from treadle.verifier.op_groups import check_groups
from treadle.verifier.waits import check_never, check_waits
from treadle.weights.update_rule import OpIndex, inputs, missing, reuses


def verify_update(program: Program, *, memory_limit: int | None = None) -> VerifyReport:
    """Everything there is to object to, however long ops take. `memory_limit`: bytes of a device's buffers."""
    if not program.layout.is_update:
        raise ValueError("this is the program of a training step; treadle.verifier.verify_program judges those")
    labels = OpIndex.of(program)
    times = execute(program, np.ones(program.num_ops, np.int64))
    findings = [*_check_labels(program, labels), *check_never(program), *check_groups(program), *_check_lanes(program)]
    read = inputs(program, labels)
    findings += [*_check_sizes(program, *read), *check_waits(program, _unmet(program, *read), times)]
    findings += _check_reuses(program, _unmet(program, *reuses(program, labels, _order(times))), times)
    if not times.finished:
        graph = Graph.of(program)
        stuck = graph.stuck()
        if stuck.any():
            findings.append(deadlock(program, graph, stuck, times.num_left))
    sizes = _buffer_bytes(program)
    for rank, size in enumerate(sizes):
        if memory_limit is not None and size > memory_limit:
            findings.append(
                Finding(
                    "T302",
                    rank,
                    None,
                    f"has {show_bytes(size)} of buffers, over the limit of {show_bytes(memory_limit)}",
                )
            )
    return VerifyReport(program.num_ranks, 0, program.num_ops, worst_first(findings), peaks=sizes)


def _check_labels(program: Program, labels: OpIndex) -> Iterator[Finding]:
    """T101, T102, T105: a bucket is copied once; broadcast and reloaded once on every device, or on a route's."""
    for index in np.flatnonzero(~labels.known)[:MOST]:
        yield _unknown(program.op(int(index)))
    for index in labels.first[labels.count > 1][:MOST]:
        op = program.op(int(index))
        yield Finding.at("T102", op, f"{op} runs more than once")
    absent, strays = missing(program, labels)
    for kind, rank, turn, source in absent[:MOST]:
        name = kind.name.lower().replace("_", " ")
        yield Finding("T101", rank, None, f"{name} {turn}.{source} is missing")
    for index in strays[:MOST]:
        op = program.op(int(index))
        yield Finding.at("T105", op, f"{op} stands on device {op.lane.rank}, which has no part in its bucket")


def _unknown(op: Op) -> Finding:
    if op.kind.lane is not op.lane.kind:
        return Finding.at("T105", op, f"{op} stands on a lane for {op.lane.name}, not on one for {_name(op)}")
    if op.kind is OpKind.H2D and op.layer != op.lane.rank:
        return Finding.at("T105", op, f"{op} copies for device {op.layer}, but stands on device {op.lane.rank}")
    return Finding.at("T105", op, f"{op} has no place in this update: no such round, source or buffer")


def _name(op: Op) -> str:
    return op.kind.lane.name.lower()


def _check_lanes(program: Program) -> Iterator[Finding]:
    """T202: a bucket reaches a device only if the device's lane is in the group."""
    used = np.diff(program.lane_ptr) > 0
    alone = used & np.isin(program.lane_kind, (LaneKind.SEND, LaneKind.RECV)) & (program.lane_group == NEVER)
    for lane in np.flatnonzero(alone)[:MOST]:
        op = program.op(int(program.lane_ptr[lane]))
        yield Finding.at("T202", op, f"{op}: its lane is in no group with that of the other device")
    lanes = np.flatnonzero(program.lane_kind == LaneKind.BROADCAST)
    lanes = lanes[np.diff(program.lane_ptr)[lanes] > 0]
    if not len(lanes):
        return
    group = np.bincount(program.lane_group[lanes] + 1).argmax() - 1
    for lane in lanes[(program.lane_group[lanes] != group) | (group == NEVER)][:MOST]:
        op = program.op(int(program.lane_ptr[lane]))
        if program.num_ranks > 1:
            yield Finding.at("T202", op, f"{op}: its lane is in no group with those of the other devices")


def _check_sizes(program: Program, op: Ints, made: Ints) -> Iterator[Finding]:
    """T205: a source copies what it sends, all of it; a device takes no more of a bucket than there is."""
    size = program.size_bytes
    wrong = np.where(program.kind[op] == OpKind.RELOAD, size[op] > size[made], size[op] != size[made])
    for place in np.flatnonzero(wrong & (made != NEVER))[:MOST]:
        reader, maker = program.op(int(op[place])), program.op(int(made[place]))
        message = f"{reader} is of {size[reader.index]} bytes, but {maker}, which it reads, of {size[maker.index]}"
        yield Finding.at("T205", reader, message)


def _check_reuses(program: Program, unmet: Ints, times: Times) -> Iterator[Finding]:
    """T401: a buffer is filled while something may still read what was in it."""
    reader = {int(op): int(wanted) for op, wanted in unmet}
    for finding in check_waits(program, unmet, times):
        assert finding.op is not None
        op, last = program.op(finding.op), program.op(reader[finding.op])
        what = "H2D" if op.kind is OpKind.H2D and op.chunk != NEVER else "IPC"
        message = f"{op} does not wait for {last}, which reads what is in its {what} buffer"
        yield replace(finding, message=message)


def _order(times: Times) -> Longs:
    """The order of ops in one execution; those that never start come last."""
    order: Longs = np.where(times.start < 0, np.iinfo(np.int64).max, times.start)
    return order


def _unmet(program: Program, op: Ints, wanted: Ints) -> Ints:
    """Pairs where neither the op's lane nor its own dependencies say plainly that it waits."""
    there = wanted != NEVER
    lane = program.lane_of
    plain = there & (lane[wanted] == lane[op]) & (wanted < op)
    rest = np.flatnonzero(~plain)
    count = np.diff(program.dep_ptr)[op[rest]]
    pair = np.repeat(rest, count)
    ends = np.cumsum(count)
    place = np.repeat(program.dep_ptr[op[rest]] - (ends - count), count) + np.arange(ends[-1] if len(ends) else 0)
    dep = program.dep[place]
    # A dependency on something after the needed op on its lane does as well.
    met = there[pair] & (dep >= wanted[pair]) & (lane[dep] == lane[wanted[pair]])
    waits = np.zeros(len(op), bool)
    waits[pair[met]] = True
    unmet = rest[~waits[rest]]
    return np.stack([op[unmet], wanted[unmet]], 1).astype(np.int32)


def _buffer_bytes(program: Program) -> tuple[int, ...]:
    """Return the bytes of each device's buffers: each is as large as the largest bucket it ever holds."""
    sizes = np.zeros(program.num_ranks, np.int64)
    for kinds in ((OpKind.H2D,), BUCKET_COMES):
        ops = np.flatnonzero(np.isin(program.kind, kinds) & (program.chunk >= 0))
        num = int(program.chunk[ops].max(initial=-1)) + 1
        if num:
            largest = np.zeros((program.num_ranks, num), np.int64)
            rank = program.lane_rank[program.lane_of[ops]]
            np.maximum.at(largest, (rank, program.chunk[ops]), program.size_bytes[ops])
            sizes += largest.sum(1)
    return tuple(int(size) for size in sizes)
