"""One suite for all backends of lanes: order, waiting, errors, times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch

from treadle.dist.device import Host, StreamDevice
from treadle.dist.streams import Accelerator, Streams
from treadle.runtime.checker.communicator import CheckedStreams
from treadle.runtime.checker.log import EventRecord, HostWait
from treadle.runtime.run.lanes import Lanes, PacedLanes, SerialLanes, StreamLanes, ThreadLanes, VirtualLanes
from treadle.runtime.run.lanes.paced import MADE_UP_NS, Pace
from treadle.runtime.run.lanes.stream import RUN_AHEAD

NUM_LANES, NUM_OPS, DEADLINE_S = 4, 64, 5.0
MS = 1_000_000
DUR_NS = [20 * MS] * NUM_OPS


def on_streams(device: torch.device, streams: Streams) -> Lanes:
    behind = StreamDevice(device, timedelta(seconds=DEADLINE_S), streams)
    return StreamLanes([f"lane {lane}" for lane in range(NUM_LANES)], list(map(str, range(NUM_OPS))), behind)


def stream() -> Lanes:
    if not torch.accelerator.is_available():
        pytest.skip("lanes as streams need an accelerator")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return on_streams(device, Accelerator())


BACKENDS: dict[str, Callable[[], Lanes]] = {
    "thread": lambda: ThreadLanes(NUM_LANES, NUM_OPS, DEADLINE_S),
    "paced": lambda: PacedLanes(NUM_LANES, DUR_NS, [Pace.AFTER] * NUM_OPS, [0] * NUM_OPS, DEADLINE_S),
    "serial": lambda: SerialLanes(range(NUM_OPS), Host(timedelta(seconds=DEADLINE_S))),
    "virtual": lambda: VirtualLanes(NUM_LANES, DUR_NS),
    "stream": stream,
    "noted stream": lambda: on_streams(torch.device("cpu"), CheckedStreams()),
}


@pytest.fixture(params=BACKENDS)
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    made = BACKENDS[request.param]()
    yield made
    made.close()


def test_a_lane_runs_in_order(lanes: Lanes) -> None:
    ran: list[int] = []
    lanes.begin()
    for op in range(10):
        lanes.launch(1, op, lambda op=op: ran.append(op), ())  # type: ignore[misc]
    lanes.finish()
    assert ran == list(range(10))


def test_an_op_waits_for_ops_of_other_lanes(lanes: Lanes) -> None:
    """A chain that goes round the lanes, the caller's own included."""
    ran: list[int] = []
    lanes.begin()
    for op in range(24):
        lanes.launch(op % NUM_LANES, op, lambda op=op: ran.append(op), (op - 1,) if op else ())  # type: ignore[misc]
    lanes.finish()
    assert ran == list(range(24))
    start, end = lanes.times()
    assert all(end[op] <= start[op + 1] for op in range(23))
    assert all(start[op] <= end[op] for op in range(24))
    assert start[24] == end[24] == -1


def test_lanes_run_side_by_side(lanes: Lanes) -> None:
    """Two ops that do not wait for each other overlap, as each takes its time."""
    if isinstance(lanes, SerialLanes):
        pytest.skip("serial lanes are what does not overlap")
    lanes.begin()
    wait = (lambda: None) if isinstance(lanes, VirtualLanes | PacedLanes | StreamLanes) else (lambda: time.sleep(0.02))
    for op in (0, 1):
        lanes.launch(1 + op, op, wait, ())
    lanes.finish()
    start, end = lanes.times()
    if not isinstance(lanes, StreamLanes):
        assert max(start[:2]) < min(end[:2])


def test_an_error_comes_out_and_nothing_runs_behind_it(lanes: Lanes) -> None:
    ran: list[int] = []

    def fails() -> None:
        raise ValueError("no")

    lanes.begin()
    with pytest.raises(ValueError, match="no"):  # noqa: PT012 - where it comes out is the backend's
        lanes.launch(1, 0, fails, ())
        lanes.launch(2, 1, lambda: ran.append(1), (0,))
        lanes.finish()
    assert ran == []
    assert lanes.failed == 0


def test_a_step_after_an_error_runs(lanes: Lanes) -> None:
    test_an_error_comes_out_and_nothing_runs_behind_it(lanes)
    test_an_op_waits_for_ops_of_other_lanes(lanes)


