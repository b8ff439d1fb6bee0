"""What actions and messages take and save, read off a Program: lowering, costs and memory have one definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from treadle.costs import Costs, durations
from treadle.ir import Action, Kind, Placement, Schedule
from treadle.ir.memory import changes
from treadle.ir.ops import ACTIONS, LaneKind, OpKind, OpPhase
from treadle.ir.program import Longs, Program
from treadle.lowering import LoweringOptions, lower
from treadle.synthesize.problem import Place


@dataclass(frozen=True)
class StepSizes:
    """Ticks of every action and message, and what actions take and give back."""

    ticks: dict[Place, int]
    taken: dict[Place, int]
    given: dict[Place, int]
    messages: dict[Place, int]
    unit: str


_KINDS = {kind: Kind[kind.name] for kind in ACTIONS}


def read_sizes(
    placement: Placement, microbatches: int, costs: Costs, options: LoweringOptions, *, split: bool
) -> StepSizes:
    program = lower(plain_schedule(placement, microbatches, split=split), costs, options)
    ticks = durations(program, costs)
    what, taken, given = changes(program)
    places = dict(_places(program))
    return StepSizes(
        ticks={place: int(ticks[op]) for op, place in places.items()},
        taken={place: int(taken[what[op]]) for op, place in places.items()},
        given={place: int(given[what[op]]) for op, place in places.items()},
        messages=_messages(program, ticks),
        unit=program.layout.saved_unit,
    )


def _messages(program: Program, ticks: Longs) -> dict[Place, int]:
    """Return the ticks of each message, by its reader; its two ends run together, as long as the longer one."""
    found: dict[Place, int] = {}
    for op in range(program.num_ops):
        kind = OpKind(program.kind[op])
        if kind.is_send or kind.is_recv:
            lane = program.lane_of[op]
            reader = int(program.lane_peer[lane] if kind.is_send else program.lane_rank[lane])
            letter = Kind.F if kind.phase is OpPhase.F else Kind.B
            place = reader, Action(letter, int(program.mb[op]), int(program.chunk[op]))
            found[place] = max(found.get(place, 0), int(ticks[op]))
    return found


def _places(program: Program) -> Iterator[tuple[int, Place]]:
    """Yield each compute op with the action that it is."""
    for lane in np.flatnonzero(program.lane_kind == LaneKind.COMPUTE):
        rank = int(program.lane_rank[lane])
        for op in range(int(program.lane_ptr[lane]), int(program.lane_ptr[lane + 1])):
            kind = _KINDS[OpKind(program.kind[op])]
            yield op, (rank, Action(kind, int(program.mb[op]), int(program.chunk[op])))


def plain_schedule(placement: Placement, microbatches: int, *, split: bool) -> Schedule:
    """Return a sound schedule of any placement: stage after stage forward, then stage after stage back."""
    rows = []
    num_mb = microbatches // placement.num_pipes
    back = (Kind.I, Kind.W) if split else (Kind.B,)
    for stages in placement.stages:
        forwards = sorted(range(placement.vpp), key=lambda chunk: stages[chunk])
        row = [Action(Kind.F, mb, chunk) for chunk in forwards for mb in range(num_mb)]
        for chunk in reversed(forwards):
            row += [Action(kind, mb, chunk) for mb in range(num_mb) for kind in back]
        rows.append(tuple(row))
    return Schedule("plain", placement, microbatches, tuple(rows))
