"""A rank's ops at cell granularity as a list of instructions, and the loop that runs them.

One thread does everything, in the order that `plan.running.host_order` made: it posts receives, waits for one just
before its reader, computes, launches sends and reductions. Communication goes on by itself in between. The list is
made once; a step runs it and notes the time behind each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.lowering.running import expected, host_order
from treadle.runtime.faults.progress.wait_target import ALIKE, NOBODY, TIED
from treadle.runtime.run.handlers import HANDLERS, Handler
from treadle.runtime.run.rank_program import RankProgram

_COLLECTIVES = {LaneKind.DP: ALIKE, LaneKind.TIED: TIED}
"""The ranks that the ops of these lanes wait for."""


class Instruction(NamedTuple):
    """One call. `op` is the Program's op it belongs to; `peer` the rank it may have to wait for, or NOBODY."""

    op: int
    run: Callable[[], None]
    peer: int


def instructions(part: RankProgram, handlers: Mapping[OpKind, Handler] = HANDLERS) -> list[Instruction]:
    """Return the rank's calls in the order its thread makes them, with a wait before each first reader."""
    program = part.program
    made: list[Instruction] = []
    last: list[Instruction] = []
    arrivals: dict[int, Instruction] = {}
    for index in host_order(program, expected(program))[part.pp_rank]:
        op = program.op(int(index))
        calls = handlers[op.kind](part, op)
        peer = NOBODY
        if op.kind.is_recv or op.kind.is_send:
            peer = part.global_rank(op.lane.peer)
        elif op.lane.kind in _COLLECTIVES:
            peer = _COLLECTIVES[op.lane.kind]
        else:
            made += [arrivals.pop(needed) for needed in program.deps(op.index) if needed in arrivals]
        if calls.prepare is not None:
            made.append(Instruction(op.index, calls.prepare, NOBODY))
        made.append(Instruction(op.index, calls.launch, peer))
        if calls.finish is not None and (op.kind.is_recv or op.kind is OpKind.GATHER_PARAMS):
            arrivals[op.index] = Instruction(op.index, calls.finish, peer)
        elif calls.finish is not None:
            last.append(Instruction(op.index, calls.finish, peer))
        if op.kind.is_send and op.index + 1 in program.lane_ptr:  # the last of its channel
            last.append(Instruction(op.index, part.outgoing[op.lane.peer].drain, peer))
    assert not arrivals, "every receive and every gather has a reader"
    return made + last


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


def walk(listed: Sequence[Instruction], slots: memoryview, now: Callable[[], Any], ends: list[Any]) -> None:
    """Run a step. `slots` shows others where this rank is; `ends` gets the times, as `now` tells them."""
    note = ends.append
    note(now())
    for op, run, peer in listed:
        slots[0] = op
        slots[1] = peer
        run()
        note(now())


def where(listed: Sequence[Instruction], ends: list[Any]) -> Instruction:
    """Return the instruction at which a step failed; behind the last it is the last."""
    return listed[min(len(ends), len(listed)) - 1]