def test_an_op_of_a_step_that_failed_ends_in_its_own_step() -> None:
    """It is still running when the next step begins: nobody there takes its end for another's."""
    lanes, go_on, ran = ThreadLanes(NUM_LANES, NUM_OPS, DEADLINE_S), threading.Event(), list[str]()
    lanes.begin()
    lanes.launch(1, 0, lambda: (go_on.wait(5), None)[1], ())
    with pytest.raises(ZeroDivisionError):
        lanes.launch(0, 1, lambda: (1 // 0, None)[1], ())
    lanes.begin()

    def late() -> None:
        time.sleep(0.1)
        ran.append("first")

    lanes.launch(2, 0, late, ())
    go_on.set()
    lanes.launch(0, 1, lambda: ran.append("second"), (0,))
    lanes.finish()
    assert ran == ["first", "second"]
    lanes.close()


def test_a_wait_has_a_deadline() -> None:
    lanes = ThreadLanes(NUM_LANES, NUM_OPS, 0.1)
    stop = threading.Event()
    lanes.begin()
    lanes.launch(1, 0, lambda: (stop.wait(5), None)[1], ())
    with pytest.raises(TimeoutError, match=r"op 0 has not ended within 0\.1 s"):
        lanes.launch(0, 1, lambda: None, (0,))
    stop.set()
    lanes.close()


def test_paced_ops_take_their_time_and_make_up_for_little() -> None:
    """Ten ops of 5 ms take 50 at least; after a gap an op makes up for nothing but its own late start."""
    lanes = PacedLanes(2, [5 * MS] * 12, [Pace.AFTER] * 12, [0] * 12, DEADLINE_S)
    lanes.begin()
    for op in range(10):
        lanes.launch(1, op, lambda: None, ())
    lanes.finish()
    start, end = lanes.times()
    assert end[9] - start[0] >= 50 * MS - MADE_UP_NS
    time.sleep(0.02)
    lanes.launch(1, 10, lambda: None, ())
    lanes.finish()
    start, end = lanes.times()
    assert end[10] - start[10] >= 5 * MS - MADE_UP_NS
    lanes.close()


def test_a_paced_message_leaves_when_its_time_is_over() -> None:
    lanes = PacedLanes(2, [10 * MS] * 2, [Pace.BEFORE, Pace.TOGETHER], [0, 1], DEADLINE_S)
    left: list[int] = []
    lanes.begin()
    lanes.launch(1, 0, lambda: left.append(time.perf_counter_ns()), ())
    lanes.finish()
    start, _ = lanes.times()
    assert left[0] - start[0] >= 9 * MS
    lanes.close()


def test_a_paced_step_is_over_when_its_last_op_is() -> None:
    lanes = PacedLanes(2, [30 * MS], [Pace.AFTER], [0], DEADLINE_S)
    lanes.begin()
    lanes.launch(0, 0, lambda: None, ())
    lanes.finish()
    finished = time.perf_counter_ns()
    start, end = lanes.times()
    assert start[0] + 30 * MS - MADE_UP_NS <= end[0] <= finished
    lanes.close()


def test_what_an_exchange_computes_is_part_of_its_time() -> None:
    """Another kind computes nothing; it is not held up by that, but once in a while by the machine."""
    num = 20
    lanes = PacedLanes(2, [3 * MS] * (num + 1), [Pace.TOGETHER] * (num + 1), [0, *[1] * num], DEADLINE_S)
    lanes.begin()
    lanes.launch(1, 0, lambda: None, ())
    for op in range(1, num + 1):
        lanes.launch(1, op, lambda: time.sleep(0.0006), (op - 1,))
    lanes.finish()
    start, end = lanes.times()
    assert min(start[op] - end[op - 1] for op in range(2, num + 1)) < 0.3 * MS
    lanes.close()


def test_after_an_error_a_paced_op_that_sleeps_does_not_run() -> None:
    """It knows already when it could start, as what it waits for has run; then a third lane fails."""
    for pace in Pace:
        lanes = PacedLanes(3, [150 * MS, 20 * MS, 5 * MS], [Pace.AFTER, pace, Pace.AFTER], [0, 1, 2], DEADLINE_S)
        ran: list[int] = []
        lanes.begin()
        lanes.launch(1, 0, partial(ran.append, 0), ())
        lanes.launch(2, 1, partial(ran.append, 1), (0,))
        time.sleep(0.08)
        with pytest.raises(ZeroDivisionError):
            lanes.launch(0, 2, lambda: (1 // 0, None)[1], ())
        lanes.close()
        assert 1 not in ran


def test_a_host_runs_a_bounded_number_of_ops_ahead_of_its_device() -> None:
    streams, num_ops = CheckedStreams(), RUN_AHEAD + 5
    device = StreamDevice(torch.device("cpu"), timedelta(seconds=DEADLINE_S), streams)
    lanes = StreamLanes(["compute", "ep"], list(map(str, range(2 * num_ops))), device)
    for op in range(num_ops):
        lanes.launch(0, 2 * op, lambda: None, ())
        lanes.launch(1, 2 * op + 1, lambda: None, (2 * op,))
    op_of = {entry.event: entry.where.op for entry in streams.log if isinstance(entry, EventRecord)}
    waits = [op_of[entry.event or 0] for entry in streams.log if isinstance(entry, HostWait)]
    assert waits == ["0", "2", "4", "6", "8"]  # the compute ops so far back
