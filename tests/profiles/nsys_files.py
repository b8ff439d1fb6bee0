"""Exports of Nsight Systems, made of predicted runs after NVIDIA's documentation of their tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.ir.crossings import crossings
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.trace import Trace

NS = 1_000_000
SESSION_NS = 1_700_000_000 * 10**9
_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT, rangeId INT, category INT, color INT, text TEXT,
    globalTid INT, endGlobalTid INT, textId INT, domainId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, eventClass INT, globalTid INT,
    correlationId INT, nameId INT, returnValue INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT, contextId INT,
    streamId INT, correlationId INT, globalPid INT, demangledName INT, shortName INT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT, utcTime TEXT, localTime TEXT);
"""


class Work(NamedTuple):
    """A range of the host and the kernels launched in it: start, end, is it NCCL's, and is it of autograd's thread."""

    name: str
    kernels: tuple[tuple[int, int, bool, bool], ...]


def of_torch(trace: Trace, rank: int, steps: int = 1) -> Iterator[Work]:
    """What `PP:` names hold: one range an action."""
    program = trace.program
    stages = program.layout.placement.stages[rank]
    for step in range(steps):
        for op, start, end in _computed(trace, rank, step):
            name = OpKind(program.kind[op]).name
            kernels = ((start, start + 10, False, name != "F"), (end - 10, end, False, name != "F"))
            yield Work(f"PP:{stages[program.chunk[op]]}{name}{program.mb[op]}", kernels)


def of_pithtrain(trace: Trace, rank: int) -> Iterator[Work]:
    """What PithTrain's chunks hold; the first range says who the rank is."""
    program = trace.program
    yield Work(f"rank={rank}; pp={rank}/{program.layout.placement.pp} dp=0/1 cp=0/1 ep=0/1; mbs=1 seq=128", ())
    words = {OpKind.F: "forward", OpKind.B: "backward"}
    computed = list(_computed(trace, rank, 0))
    for at, (op, start, end) in enumerate(computed):
        if program.joined[op]:
            continue
        name = f"{words[OpKind(program.kind[op])]} chunk {program.mb[op]} (phase{program.chunk[op]})"
        if at + 1 < len(computed) and program.joined[computed[at + 1][0]]:
            other = computed[at + 1][0]
            name += f" backward chunk {program.mb[other]} (phase{program.chunk[other]})"
        yield Work(name, ((start, end, False, False),))
    yield Work("weight chunk", ())


def of_megatron(trace: Trace, rank: int, steps: int = 1) -> Iterator[Work]:
    """Megatron's ranges: messages by the method that exchanges them, and nothing about what is computed between."""
    program = trace.program
    path = "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator."
    kinds = [OpKind(program.kind[op]).name for op, _, _ in _computed(trace, rank, 0)]
    words = {"F": "forward", "B": "backward"}
    found = crossings(program)
    together = program.layout.placement.vpp > 1
    groups: list[list[int]] = [[]]
    for at, kind in enumerate(kinds):  # what is computed before the next messages: a pair, or one
        if groups[-1] and not (together and kind == "B" and kinds[at - 1] == "F"):
            groups.append([])
        groups[-1].append(at)
    for step in range(steps):
        computed = list(_computed(trace, rank, step))
        shift = step * _span(trace)
        yield Work(f"{path}recv_{words[kinds[0]]}", _message(trace, found.reader, found.recv, computed[0][0], shift))
        for before, behind in pairwise([*groups, []]):
            for at in before:
                _, start, end = computed[at]
                yield Work("", ((start, end, False, kinds[at] == "B"),))
            sent = "_".join(dict.fromkeys(words[kinds[at]] for at in before))
            received = "_".join(dict.fromkeys(words[kinds[at]] for at in behind))
            kernels = [_message(trace, found.maker, found.send, computed[at][0], shift) for at in before]
            kernels += [_message(trace, found.reader, found.recv, computed[at][0], shift) for at in behind]
            exchanged = tuple(each for kernel in kernels for each in kernel)
            if len(before) == 1 and len(behind) == 1 and not together and sent == received:
                yield Work(f"{path}send_{sent}", exchanged[: len(kernels[0])])
                yield Work(f"{path}recv_{received}", exchanged[len(kernels[0]) :])
            else:
                yield Work(f"{path}send_{sent}" + (f"_recv_{received}" if received else ""), exchanged)


def _message(trace: Trace, ends: object, ops: object, op: int, shift: int) -> tuple[tuple[int, int, bool, bool], ...]:
    unit = NS // trace.clock.ticks
    found = np.asarray(ops)[np.asarray(ends) == op]
    return tuple((int(trace.start[m]) * unit + shift, int(trace.end[m]) * unit + shift, True, False) for m in found)


def _span(trace: Trace) -> int:
    return (trace.makespan + 5 * trace.clock.ticks) * (NS // trace.clock.ticks)


def _computed(trace: Trace, rank: int, step: int) -> Iterator[tuple[int, int, int]]:
    """The computations of a rank in order: op, and when the device runs it."""
    program, unit, shift = trace.program, NS // trace.clock.ticks, step * _span(trace)
    lane = int(np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == LaneKind.COMPUTE))[0])
    for op in range(*program.lane_ptr[lane : lane + 2]):
        yield op, int(trace.start[op]) * unit + shift, int(trace.end[op]) * unit + shift


def write_export(path: Path, processes: dict[int, list[Work]], *, shift: int = 0, device: bool = True) -> Path:
    """Write an export: the host launches everything long before the device gets to it."""
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    ranges, launches, kernels = [], [], []
    for pid, works in processes.items():
        process, now, correlation = pid << 24, 1000, 0
        main, autograd = process + 1, process + 2
        for work in works:
            start = now
            for first, last, nccl, backward in work.kernels:
                correlation, now = correlation + 1, now + 10
                launches.append((now, now + 5, 0, autograd if backward else main, correlation, 0, 0))
                name = number("ncclDevKernel_SendRecv" if nccl else "gemm")
                kernels.append((first + shift, last + shift, pid % 8, 1, 7, correlation, process, name, name))
            now += 10
            if work.name:
                text = (work.name, None) if len(work.name) % 2 else (None, number(work.name))
                ranges.append((start + 1, now, 59, 0, 0, 0, text[0], main, main, text[1], 0))
            now += 10
        ranges.append((5, 6, 59, 0, 0, 0, "aten::mm", main, main, None, 0))
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; {_SCHEMA}")
        connection.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", ranges)
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, text) for text, n in strings.items()])
        connection.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (SESSION_NS - shift,))
        if device:
            connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?)", launches)
            connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", kernels)
        else:
            connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
            connection.execute("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME")
        connection.commit()
    return path
