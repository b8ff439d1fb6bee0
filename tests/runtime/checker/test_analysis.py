"""The rules of the stream checker on logs written by hand: what orders, what keeps, what the allocator may do."""

from __future__ import annotations

from itertools import count

import pytest

from treadle.runtime.checker.analysis import analyse
from treadle.runtime.checker.log import (
    HOST,
    RECORD_STREAM,
    Allocate,
    Collective,
    Entry,
    EventRecord,
    Free,
    HostWait,
    Keep,
    LaunchSite,
    Use,
    Wait,
)
from treadle.runtime.checker.stream_findings import FindingKind, order_findings

ONE, TWO, THREE = 1, 2, 3
STREAMS = ["host", "one", "two", "three"]
AT = LaunchSite("an op", "file.py:1")


class Script:
    """A log as one would write it down."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self._numbers = count(1)

    def new(self, stream: int = ONE) -> int:
        number = next(self._numbers)
        self.log.append(Allocate(number, stream, "[4] float32", AT))
        return number

    def write(self, stream: int, storage: int) -> None:
        self.log.append(Use(stream, (), (storage,), "fill", AT))

    def read(self, stream: int, storage: int) -> None:
        self.log.append(Use(stream, (storage,), (), "sum", AT))

    def order(self, first: int, second: int) -> None:
        event = next(self._numbers)
        self.log += [EventRecord(event, first, AT), Wait(second, event, "wait_event", AT)]

    def host_waits(self, stream: int) -> None:
        self.log.append(HostWait(stream, None, "tolist", AT))

    def keep(self, storage: int, stream: int) -> None:
        self.log.append(Keep(storage, stream, RECORD_STREAM, AT))

    def free(self, storage: int) -> None:
        self.log.append(Free(storage, AT))

    def kinds(self, *, host_orders: bool = False, strict: bool = False) -> list[FindingKind]:
        return [finding.kind for finding in analyse(self.log, STREAMS, host_orders=host_orders, strict=strict)]


def made(script: Script) -> int:
    """A tensor that stream one has written."""
    storage = script.new()
    script.write(ONE, storage)
    return storage


@pytest.mark.parametrize("ordered", [False, True])
def test_a_read_waits_for_the_write(ordered: bool) -> None:
    script = Script()
    x = made(script)
    if ordered:
        script.order(ONE, TWO)
    script.read(TWO, x)
    assert script.kinds() == ([] if ordered else [FindingKind.READ_TOO_EARLY])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_write_waits_for_reads_of_other_streams(ordered: bool) -> None:
    script = Script()
    x = made(script)
    script.order(ONE, TWO)
    script.read(TWO, x)
    if ordered:
        script.order(TWO, ONE)
    script.write(ONE, x)
    assert script.kinds() == ([] if ordered else [FindingKind.WRITTEN_TOO_EARLY])


def test_two_writes_are_in_an_order() -> None:
    script = Script()
    script.write(TWO, made(script))
    assert script.kinds() == [FindingKind.WRITTEN_TWICE]


def test_order_goes_on_from_stream_to_stream() -> None:
    script = Script()
    x = made(script)
    script.order(ONE, TWO)
    script.order(TWO, THREE)
    script.read(THREE, x)
    assert script.kinds() == []


def test_an_event_orders_what_was_launched_before_it() -> None:
    script = Script()
    x = script.new()
    script.order(ONE, TWO)
    script.write(ONE, x)
    script.read(TWO, x)
    assert script.kinds() == [FindingKind.READ_TOO_EARLY]


@pytest.mark.parametrize("host_orders", [False, True])
def test_what_the_host_has_waited_for_orders_only_if_it_may(host_orders: bool) -> None:
    script = Script()
    x = made(script)
    script.host_waits(ONE)
    script.read(TWO, x)
    assert script.kinds(host_orders=host_orders) == ([] if host_orders else [FindingKind.READ_TOO_EARLY])


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_waits_before_it_reads_pinned_memory(waits: bool) -> None:
    script = Script()
    room = script.new(HOST)
    script.write(ONE, room)
    if waits:
        script.host_waits(ONE)
    script.read(HOST, room)
    assert script.kinds() == ([] if waits else [FindingKind.READ_TOO_EARLY])


def test_a_launch_is_behind_what_the_host_wrote_and_the_next_write_is_not_behind_the_copy() -> None:
    script = Script()
    room = script.new(HOST)
    script.write(HOST, room)
    script.read(ONE, room)
    assert script.kinds() == []
    script.write(HOST, room)
    assert script.kinds() == [FindingKind.WRITTEN_TOO_EARLY]


def test_the_pinned_allocator_waits_for_copies() -> None:
    script = Script()
    room = script.new(HOST)
    script.write(ONE, room)
    script.free(room)
    assert script.kinds(strict=True) == []


# -- the allocator -----------------------------------------------------------------------------------------------------


def given_back(script: Script) -> None:
    """Memory of stream one that goes back while stream two may not have read it."""
    x = made(script)
    script.order(ONE, TWO)
    script.read(TWO, x)
    script.free(x)


def test_memory_is_not_given_to_another_tensor_under_a_reader() -> None:
    script = Script()
    given_back(script)
    script.write(ONE, script.new(ONE))
    assert script.kinds() == [FindingKind.REUSED]


def test_it_may_be_once_its_stream_is_behind_the_reader() -> None:
    script = Script()
    given_back(script)
    script.order(TWO, ONE)
    script.write(ONE, script.new(ONE))
    assert script.kinds() == []


def test_another_stream_has_other_memory() -> None:
    script = Script()
    given_back(script)
    script.write(TWO, script.new(TWO))
    script.write(THREE, script.new(THREE))
    assert script.kinds() == []


def test_memory_that_nobody_wrote_in_between_is_still_read() -> None:
    script = Script()
    given_back(script)
    script.free(script.new(ONE))
    script.write(ONE, script.new(ONE))
    assert script.kinds() == [FindingKind.REUSED]


def test_strictly_it_need_not_be_given_to_anyone() -> None:
    script = Script()
    given_back(script)
    assert script.kinds() == []
    assert script.kinds(strict=True) == [FindingKind.NOT_KEPT]


@pytest.mark.parametrize(("recorded", "found"), [(TWO, False), (THREE, True)])
def test_a_recorded_stream_keeps_memory(recorded: int, found: bool) -> None:
    script = Script()
    x = made(script)
    script.order(ONE, TWO)
    script.read(TWO, x)
    script.keep(x, recorded)
    script.free(x)
    script.write(ONE, script.new(ONE))
    assert bool(script.kinds(strict=True)) is found


def test_a_recorded_stream_covers_what_it_is_behind() -> None:
    """The allocator records an event on it when the memory goes back."""
    script = Script()
    x = made(script)
    script.order(ONE, TWO)
    script.read(TWO, x)
    script.order(TWO, THREE)
    script.keep(x, THREE)
    script.free(x)
    script.write(ONE, script.new(ONE))
    assert script.kinds(strict=True) == []


def test_a_place_is_told_once_with_op_stream_tensor_and_line() -> None:
    script = Script()
    for _ in range(3):
        script.read(TWO, made(script))
    (finding,) = analyse(script.log, STREAMS)
    assert finding.times == 3
    told = str(finding)
    for part in ("(3 times)", "[4] float32", "sum on two in an op at file.py:1", "fill on one", "way out"):
        assert part in told


# -- ranks -------------------------------------------------------------------------------------------------------------


def calls(*told: str) -> list[Collective]:
    """`ep alltoall 4` and so on."""
    parts = (text.split(" ", 2) for text in told)
    return [Collective(communicator, call, size, AT) for communicator, call, size in parts]


def test_ranks_that_call_alike_are_fine() -> None:
    both = calls("ep alltoall 4 float32", "dp allreduce 8 float32", "ep alltoall 2 float32")
    assert order_findings({0: both, 1: calls("ep alltoall 6 float32", *map(" ".join, [c[:3] for c in both[1:]]))}) == []


def test_other_ranks_of_other_groups_do_not_matter() -> None:
    assert (
        order_findings({0: calls("a allreduce 1", "b allreduce 1"), 1: calls("a allreduce 1", "c allreduce 2")}) == []
    )


@pytest.mark.parametrize(
    "other",
    [
        calls("dp allreduce 8", "ep alltoall 4"),
        calls("ep alltoall 4"),
        calls("ep alltoall 4", "dp allreduce 9"),
        calls("ep allgather 4", "dp allreduce 8"),
    ],
    ids=["the other way round", "one less", "another size", "another call"],
)
def test_ranks_that_call_differently_are_told(other: list[Collective]) -> None:
    mine = calls("ep alltoall 4", "dp allreduce 8")
    if len(other) == 1:
        other = [*other, *calls("dp alltoall 8")]
    (finding,) = order_findings({0: mine, 3: other})
    assert finding.kind is FindingKind.OTHER_ORDER
    assert "rank 0 calls" in str(finding)
    assert "rank 3" in str(finding)


def test_a_message_meets_its_receive() -> None:
    assert order_findings({0: calls("0>1 send 4", "0>1 send 4"), 1: calls("0>1 recv 4", "0>1 recv 4")}) == []
    (finding,) = order_findings({0: calls("0>1 send 4", "0>1 send 4"), 1: calls("0>1 recv 4", "0>1 recv 5")})
    assert "call 1" in str(finding)
