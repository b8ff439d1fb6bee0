"""Recording -> Imported: the schedule that ran, its Program, and when each op of it started and ended in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treadle.ir import Action, Cell, Pair, Schedule
from treadle.ir.action import Kind
from treadle.ir.blocks import write_layout
from treadle.ir.program import Program
from treadle.ir.steps import Steps
from treadle.passes.measured import TAIL, measured_program
from treadle.profiles.fill_labels import PipelineSize, fill, is_compute
from treadle.profiles.imported import Imported
from treadle.profiles.layer_parts import assemble_parts, has_parts
from treadle.profiles.matching import match
from treadle.profiles.mesh_places import RankGrid, place_ranks
from treadle.profiles.naming import name
from treadle.profiles.recording import RankRecording, Recording, Remark
from treadle.verifier import verify_schedule

_OTHER_UNIT = 100
"""No rank computes so many times as long as the others."""


def assemble(recording: Recording, blocks: tuple[str, ...] | None = None) -> Imported:
    """Match the marks of all ranks with a schedule.

    Args:
        recording: what a reader found.
        blocks: of each stage, as the trainer's configuration has them; no profile names them.

    Raises:
        ValueError: ranks are missing or contradict each other, no step is whole, or there are blocks for another number
            of stages.

    """
    recording = _without_copies(recording)
    if has_parts(recording):
        return assemble_parts(recording)
    size, grid = fill(recording, place_ranks(recording))
    rows, whole, remarks = _rows(grid, size)
    remarks += _odd_units(grid)
    schedule = Schedule("imported", size.placement, size.num_mb, rows)
    schedule, differs = name(schedule)
    if differs:
        remarks.append(Remark(f"the order of cells is that of no schedule here; {differs}"))
        report = verify_schedule(schedule)
        remarks += [Remark(f"the schedule as recorded does not verify: {finding}") for finding in report.findings[:1]]
    program = _program(schedule, recording, size.dp)
    if blocks is not None:
        program = _with_blocks(program, blocks)
    times = match(program, grid, whole, waits_inside=recording.waits_inside)
    about = f"measured, {recording.form} profile of {program.num_ranks} ranks"
    steps = Steps(program, times.steps, times.start, times.end, about=about)
    return Imported(recording.form, schedule, not differs, steps, (*recording.remarks, *remarks, *times.remarks))


def _without_copies(recording: Recording) -> Recording:
    ranks = tuple(rank.without_copies() for rank in recording.ranks)
    copies = tuple(
        Remark("an event was recorded twice, and counts once", rank.source, len(rank) - len(kept))
        for rank, kept in zip(recording.ranks, ranks, strict=True)
        if len(kept) < len(rank)
    )
    return replace(recording, ranks=ranks, remarks=(*recording.remarks, *copies))


def _program(schedule: Schedule, recording: Recording, dp: int) -> Program:
    """The Program with what was recorded around the cells; where receives wait for cells before, they do here."""
    seen = {int(kind) for rank in recording.ranks for kind in np.unique(rank.kind)}
    tail = [kind for kind in TAIL if int(kind) in seen]
    return measured_program(schedule, dp=dp, tail=tail, late_receives=recording.late_receives)


def _with_blocks(program: Program, blocks: tuple[str, ...]) -> Program:
    num_stages = program.layout.placement.num_stages
    if len(blocks) != num_stages:
        raise ValueError(
            f"the layout has {len(blocks)} stages ({write_layout(blocks)}), and {num_stages} ran; "
            "give as many, divided by |"
        )
    return replace(program, layout=replace(program.layout, blocks=blocks, saved_unit="layers"))


def _rows(grid: RankGrid, size: PipelineSize) -> tuple[tuple[tuple[Cell, ...], ...], list[int], list[Remark]]:
    """The row of each rank, the steps in which all ranks have it, and what is said about the others."""
    found = [[_rows_of_steps(rank) for rank in row] for row in grid]
    every = sorted(set().union(*(rows for column in found for rows in column)))
    usual = []
    for column in found:
        counts = Counter(row for rows in column for row in rows.values())
        usual.append(max(counts, key=lambda row: (counts[row], len(row))))
    _refuse_uneven(usual, size)
    whole, remarks = [], []
    for step in every:
        odd = [
            (rank, rows.get(step))
            for column, ranks, row in zip(found, grid, usual, strict=True)
            for rows, rank in zip(column, ranks, strict=True)
            if rows.get(step) != row
        ]
        if not odd:
            whole.append(step)
            continue
        rank, row = odd[0]
        why = f"has {len(row)} cells, or another order than in other steps" if row else "has nothing of it"
        others = f" and {len(odd) - 1} more ranks" if len(odd) > 1 else ""
        remarks.append(Remark(f"step {step} is left out: {rank.source}{others} {why}"))
    if not whole:
        reasons = "; ".join(str(remark) for remark in remarks[:3])
        raise ValueError(f"no step is whole on all ranks: {reasons}")
    return tuple(usual), whole, remarks


def _odd_units(grid: RankGrid) -> list[Remark]:
    """Ranks whose computations are longer or shorter than all others' by so much that they count another unit."""
    ranks = [rank for row in grid for rank in row]
    typical = np.array([np.median((rank.end - rank.start)[is_compute(rank)]) for rank in ranks])
    ratio = typical / max(float(np.median(typical)), 1.0)
    return [
        Remark(
            f"computes {each:,.0f} times as long as the ranks usually do: are its times in another unit?", rank.source
        )
        for rank, each in zip(ranks, ratio, strict=True)
        if each > _OTHER_UNIT
    ]


def _refuse_uneven(rows: Sequence[tuple[Cell, ...]], size: PipelineSize) -> None:
    """Every rank does the forward of each micro-batch and chunk once."""
    wanted = {(mb, chunk) for mb in range(size.num_mb) for chunk in range(size.placement.vpp)}
    for rank, row in enumerate(rows):
        forwards = [(a.mb, a.chunk) for cell in row for a in cell.actions if a.kind is Kind.F]
        lost = sorted(wanted - set(forwards))
        if size.placement.num_pipes == 1 and (lost or len(forwards) != len(wanted)):
            what = f"no {Action(Kind.F, *lost[0])}" if lost else f"{len(forwards)} forwards"
            why = "the profile lost a part of the step" if lost else "two files are of this rank; give those of one run"
            raise ValueError(
                f"rank {rank} of the pipeline has {what}, and {size.num_mb} micro-batches through "
                f"{size.placement.vpp} chunks are {len(wanted)}: {why}"
            )


def _rows_of_steps(rank: RankRecording) -> dict[int, tuple[Cell, ...]]:
    """The cells of each step, in the order in which they started."""
    at = np.flatnonzero(is_compute(rank))
    rows: dict[int, list[Cell]] = {}
    columns = (rank.step[at], rank.kind[at], rank.mb[at], rank.chunk[at], rank.joined[at])
    for step, kind, mb, chunk, joined in zip(*(column.tolist() for column in columns), strict=True):
        row, action = rows.setdefault(step, []), Action(Kind(kind), mb, chunk)
        before = row[-1] if joined and row else None
        if isinstance(before, Action):
            row[-1] = Pair(before, action)
        else:
            row.append(action)
    return {step: tuple(row) for step, row in rows.items()}
