"""The oracle of Programs itself against simpler and slower ways, mutations and generated Programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random

import numpy as np
import pytest

from tests.support.brute_force_program import Machine, Op, Outcome, Step, execute
from tests.support.grid import pairs
from tests.support.program_mutations import MUTATIONS, Mutation, freeze, mutate_program, thaw
from tests.support.written_blocks import SOUND_BLOCKS
from tests.support.written_programs import (
    ATTN_W,
    CELLS,
    ENDS,
    HEAD_W,
    MLP_W,
    ONE,
    SAVED,
    SOUND,
    TWO_ENDED,
    TWO_ENDS,
    read,
    same,
)
from treadle.ir import Schedule
from treadle.ir.ops import STEP_END, STEP_ENDS, OpKind
from treadle.ir.program import Program
from treadle.passes.cells import lower_cells
from treadle.passes.launch import order_launches
from treadle.passes.layer_lanes import lower_layers
from treadle.passes.layers import Shape
from treadle.passes.mesh import spread
from treadle.passes.step_end import with_step_end
from treadle.schedules import SCHEDULES, generate

# Against simpler and slower ways


def behind(machine: Machine, op: Op) -> set[Op]:
    """All ops that a chain leads from to this one, found backwards one by one."""
    together: dict[Step, list[Op]] = {}
    for each in machine.ops:
        together.setdefault(each.step, []).append(each)
    found: set[Op] = set()
    todo = [op]
    while todo:
        for member in together[todo.pop().step]:
            place = member.lane.ops.index(member)
            before = member.lane.ops[place - 1 : place] if place and not member.joined else []
            for pred in (*before, *(dep for dep in member.deps if dep is not None)):
                for reached in together[pred.step]:
                    if reached not in found:
                        found.add(reached)
                        todo.append(reached)
    return found


def together_of(machine: Machine) -> list[set[int]]:
    """For each op the ops it goes together with, grown until nothing changes."""
    place = {op.index: (lane, k) for lane in machine.lanes for k, op in enumerate(lane.ops)}
    pairs = [(op.index, op.index - 1) for op in machine.ops if op.joined and place[op.index][1] > 0]
    for one, other in product(machine.lanes, machine.lanes):
        if one is not other and one.group == other.group != -1:
            pairs += [(a.index, b.index) for a, b in zip(one.ops, other.ops, strict=False)]
    sets = [{op.index} for op in machine.ops]
    changed = True
    while changed:
        changed = False
        for a, b in pairs:
            if sets[a] is not sets[b]:
                union = sets[a] | sets[b]
                for member in union:
                    sets[member] = union
                changed = True
    return sets


def tick(machine: Machine, dur: list[int]) -> int | None:
    """The makespan found by going through time tick by tick and through ops one by one; None if it hangs."""
    sets = together_of(machine)
    ends: dict[int, int] = {}
    time = 0
    while True:
        for op in machine.ops:
            members = [machine.ops[i] for i in sets[op.index]]
            if op.index not in ends and not op.step.never and all(_can_start(m, ends, time) for m in members):
                end = time + max(dur[m.index] for m in members)
                ends.update((m.index, end) for m in members)
        if len(ends) == len(machine.ops):
            return max(ends.values(), default=0)
        if all(end <= time for end in ends.values()):
            return None
        time += 1


def _can_start(op: Op, ends: dict[int, int], time: int) -> bool:
    def ended(other: Op | None) -> bool:
        return other is not None and ends.get(other.index, time + 1) <= time

    place = op.lane.ops.index(op)
    first = place
    while first > 0 and op.lane.ops[first].joined:
        first -= 1
    return all(map(ended, op.lane.ops[:first])) and all(map(ended, op.deps))


def small_programs() -> Iterator[tuple[Random, Program]]:
    random = Random(5)
    made = [lower_cells(generate(name, pp=2, microbatches=4)) for name in SCHEDULES]
    shape = partial(Shape, counts=False, offload=True, saved=SAVED)
    two = [generate(name, pp=2, microbatches=2) for name in ("1f1b", "zb-h1")]
    made += [lower_layers(schedule, shape(blocks=("t", "t")), reduce=True) for schedule in two]
    made.append(
        spread(lower_layers(generate("gpipe", pp=1, microbatches=2), shape(blocks=("t",)), reduce=True), ep=2, dp=1)
    )
    made += [read(layout, text)[0] for layout, text in SOUND[-3:] + SOUND_BLOCKS]
    for program in made * 4:
        yield random, mutate_program(program, random)


def test_chains_against_searches() -> None:
    for _, program in small_programs():
        machine = Machine(program, [1] * program.num_ops)
        befores, bit = machine.befores(machine.run()), machine.bits()
        for op in machine.ops:
            found = {other for other in machine.ops if befores[op.step] & bit[other.step]}
            assert found == behind(machine, op)


def test_times_against_ticks() -> None:
    ended = 0
    for random, program in small_programs():
        dur = [random.randint(1, 3) for _ in range(program.num_ops)]
        outcome = execute(program, dur)
        assert outcome.makespan == tick(Machine(program, dur), dur)
        ended += outcome.makespan is not None
    assert ended > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_rebuilding_is_exact(name: str) -> None:
    schedule = generate(name, pp=2, microbatches=4)
    cells = lower_cells(schedule)
    blocks = ("tt",) * schedule.placement.num_stages
    layers = lower_layers(schedule, Shape(blocks, offload=True, saved=SAVED, step_end=STEP_END), reduce=True)
    launched = order_launches(layers, np.ones(layers.num_ops, dtype=np.int64))
    for program in (cells, layers, launched, spread(layers, ep=2, dp=2)):
        assert same(freeze(thaw(program)), program)


def test_mutations_leave_the_program_alone() -> None:
    program = lower_cells(generate("dualpipe", pp=2, microbatches=4))
    copy = freeze(thaw(program))
    for seed in range(50):
        mutate_program(program, Random(seed))
    assert same(program, copy)


def test_a_dependency_on_an_op_that_is_gone_is_on_never() -> None:
    draft = thaw(read(CELLS, ONE)[0])
    del draft.lanes[0].ops[0]
    program = freeze(draft)
    assert program.deps(0)[0] == -1
    assert execute(program, [1] * program.num_ops).symptoms == {"hang", "missing", "wrong data"}


def test_each_mutation_can_do_damage() -> None:
    shape = Shape(
        ("Et", "tmL"), recompute=(OpKind.MLP_R,), offload=True, saved=SAVED, tied=((0, 1),), step_end=STEP_END
    )
    by_layer = spread(lower_layers(generate("1f1b", pp=2, microbatches=3), shape, reduce=True), ep=2, dp=1)
    made = [by_layer, lower_cells(generate("dualpipe", pp=2, microbatches=4)), read(TWO_ENDS, TWO_ENDED)[0]]
    launched = [order_launches(program, np.ones(program.num_ops, dtype=np.int64)) for program in made]
    for mutation in MUTATIONS:
        assert any(_damages(mutation, program, seed) for seed, program in product(range(20), launched)), mutation


def _damages(mutation: Mutation, program: Program, seed: int) -> bool:
    draft = thaw(program)
    changed = mutation(draft, Random(seed))
    damaged = freeze(draft)
    assert changed or same(program, damaged)
    return not execute(damaged, [1] * damaged.num_ops).clean


def test_damage_is_varied() -> None:
    outcomes = [execute(program, [1] * program.num_ops) for _, program in small_programs()]
    assert 0 < sum(outcome.clean for outcome in outcomes) < len(outcomes) / 2
    seen = frozenset[str]().union(*(outcome.symptoms for outcome in outcomes))
    assert seen == {"hang", "wrong data", "missing", "double", "unknown"}


# Generated Programs


SIZES = [(1, 1), (1, 4), (2, 2), (2, 4), (2, 6), (4, 8)]
BOTH = (MLP_W, ATTN_W)
ALL = (MLP_W, ATTN_W, OpKind.MTP_W, HEAD_W)
AGAIN = (OpKind.ATTN_R, OpKind.MLP_R)
SAVED_ENDS = {**ENDS.saved, OpKind.MTP_F: 13, OpKind.ATTN_R: 2, OpKind.MLP_R: 1}
MOVED = {OpKind.OFFLOAD: 5, OpKind.DISPATCH_F: 7, OpKind.SEND_F: 3, OpKind.RECV_F: 3}


@dataclass(frozen=True)
class Case:
    """A Shape of a schedule of any size: blocks before the first stage's, of every stage, behind the last stage's."""

    before: str
    row: str
    behind: str
    make: Callable[..., Shape]
    tied: bool = False

    def shape(self, schedule: Schedule) -> Shape:
        num_stages = schedule.placement.num_stages
        rows = [self.row] * num_stages
        rows[0] = self.before + rows[0]
        rows[-1] += self.behind
        tied = ((0, num_stages - 1),) if self.tied and num_stages > 1 else ()
        return self.make(blocks=tuple(rows), tied=tied)


dense = partial(Shape, moe=False, counts=False, saved=SAVED)
padded = partial(Shape, counts=False, saved=SAVED)
counted = partial(Shape, saved=SAVED)
CASES = [
    Case("", "t", "", partial(dense, split=())),
    Case("", "tt", "", partial(dense, split=BOTH, kept=0.5)),
    Case("", "tt", "", partial(padded, split=(), moved=MOVED)),
    Case("", "tt", "", partial(counted, split=BOTH, hold_attn_w=True)),
    Case("", "t", "", partial(counted, split=(MLP_W,), early_mlp_w=True)),
    Case("", "tt", "", partial(counted, split=BOTH, hold_attn_w=True, early_mlp_w=True, offload=True)),
    Case("", "tt", "L", partial(dense, split=ALL, offload=True, saved=SAVED_ENDS, kept=0.5)),
    Case("E", "t", "mL", partial(counted, split=ALL, saved=SAVED_ENDS, moved=MOVED), tied=True),
    Case("Ed", "t", "mmL", partial(padded, split=ALL, dense_saved={OpKind.MLP_F: 1}, step_end=STEP_END), tied=True),
    Case(
        "d", "dt", "", partial(counted, split=BOTH, hold_attn_w=True, offload=True, recompute=AGAIN, saved=SAVED_ENDS)
    ),
    Case("E", "dt", "L", partial(counted, split=(), recompute=AGAIN[:1], early_recompute=True, saved=SAVED_ENDS)),
    Case("", "t", "m", partial(dense, split=(OpKind.MTP_W,), recompute=AGAIN[1:], early_recompute=True, offload=True)),
]


def sound(program: Program, dur: list[int]) -> Outcome:
    outcome = execute(program, dur)
    assert outcome.clean, outcome.notes[:10]
    return outcome


def launched(program: Program, dur: list[int]) -> Program:
    return order_launches(program, np.array(dur, dtype=np.int64))


def random_dur(program: Program, random: Random) -> list[int]:
    return [random.randint(0, 9) for _ in range(program.num_ops)]


def schedules(name: str) -> Iterator[Schedule]:
    """Of the sizes that there are."""
    for pp, num_mb in SIZES:
        with suppress(ValueError):
            yield generate(name, pp=pp, microbatches=num_mb)


@pytest.mark.parametrize("name", SCHEDULES)
def test_generated_cells(name: str) -> None:
    random = Random(name)
    made = list(schedules(name))
    assert len(made) >= 3
    for schedule, form in product(made, (STEP_ENDS[0], STEP_END)):
        num_stages = schedule.placement.num_stages
        tied = ((0, num_stages - 1),) if form and num_stages > 1 else ()
        program = with_step_end(lower_cells(schedule), tied=tied, step_end=form)
        dur = random_dur(program, random)
        assert sound(launched(program, dur), dur) == sound(program, dur)


@pytest.mark.parametrize(("name", "number", "reduce"), pairs(SCHEDULES, range(len(CASES)), (False, True)))
def test_generated_layers(name: str, number: int, reduce: bool) -> None:
    """A size of each schedule and case, the next in turn; so each schedule has each size in several cases."""
    random, case, made = Random(name), CASES[number], list(schedules(name))
    turn = number + list(SCHEDULES).index(name)
    schedule = made[turn % len(made)]
    program = lower_layers(schedule, case.shape(schedule), reduce=reduce)
    dur = random_dur(program, random)
    outcome = sound(program, dur)
    assert sound(launched(program, dur), dur) == outcome
    if program.num_ops <= 120:
        _check_spread(program, dur, outcome, *MESHES[turn % len(MESHES)])


MESHES = ((2, 2), (2, 1), (1, 2))
"""Sizes of EP and DP."""


def _check_spread(program: Program, dur: list[int], alone: Outcome, ep: int, dp: int) -> None:
    mesh = spread(program, ep=ep, dp=dp)
    times = dur * (ep * dp)
    outcome = sound(launched(mesh, times), times)
    assert outcome.makespan == alone.makespan
    assert alone.peak is not None
    assert outcome.peak == tuple(peak for peak in alone.peak for _ in range(ep * dp))
