"""The Program of a measured step: receives as they were posted, the ops around the cells, replicas."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

import treadle
from treadle.ir.execute import execute
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.passes.measured import TAIL, measured_program
from treadle.schedules import SCHEDULES


def find(program: Program, rank: int, kind: OpKind, mb: int = -1) -> int:
    ranks = program.lane_rank[program.lane_of]
    (op,) = np.flatnonzero((ranks == rank) & (program.kind == kind) & (program.mb == mb))
    return int(op)


def named(program: Program, op: int) -> set[str]:
    """What an op waits for besides its lane: kind, micro-batch, rank."""
    ops = map(program.op, program.deps(op))
    return {f"{dep.kind.name}{dep.mb if dep.mb >= 0 else ''} of {dep.lane.rank}" for dep in ops}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_all_schedules_finish(name: str, pp: int) -> None:
    schedule = treadle.generate(name, pp=pp, microbatches=8)
    for dp in (1, 2):
        for tail in ((), TAIL, (OpKind.REDUCE_GRAD, OpKind.OPTIMIZER)):
            program = measured_program(schedule, dp=dp, tail=tail)
            assert program.num_ranks == pp * dp
            assert execute(program, np.ones(program.num_ops, np.int64)).finished


def test_receives_wait_for_the_computation_before_their_reader() -> None:
    program = measured_program(treadle.generate("1f1b", pp=4, microbatches=8))
    assert named(program, find(program, 1, OpKind.RECV_F, 0)) == set()
    assert named(program, find(program, 1, OpKind.RECV_F, 3)) == {"F2 of 1"}
    assert named(program, find(program, 1, OpKind.RECV_B, 2)) == {"B1 of 1"}
    # rank 1 does F0 F1 F2 B0: the first gradient's receive is posted when the second forward before it has ended
    assert named(program, find(program, 1, OpKind.RECV_B, 0)) == {"F1 of 1"}
    assert named(program, find(program, 2, OpKind.RECV_B, 0)) == {"F0 of 2"}
    assert named(program, find(program, 1, OpKind.SEND_F, 3)) == {"F3 of 1"}


def test_ops_around_the_cells_are_a_chain() -> None:
    program = measured_program(treadle.generate("1f1b", pp=2, microbatches=2), dp=2, tail=TAIL)
    # ranks are stage * dp + replica: rank 2 is stage 1 of replica 0
    assert named(program, find(program, 2, OpKind.F, 0)) == {"RECV_F0 of 2", "GATHER_PARAMS of 2"}
    chain = [OpKind.GC, OpKind.REDUCE_LAYERNORM, OpKind.REDUCE_TIED, OpKind.REDUCE_GRAD, OpKind.CLIP, OpKind.OPTIMIZER]
    for before, kind in pairwise(chain):
        assert named(program, find(program, 2, kind)) == {f"{before.name} of 2"}
    assert program.deps(find(program, 2, OpKind.GC)) == [find(program, 2, OpKind.B, 1)]


def group_of(program: Program, rank: int, kind: OpKind) -> set[int]:
    """The ranks that do an op of a kind together with a rank."""
    lane = program.lane_of[np.flatnonzero((program.kind == kind) & (program.lane_rank[program.lane_of] == rank))[0]]
    if program.lane_group[lane] < 0:
        return {rank}
    return set(program.lane_rank[program.lane_group == program.lane_group[lane]].tolist())


def test_groups() -> None:
    program = measured_program(treadle.generate("1f1b", pp=3, microbatches=3), dp=2, tail=TAIL)
    assert group_of(program, 3, OpKind.GATHER_PARAMS) == group_of(program, 3, OpKind.REDUCE_GRAD) == {2, 3}
    assert group_of(program, 5, OpKind.REDUCE_TIED) == {1, 5}  # the first and the last stage of replica 1
    assert group_of(program, 3, OpKind.CLIP) == set(range(6))
    assert group_of(program, 3, OpKind.REDUCE_LAYERNORM) == {3}
    assert not ((program.kind == OpKind.REDUCE_TIED) & np.isin(program.lane_rank[program.lane_of], (2, 3))).any()


def test_chunks_are_gathered_and_reduced_one_by_one() -> None:
    program = measured_program(treadle.generate("interleaved", pp=2, vpp=2, microbatches=4), tail=TAIL)
    lane = np.flatnonzero((program.lane_kind == LaneKind.DP) & (program.lane_rank == 1))[0]
    ops = [program.op(i) for i in range(*program.lane_ptr[lane : lane + 2])]
    assert [(op.kind.name, op.chunk) for op in ops] == [
        ("GATHER_PARAMS", 0),
        ("GATHER_PARAMS", 1),
        ("REDUCE_GRAD", 1),
        ("REDUCE_GRAD", 0),
    ]
    first = min(i for i in range(program.num_ops) if str(program.op(i)) == "F0.1" and program.op(i).lane.rank == 1)
    assert "GATHER_PARAMS of 1" in named(program, first)


def test_other_kinds_are_refused() -> None:
    known = ", ".join(kind.name for kind in TAIL)
    told = re.escape(f"ops around the cells are {known}, got HOST")
    with pytest.raises(ValueError, match=told):
        measured_program(treadle.generate("1f1b", pp=2, microbatches=2), tail=(OpKind.HOST,))
