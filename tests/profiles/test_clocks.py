"""Clocks put together from messages: true offsets within the slack, and no order violated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from treadle.ir.ops import OpKind
from treadle.ir.program import Bools, Longs, Program
from treadle.ir.trace import Trace
from treadle.profiles.clocks import UNBOUNDED, Order, align, order_of
from treadle.simulator.waiting import shortest, without_waiting

MS = 10**6
SIZES = (("1f1b", {"pp": 4, "microbatches": 6}), ("interleaved", {"pp": 3, "microbatches": 6, "vpp": 2}))


def run(size: int = 0, *, steps: int = 2) -> tuple[Program, Longs, Longs]:
    """A simulated run of some steps, on one clock, in nanoseconds."""
    name, sizes = SIZES[size]
    costs = treadle.load_costs("unit")
    program = treadle.lower(treadle.generate(name, **sizes), costs)
    trace = treadle.simulate(program, replace(costs, message={"send": costs.clock.ticks // 10}))
    later = np.arange(steps)[:, None] * (trace.makespan + MS)
    return program, later + trace.start, later + trace.end


def computed(program: Program) -> Bools:
    return np.asarray(np.isin(program.kind, (OpKind.F, OpKind.B)))


def ranks_of(program: Program) -> Longs:
    return program.lane_rank[program.lane_of].astype(np.int64)


def holds(order: Order, offset: Longs) -> bool:
    first = order.first_time + offset[order.step, order.first]
    return bool((first <= order.then_time + offset[order.step, order.then]).all())


@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(0, 1),
    shifts=st.lists(st.integers(-(10**12), 10**12), min_size=4, max_size=4),
    messages=st.booleans(),
)
def test_shifted_clocks_are_recovered_within_their_uncertainty(size: int, shifts: list[int], messages: bool) -> None:
    program, start, end = run(size)
    known = np.ones(program.num_ops, bool) if messages else computed(program)
    shift = np.array(shifts[: program.num_ranks])
    own = shift[ranks_of(program)]
    order = order_of(program, start + own, end + own, known)
    found = align(order, [f"rank {rank}" for rank in range(program.num_ranks)], len(start))
    assert holds(order, found.offset)
    error = found.offset - (shift[0] - shift)
    assert (np.abs(error) <= found.uncertainty + 1).all()
    assert (found.uncertainty <= 2 * 720_720).all()


def test_offsets_are_in_the_middle_where_messages_take_as_long_both_ways() -> None:
    program, start, end = run()
    own = np.array([0, 7 * MS, -3 * MS, 10**9])[ranks_of(program)]
    found = align(order_of(program, start + own, end + own, computed(program)), list("abcd"), len(start))
    assert np.abs(found.offset[0] + [0, 7 * MS, -3 * MS, 10**9]).max() <= 1
    assert found.uncertainty.tolist() == [0, 72_072, 2 * 72_072, 3 * 72_072]


def test_clocks_of_one_name_that_agree_are_left_alone() -> None:
    program, start, end = run()
    found = align(order_of(program, start, end, computed(program)), ["host"] * 4, len(start))
    assert not found.offset.any()
    assert not found.remarks


def test_a_clock_off_by_a_second_is_moved_and_named() -> None:
    program, start, end = run()
    own = np.where(ranks_of(program) == 2, 10**9, 0)
    found = align(order_of(program, start + own, end + own, computed(program)), ["host"] * 4, len(start))
    assert abs(found.offset[0, 2] + 10**9) <= found.uncertainty[2]
    assert "rank 2 by -1.000 s (known to " in str(found.remarks[0])


def test_ranges_that_wait_for_their_input_tell_clocks_by_their_ends() -> None:
    """What a reader waited for its input is not known; that it computed as long as its shortest like is."""
    program, start, end = run()
    computes = np.flatnonzero(computed(program))
    behind = computes[1:][program.lane_of[computes[1:]] == program.lane_of[computes[:-1]]]
    start[:, behind] = end[:, behind - 1]
    own = np.where(ranks_of(program) == 2, 10**9, 0)
    order = order_of(program, start + own, end + own, computed(program), waits_inside=True)
    found = align(order, ["host"] * 4, len(start))
    assert abs(found.offset[0, 2] + 10**9) <= found.uncertainty[2] <= 720_720


def test_clocks_that_begin_decades_apart_are_put_together() -> None:
    program, start, end = run()
    own = np.where(ranks_of(program) % 2, 1_700_000_000 * 10**9, 0)
    order = order_of(program, start + own, end + own, computed(program))
    found = align(order, ["epoch", "boot", "epoch", "boot"], len(start))
    assert holds(order, found.offset)


def test_clocks_that_start_anew_with_each_step_are_put_together_step_by_step() -> None:
    program, start, end = run()
    own = np.array([0, 50 * MS])[:, None] * (ranks_of(program) == 1)
    order = order_of(program, start + own, end + own, computed(program))
    found = align(order, ["own"] * 4, len(start))
    assert holds(order, found.offset)
    assert abs(found.offset[1, 1] - found.offset[0, 1] + 50 * MS) <= 2 * found.uncertainty[1]
    assert any("step by step" in str(remark) for remark in found.remarks)


def test_one_impossible_message_is_left_out_and_reported() -> None:
    program, start, end = run()
    order = order_of(program, start, end, computed(program))
    bad = int(np.flatnonzero((order.first == 1) & (order.then == 2) & (order.step == 0))[2])
    wrong = order.then_time.copy()
    wrong[bad] -= 10**10
    found = align(order._replace(then_time=wrong), [f"rank {rank}" for rank in range(4)], len(start))
    assert np.abs(found.offset).max() <= found.uncertainty.max()
    assert any("messages contradict the others" in str(remark) for remark in found.remarks)


def test_times_that_contradict_each_other_on_any_clock_are_reported_with_how_much() -> None:
    columns = [np.array(column, np.int64) for column in ([0, 0], [0, 1], [10 * MS, 10 * MS], [1, 0], [0, 0])]
    found = align(Order(*columns), ["a", "b"], 1)  # type: ignore[arg-type]
    assert any("contradict each other by up to 10.000 ms" in str(remark) for remark in found.remarks)


def test_ranks_that_no_message_links_are_named() -> None:
    columns = [np.array(column, np.int64) for column in ([0], [0], [5], [1], [3])]
    found = align(Order(*columns), ["a", "b", "c"], 1)  # type: ignore[arg-type]
    assert any("no message links rank 0 with rank 2" in str(remark) for remark in found.remarks)
    assert found.uncertainty[1] == UNBOUNDED
    assert found.offset[0, 1] == 2


@pytest.mark.parametrize("messages", [True, False])
def test_the_order_of_a_sound_trace_holds_on_its_clock(messages: bool) -> None:
    program, start, end = run(1)
    known = np.ones(program.num_ops, bool) if messages else computed(program)
    order = order_of(program, start, end, known)
    assert len(order.step)
    assert holds(order, np.zeros((2, 3), np.int64))


def test_a_trace_without_waiting_keeps_transfers_and_drops_waits() -> None:
    """Both ends of a message are on one clock: what is left is the transfer, the same on both ends."""
    program, start, end = run(0, steps=1)
    ends = np.isin(program.kind, (OpKind.SEND_F, OpKind.RECV_F, OpKind.SEND_B, OpKind.RECV_B))
    waits = np.where(np.isin(program.kind, (OpKind.RECV_F, OpKind.RECV_B)), 300, 0)
    trace = Trace(program, start[0] - waits, end[0], measured=True)
    assert set(shortest(trace)[ends].tolist()) == {72_072}
    split = without_waiting(trace)
    assert (split.end == trace.end).all()
    assert set((split.end - split.start)[ends].tolist()) == {72_072}
