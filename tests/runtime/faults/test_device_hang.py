"""The rank and the op that are named where a device hangs, from the events that each rank's streams have reached.

Drawn steps of a whole mesh stop at a fault, and every rank that may ask first names it. `--budget 10` draws 1,000.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import pytest

import treadle
from tests.support.budget import Budget
from tests.support.doubles import double_of
from treadle.costs import UNIT_COSTS
from treadle.ir.execute import leaders
from treadle.ir.ops import LaneKind
from treadle.ir.program import Op, Program
from treadle.lowering.options import LoweringOptions
from treadle.lowering.running import host_order
from treadle.passes.mesh import spread
from treadle.runtime.faults.progress.device_progress import DeviceProgress
from treadle.runtime.faults.progress.rank_progress import OpTable
from treadle.runtime.faults.progress.wait_target import ALIKE, ALL, EXPERTS, NOBODY
from treadle.runtime.faults.watch.diagnosis import culprit
from treadle.runtime.faults.watch.loss_messages import Condition, LossKind, Observation, WaitFailure
from treadle.runtime.step_plan import StepEnds, plan

SCHEDULES = ["1f1b", "interleaved-overlap", "zb-h1", "dualpipev"]
END = 1 << 40
NONE = OpTable([7, 8, 9], [0, 1, 0], [[], [0], [1]], [NOBODY, ALL, NOBODY], [[0, 2], [1]])


@double_of("torch.Event", own=("__init__",))
class Event:
    """A point that a stream has reached, or not."""

    def __init__(self, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        """torch 2.13 c10/core/Event.h:118-120: True once the device has come to it."""
        return self.reached


@dataclass
class Points:
    """A device that records these points, one after the other."""

    following: list[bool] = field(default_factory=list)

    def now(self) -> Event:
        return Event(self.following.pop(0))


def shown(*marks: tuple[int, int, list[bool]]) -> tuple[int, int]:
    """The slots after ops (stream, op, points reached), those with four of them in a wait between the inner ones."""
    slots, points = memoryview(array("q", [5, 6, 0, 0])), Points()
    progress: Any = DeviceProgress(NONE, [NOBODY, EXPERTS, NOBODY], slots, points)  # type: ignore[arg-type]
    launch(progress, points, marks)
    progress.look()
    return slots[0], slots[1]


def launch(progress: Any, points: Points, marks: Any) -> None:
    for stream, at, reached in marks:
        progress.begin(stream, at, Event(reached[0]))
        if len(reached) > 2:
            points.following = reached[1:3]
            progress.wait(True)
            progress.wait(False)
        progress.end(stream, at, Event(reached[-1]))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([(0, 0, [False, False])], (5, 6)),  # nothing has started: the op that is launched stays
        ([(0, 0, [True, False])], (7, NOBODY)),
        ([(0, 0, [True, True]), (1, 1, [True, True, False, False])], (8, EXPERTS)),
        ([(0, 0, [True, True]), (1, 1, [True, False, False, False])], (8, NOBODY)),  # before its wait
        ([(0, 0, [True, True]), (1, 1, [True, True, True, False])], (8, NOBODY)),  # after it
        ([(0, 0, [True, True]), (1, 1, [True, True, False, False]), (0, 2, [True, False])], (9, NOBODY)),
        ([(0, 0, [True, True, False, False]), (1, 1, [False] * 4)], (7, ALL)),  # a wait in an op that computes
    ],
)
def test_the_op_that_holds_up_a_device_is_shown(marks: Any, expected: tuple[int, int]) -> None:
    assert shown(*marks) == expected


# -- whole meshes ------------------------------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """A step of a mesh: its Program, the ops of each rank in launch order, the ops that go with each op."""

    program: Program
    order: list[list[Op]]
    together: dict[int, list[int]]
    ep: int
    replicas: int


@cache
def mesh_of(schedule: str, ep: int, dp: int) -> Mesh:
    made = treadle.generate(schedule, pp=2, microbatches=4)
    shape = LoweringOptions(blocks=("t",) * made.placement.num_stages, by_layer=True, moe=True)
    step = plan(made, shape, UNIT_COSTS, StepEnds(reduce=True))
    order = host_order(step.program, step.ticks, by_start=True)
    program, num = spread(step.program, ep=ep, dp=dp), ep * dp
    size = step.program.num_ops
    ops = [[program.op(int(i) + which * size) for i in order[pp]] for pp in range(2) for which in range(num)]
    together: dict[int, list[int]] = {}
    for op, lead in enumerate(leaders(program).tolist()):
        together.setdefault(lead, []).append(op)
    return Mesh(program, ops, {op: group for group in together.values() for op in group}, ep, num)


class Fault(NamedTuple):
    """A rank that stops at the op at this place of its order. Its kernel hangs, its host sleeps, or it is stopped."""

    kind: str
    rank: int
    at: int


def run_until_fault(mesh: Mesh, fault: Fault) -> tuple[set[int], set[int]]:
    """The ops that have started, and those that have ended, when nothing moves any more."""
    hung = mesh.order[fault.rank][fault.at].index
    lost = {op.index for op in mesh.order[fault.rank][fault.at :]} if fault.kind != "kernel" else set()
    before: dict[int, int] = {}
    for lane in range(mesh.program.num_lanes):
        ops = range(int(mesh.program.lane_ptr[lane]), int(mesh.program.lane_ptr[lane + 1]))
        before |= dict(zip(ops[1:], ops, strict=False))
    started, ended, moves = set[int](), set[int](), True
    while moves:
        moves = False
        for op in (op for row in mesh.order for op in row if op.index not in ended and op.index not in lost):
            needs = [*mesh.program.deps(op.index), *([before[op.index]] if op.index in before else [])]
            if op.index not in started and all(need in ended for need in needs):
                started.add(op.index)
                moves = True
            meets = op.kind.is_send or all(other in started for other in mesh.together[op.index])
            if op.index in started and op.index != hung and meets:
                ended.add(op.index)
                moves = True
    return started, ended


def target_of(op: Op) -> int:
    if op.kind.is_send or op.kind.is_recv:
        return op.lane.peer
    return {LaneKind.EP: EXPERTS, LaneKind.DP: ALIKE}.get(op.lane.kind, NOBODY)


def observe(mesh: Mesh, rank: int, fault: Fault, started: set[int], ended: set[int], *, after_wait: bool) -> Any:
    """What a rank answers who asks for its state."""
    own = mesh.order[rank]
    hung = mesh.order[fault.rank][fault.at].index
    slots, points = memoryview(array("q", [END, ALL, 0, 0])), Points()
    if rank == fault.rank and fault.kind == "host":
        slots[0], slots[1] = hung, NOBODY
    elif any(op.index not in ended for op in own):
        lanes = sorted({op.lane for op in own}, key=lambda lane: (lane.kind, lane.peer))
        place, lane = {op.index: at for at, op in enumerate(own)}, [lanes.index(op.lane) for op in own]
        rows = OpTable(
            [op.index for op in own],
            lane,
            [[place[dep] for dep in mesh.program.deps(op.index)] for op in own],
            [NOBODY] * len(own),
            [[at for at, of in enumerate(lane) if of == number] for number in range(len(lanes))],
        )
        progress: Any = DeviceProgress(rows, [target_of(op) for op in own], slots, points)  # type: ignore[arg-type]
        marks = []
        for at, op in enumerate(own):
            is_hung = op.index == hung and fault.kind == "kernel"
            has = [op.index in started, op.index in ended]
            if target_of(op) != NOBODY and not op.kind.is_send:
                waits = has[0] and (not is_hung or after_wait)
                has = [has[0], waits, has[1] or (is_hung and waits), has[1]]
            marks.append((lane[at], at, has))
        launch(progress, points, marks)
        progress.look()
    num, group = mesh.replicas, rank // mesh.replicas * mesh.replicas
    experts = group + (rank - group) // mesh.ep * mesh.ep
    waited: dict[int, Sequence[int]] = {
        ALIKE: range(group, group + num),
        ALL: range(len(mesh.order)),
        EXPERTS: range(experts, experts + mesh.ep),
        NOBODY: (),
    }
    waited_for = waited.get(slots[1], (slots[1],))
    others = tuple(each for each in waited_for if each != rank)
    return Observation(rank, Condition.ANSWERS, slots[0], 3, 8000, exact=True, waits=others)


def test_the_rank_that_hangs_is_named_by_every_rank(budget: Budget) -> None:
    seen: dict[str, int] = {}
    for number in budget.draws(least=100):
        draw = budget.random(number)
        mesh = mesh_of(draw.choice(SCHEDULES), draw.choice([1, 2]), draw.choice([1, 2]))
        rank, kind = draw.randrange(len(mesh.order)), draw.choice(["kernel", "host", "stopped"])
        places = [at for at, op in enumerate(mesh.order[rank]) if kind != "kernel" or not op.kind.is_send]
        fault = Fault(kind, rank, draw.choice(places))
        started, ended = run_until_fault(mesh, fault)
        after_wait = all(other in started for other in mesh.together[mesh.order[rank][fault.at].index])
        states = {
            each: observe(mesh, each, fault, started, ended, after_wait=after_wait)
            for each in range(len(mesh.order))
            if each != rank or kind != "stopped"
        }
        for asker in states:
            stuck = asker == rank
            found = culprit(asker, WaitFailure.STUCK if stuck else WaitFailure.TIMED_OUT, states)
            where = f"draw {number}: {fault}, asked by rank {asker}: {found}"
            assert found is not None, where
            assert (found.kind, found.observation.rank) == (LossKind.HUNG, rank), where
            if kind != "stopped":
                assert found.observation.op == mesh.order[rank][fault.at].index, where
        seen[kind] = seen.get(kind, 0) + 1
    budget.covered(f"named right by every rank: {', '.join(f'{num} x {kind}' for kind, num in seen.items())}")
    assert len(seen) == 3
