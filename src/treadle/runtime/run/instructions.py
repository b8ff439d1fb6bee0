"""A rank's ops as a list of instructions: what its thread launches, in order.

At cell granularity one thread does everything, in the order that `host_order` made: it posts receives, waits for one
just before its reader, computes, launches sends and reductions. Communication goes on by itself in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Op, Program
from treadle.runtime.faults.progress.wait_target import ALIKE, EXPERTS, NOBODY, TIED
from treadle.runtime.run.handlers import OpCalls
from treadle.runtime.run.rank_program import RankProgram

_COLLECTIVES = {LaneKind.DP: ALIKE, LaneKind.TIED: TIED, LaneKind.EP: EXPERTS}
"""The ranks that the ops of these lanes wait for."""


class Instruction(NamedTuple):
    """A call, launched on a lane after other ops.

    `op` is the Program's op it belongs to, `at` that op's place among the rank's; `peer` the rank it may have to wait
    for, or NOBODY.
    """

    op: int
    at: int
    lane: int
    run: Callable[[], None]
    after: Sequence[int]
    peer: int


def in_parts(part: RankProgram, own: Sequence[Op], calls: Sequence[OpCalls]) -> list[Instruction]:
    """Return the rank's calls in the order its thread makes them, with a wait before each first reader."""
    made: list[Instruction] = []
    last: list[Instruction] = []
    arrivals: dict[int, Instruction] = {}
    for at, (op, (launch, finish, prepare)) in enumerate(zip(own, calls, strict=True)):
        peer = wait_target(part, op)
        if peer == NOBODY:
            made += [arrivals.pop(needed) for needed in part.program.deps(op.index) if needed in arrivals]
        if prepare is not None:
            made.append(Instruction(op.index, at, 0, prepare, (), NOBODY))
        made.append(Instruction(op.index, at, 0, launch, (), peer))
        if finish is not None and (op.kind.is_recv or op.kind is OpKind.GATHER_PARAMS):
            arrivals[op.index] = Instruction(op.index, at, 0, finish, (), peer)
        elif finish is not None:
            last.append(Instruction(op.index, at, 0, finish, (), peer))
    assert not arrivals, "every receive and every gather has a reader"
    return made + last


def drains(part: RankProgram, own: Sequence[Op]) -> list[Instruction]:
    """Return the waits, at the end of a step, for what has not left a channel."""
    ends = [(at, op) for at, op in enumerate(own) if op.kind.is_send and op.index + 1 in part.program.lane_ptr]
    channels = part.outgoing
    return [Instruction(op.index, at, 0, channels[op.lane.peer].drain, (), wait_target(part, op)) for at, op in ends]


def wait_target(part: RankProgram, op: Op) -> int:
    """Return the ranks that an op waits for where it waits, NOBODY if it only computes."""
    if op.kind.is_recv or op.kind.is_send:
        return part.global_rank(op.lane.peer)
    return _COLLECTIVES.get(op.lane.kind, NOBODY)


def post_early(listed: Sequence[Instruction], program: Program) -> list[Instruction]:
    """Moves each receive up to where its buffer is free: behind the ops that it depends on.

    Receives of one channel keep their order. A rank whose receives are posted sooner blocks less often, and its peer
    too. Only once headers have come, which a post would wait for, and only on gloo: a receive of NCCL's that waits for
    its peer holds up what is launched behind it.
    """
    place: dict[int, int] = {}
    last: dict[int, int] = {}
    turn = []
    for at, instruction in enumerate(listed):
        index = instruction.op
        is_post = index not in place and program.op(index).kind.is_recv
        place.setdefault(index, at)
        behind = at
        if is_post:
            lane = int(program.lane_of[index])
            behind = last[lane] = max([last.get(lane, -1), *(place[dep] for dep in program.deps(index))])
        turn.append((behind, is_post, at))
    return [listed[at] for _, _, at in sorted(turn)]
