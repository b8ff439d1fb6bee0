"""The watch without processes: what is said, what a person reads, who may come in, what is shut."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NoReturn, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from tests.support.patience import PATIENT_S, SOON_S
from treadle.dist.addresses import own_address
from treadle.dist.native_sockets import Sockets
from treadle.runtime.faults.progress.progress_page import PageReader, ProgressPage, Snapshot
from treadle.runtime.faults.watch import RankLostError
from treadle.runtime.faults.watch.contacts import Contact, beside, exchange
from treadle.runtime.faults.watch.links import Neighbour, open_listener
from treadle.runtime.faults.watch.loss import from_network, rank_lost, timed_out
from treadle.runtime.faults.watch.loss_messages import (
    MOST_MESSAGE_BYTES,
    MOST_WAITED_FOR,
    UNKNOWN,
    Condition,
    Goodbye,
    Greeting,
    Heartbeat,
    LossKind,
    Lost,
    Message,
    Observation,
    StateReply,
    StateRequest,
    WaitFailure,
    decode,
    encode,
)
from treadle.runtime.faults.watch.transport import Transport
from treadle.runtime.faults.watch.watchdog import Watchdog
from treadle.wire.errors import WireError
from treadle.wire.frames import FIRST_BYTES, Frames
from treadle.wire.listeners import PAUSE_S

TOKEN = bytes(range(16))


# What is said.

ints = st.integers(-(2**63), 2**63 - 1)
naturals = st.integers(0, 2**32 - 1)
slots = st.builds(Snapshot, ints, ints, ints)
messages = st.one_of(
    st.builds(Greeting, st.binary(min_size=16, max_size=16), naturals),
    st.builds(Heartbeat, slots),
    st.builds(Goodbye, slots),
    st.builds(
        Lost,
        *(naturals, naturals, naturals, st.sampled_from(LossKind), ints, ints, ints, naturals),
        *(st.booleans(), st.booleans(), st.booleans(), st.text(st.characters(categories=["L", "N"]), max_size=100)),
    ),
    st.builds(StateRequest, naturals, naturals, st.sampled_from(WaitFailure)),
    st.builds(
        StateReply,
        *(naturals, naturals, st.tuples(naturals, naturals)),
        st.builds(
            Observation,
            *(naturals, st.sampled_from(Condition), ints, ints, naturals, st.booleans()),
            st.lists(naturals, max_size=20).map(tuple),
        ),
    ),
)


def heard_in(frames: Frames, data: bytes) -> list[Message]:
    frames.feed(data)
    return [decode(body) for body in iter(frames.next, None)]


@given(st.lists(messages, max_size=8), st.integers(1, 50))
def test_what_is_said_is_heard(said: list[Message], piece: int) -> None:
    data = b"".join(map(encode, said))
    frames = Frames(MOST_MESSAGE_BYTES)
    assert [message for at in range(0, len(data), piece) for message in heard_in(frames, data[at : at + piece])] == said


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_malformed(data: bytes) -> None:
    for read in (lambda: heard_in(Frames(MOST_MESSAGE_BYTES), data), lambda: decode(data)):
        try:
            read()
        except WireError:
            continue


@given(messages, st.data())
def test_a_message_with_a_byte_changed_is_a_message_or_malformed(said: Message, data: st.DataObject) -> None:
    body = bytearray(encode(said)[4:])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(body))
    except WireError:
        return


def test_the_largest_message_fits_and_what_is_longer_is_refused_by_its_length() -> None:
    most = 2**32 - 1
    waits = (most,) * (MOST_WAITED_FOR + 5)
    seen = Observation(most, Condition.ANSWERS, 2**63 - 1, 2**63 - 1, 2**63 - 1, True, waits)
    said = encode(StateReply(most, most, (most, most), seen))
    (heard,) = heard_in(Frames(MOST_MESSAGE_BYTES), said)
    assert isinstance(heard, StateReply)
    assert heard.observation.waits == waits[:MOST_WAITED_FOR]
    frames = Frames(MOST_MESSAGE_BYTES)
    frames.feed((MOST_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(WireError, match="the limit is"):
        frames.next()


@pytest.mark.parametrize(
    ("told", "change"),
    [
        (Heartbeat(Snapshot(0, 0, 0)), {"slots": [0, 0]}),
        (Heartbeat(Snapshot(0, 0, 0)), {"slots": [0, 0, "0"]}),
        (Greeting(TOKEN, 3), {"token": TOKEN[:-1]}),
        (Greeting(TOKEN, 3), {"rank": -1}),
        (Greeting(TOKEN, 3), {"type": "treadle watch 2"}),
        (StateRequest(0, 1, WaitFailure.CLOSED), {"cause": 9}),
        (StateRequest(0, 1, WaitFailure.CLOSED), {"more": 1}),
        (Lost(1, 1, 1, LossKind.RAISED, 0, 0, 0, 0), {"text": "x" * 601}),
        (Lost(1, 1, 1, LossKind.RAISED, 0, 0, 0, 0), {"still_ms": -1}),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_fields_out_of_bounds_are_malformed(told: Message, change: dict[str, object]) -> None:
    fields = msgpack.decode(encode(told)[4:])
    assert decode(msgpack.encode(fields)) == told
    with pytest.raises(WireError, match="malformed"):
        decode(msgpack.encode(fields | change))


def test_text_that_is_no_utf8_can_be_told() -> None:
    (heard,) = heard_in(Frames(), encode(Lost(1, 1, 1, LossKind.RAISED, 0, 0, 0, 0, text="\udc80" + "\u00e4" * 400)))
    assert isinstance(heard, Lost)
    assert heard.text == "?" + "\u00e4" * 299


def test_text_of_others_is_cut_and_printable() -> None:
    lost = Lost(1, 1, 1, LossKind.RAISED, 0, 0, 0, 0, text="ValueError: \x1b[2J" + "x" * 5000)
    (heard,) = heard_in(Frames(), encode(lost))
    assert isinstance(heard, Lost)
    assert len(heard.text) <= 600
    assert heard.text.isprintable()


# What a person reads.


def told(lost: Lost, waiting_for: str | None = None) -> RankLostError:
    here = Snapshot(1, 1, 7)
    return rank_lost(
        lost, rank=0, here=here, name=lambda rank, op: f"F{op}.{rank}", deadline_s=60, waiting_for=waiting_for
    )


def test_the_words_of_a_loss() -> None:
    killed = Lost(1, 1, 2, LossKind.KILLED, 3, 7, 0, 0)
    error = told(killed, "B1.0 from rank 1")
    assert str(error) == (
        "rank 2 was lost first: killed at F3.2 (step 7). This rank (0) was at F1.0, waiting for B1.0 from rank 1."
    )
    assert (error.rank, error.kind, error.op, error.waiting_for) == (2, "killed", "F3.2", "B1.0 from rank 1")
    assert "killed, last seen at F3.2" in str(told(replace(killed, exact=False)))
    assert "killed between steps, after step 7." in str(told(replace(killed, op=-1)))
    assert "killed before its first step." in str(told(replace(killed, op=-1, step=-1)))
    assert told(replace(killed, op=UNKNOWN)).op is None
    assert "raised KeyError at F3.2 (step 7): 'a: b'. This" in str(
        told(replace(killed, kind=LossKind.RAISED, text="KeyError: 'a: b'"))
    )
    assert "for 61.0 s. If it was only slow, give more than 60 s." in str(
        told(replace(killed, kind=LossKind.HUNG, still_ms=61000))
    )
    assert "ranks 0, 2 wait for each other" in str(told(replace(killed, kind=LossKind.HUNG, text="0, 2")))


def test_errors_of_the_network_are_known_by_their_text() -> None:
    late = RuntimeError("[/pytorch/gloo] Timed out waiting 1500ms for recv operation to complete")
    closed = RuntimeError("[/pytorch/gloo] Connection closed by peer [127.0.0.1]:1234")
    assert (timed_out(late), from_network(late)) == (True, True)
    assert (timed_out(closed), from_network(closed)) == (False, True)
    assert not from_network(ValueError("shapes differ"))


# Who may come in.


class Ears:
    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.missed: list[tuple[int, bool]] = []
        self.goodbye_leaves = False

    def hear(self, neighbour: Neighbour, message: Message) -> None:
        self.heard.append(message)
        neighbour.left = neighbour.left or (self.goodbye_leaves and isinstance(message, Goodbye))

    def miss(self, neighbour: Neighbour, *, died: bool) -> None:
        self.missed.append((neighbour.rank, died))


Opened: TypeAlias = tuple[Transport, Ears, tuple[str, int]]


def contact(rank: int) -> Contact:
    return Contact(rank, "127.0.0.1", 1, os.getpid(), 0, TOKEN, b"h" * 16, b"n" * 16)


@pytest.fixture
def open_transport() -> Iterator[Opened]:
    ears, listener = Ears(), open_listener("127.0.0.1")
    transport = Transport(ears, [Neighbour(contact(3), None)], listener, TOKEN)
    transport.open({})
    yield transport, ears, listener.server.getsockname()
    transport.close()


def is_hung_up(transport: Transport, caller: socket.socket) -> bool:
    caller.settimeout(0.01)
    for _ in range(100):
        transport.turn(0.01)
        try:
            return caller.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 5000,
        encode(Greeting(bytes(16), 3)),
        encode(Greeting(TOKEN, 4)),
        encode(Heartbeat(Snapshot(0, 0, 0))),
        encode(Greeting(TOKEN, 3)).replace(b"treadle", b"TREADLE"),
        (FIRST_BYTES + 1).to_bytes(4, "big"),
    ],
    ids=["http", "noise", "wrong token", "not a neighbour", "no hello", "wrong magic", "long"],
)
def test_strangers_are_refused(open_transport: Opened, said: bytes) -> None:
    transport, ears, address = open_transport
    with socket.create_connection(address) as caller, socket.create_connection(address) as friend:
        caller.sendall(said)
        assert is_hung_up(transport, caller)
        assert not transport.met.is_set()
        friend.sendall(encode(Greeting(TOKEN, 3)) + encode(Heartbeat(Snapshot(1, 2, 3))))
        for _ in range(10):
            transport.turn(0.01)
        assert transport.met.is_set()
        assert ears.heard == [Heartbeat(Snapshot(1, 2, 3))]
        with pytest.raises(ConnectionError):
            socket.create_connection(address)  # the listener is closed


def test_a_neighbour_that_sends_no_message_is_dropped(open_transport: Opened) -> None:
    transport, ears, address = open_transport
    with socket.create_connection(address) as friend:
        friend.sendall(encode(Greeting(TOKEN, 3)))
        transport.turn(0.1)  # the call
        transport.turn(0.1)  # the greeting
        friend.sendall(b"\xff" * 10)
        assert is_hung_up(transport, friend)
    assert ears.missed == [(3, False)]


def test_messages_behind_a_greeting_may_be_larger_than_it(open_transport: Opened) -> None:
    transport, ears, address = open_transport
    seen = Observation(3, Condition.ANSWERS, 0, 0, 0, True, waits=tuple(range(FIRST_BYTES)))
    reply = StateReply(3, 1, (3, 1), seen)
    with socket.create_connection(address) as friend:
        friend.sendall(encode(Greeting(TOKEN, 3)) + encode(reply))
        for _ in range(10):
            transport.turn(0.01)
        assert ears.heard == [reply]


def test_a_neighbour_that_greets_and_leaves_at_once_has_met(open_transport: Opened) -> None:
    transport, ears, address = open_transport
    ears.goodbye_leaves = True
    with socket.create_connection(address) as friend:
        friend.sendall(encode(Greeting(TOKEN, 3)) + encode(Goodbye(Snapshot(1, 2, 3))))
        for _ in range(10):
            transport.turn(0.01)
    assert transport.met.is_set()
    assert ears.missed == []


def test_a_neighbour_that_hangs_up_is_missed_after_its_last_words(
    open_transport: Opened,
) -> None:
    transport, ears, address = open_transport
    with socket.create_connection(address) as friend:
        friend.sendall(encode(Greeting(TOKEN, 3)))
        transport.turn(0.1)  # the call
        transport.turn(0.1)  # the greeting
        transport.spread(Heartbeat(Snapshot(0, 0, 0)))  # unread by the friend, so that its close resets the connection
        friend.sendall(encode(StateRequest(3, 1, WaitFailure.CLOSED)))
    for _ in range(3):
        transport.turn(0.1)
    assert ears.heard == [StateRequest(3, 1, WaitFailure.CLOSED)]
    assert ears.missed == [(3, True)]


def test_a_turn_without_descriptors_does_not_spin(open_transport: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller stays in the queue, so the selector reports it at once, turn after turn."""
    transport, ears, address = open_transport

    def too_many(server: socket.socket) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as short, socket.create_connection(address) as friend:
        friend.sendall(encode(Greeting(TOKEN, 3)))
        short.setattr(socket.socket, "accept", too_many)
        for _ in range(3):
            before = time.monotonic()
            transport.turn(PATIENT_S)
            assert time.monotonic() - before >= PAUSE_S
        short.undo()
        for _ in range(10):
            transport.turn(0.01)
        assert transport.met.is_set()
    assert ears.heard == []


@pytest.mark.parametrize("greets", [True, False])
def test_a_forked_child_keeps_no_connection_open(open_transport: Opened, greets: bool) -> None:
    """The end of a rank on another host is seen by the end of its connections alone."""
    transport, _, address = open_transport
    with socket.create_connection(address) as friend:
        if greets:
            friend.sendall(encode(Greeting(TOKEN, 3)))
        transport.turn(PATIENT_S)  # the call
        if greets:
            transport.turn(PATIENT_S)
        assert transport.met.is_set() == greets
        over, end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(over, 1)
            os._exit(0)
        try:
            time.sleep(0.05)  # the child closes its copies when it begins
            transport.close()
            friend.settimeout(SOON_S)
            assert friend.recv(1) == b""
        finally:
            os.close(end)
            os.close(over)
            os.waitpid(child, 0)


# Small things.


@pytest.mark.parametrize("delayed", ["before the goodbye", "after it"])
def test_a_thread_that_is_quicker_to_leave_than_its_owner(delayed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`leave` asks the thread to end and wakes it: by then it may have closed everything."""
    progress = ProgressPage(mark=42)
    watchdog = Watchdog(0, progress, [[0]], PATIENT_S, lambda rank, op: str(op))
    transport = watchdog.start([], open_listener("127.0.0.1"), TOKEN, {})
    wake = transport.wake

    def late() -> None:
        if delayed == "after it":
            watchdog._thread.join(PATIENT_S)
            assert not watchdog.is_alive
        wake()

    monkeypatch.setattr(transport, "wake", late)
    watchdog.leave()
    watchdog.leave()
    assert not watchdog.is_alive
    assert not watchdog.do(lambda: None).is_set()  # an errand for a thread that is gone
    progress.close()


def test_neighbours_in_a_ring() -> None:
    assert beside([4, 5, 6, 7], 4) == {7, 5}
    assert beside([4, 6], 6) == {4}
    assert beside([4], 4) == set()


def test_contacts_come_back_whole() -> None:
    texts: dict[int, str] = {}

    def gather(text: str, ranks: Sequence[int]) -> list[str]:
        return [texts.setdefault(rank, text) for rank in ranks]

    one = replace(contact(7), address="fe80::1234:5678:9abc:def0", progress_fd=12)
    assert exchange([[7]], one, gather) == {}
    two = replace(one, rank=8)
    assert exchange([[7, 8]], two, gather) == {7: one}


def test_own_address_can_be_listened_at() -> None:
    open_listener(own_address()).close()


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ValueError, match=r"cannot listen at 192\.0\.2\.1"):
        open_listener("192.0.2.1")


def test_a_page_can_be_read_by_its_mark_only() -> None:
    with closing(ProgressPage(mark=42)) as progress:
        progress.slots[0], progress.slots[1], progress.slots[2] = 3, 1, 7
        assert PageReader.open(os.getpid(), progress.fd, mark=43) is None
        reader = PageReader.open(os.getpid(), progress.fd, mark=42)
        assert reader is not None
        with closing(reader):
            assert reader.look() == Snapshot(3, 1, 7)


def test_what_another_thread_opened_meanwhile_is_not_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer, socket.create_server(("127.0.0.1", 0)) as other:
        sockets = Sockets()
        with sockets.recording():
            listener = socket.create_server(("127.0.0.1", 0))
            called = socket.create_connection(peer.getsockname())
            caller = socket.create_connection(listener.getsockname())
            accepted = listener.accept()[0]
            foreign = socket.create_connection(other.getsockname())
            pair = socket.socketpair()
        assert sockets.ports == [listener.getsockname()[1]]
        sockets.keep([*sockets.ports, peer.getsockname()[1], 0])
        sockets.shut()
        foreign.sendall(b"x")
        pair[0].sendall(b"x")
        for ours in (called, accepted):
            with pytest.raises(BrokenPipeError):
                ours.sendall(b"x")
        for each in (listener, called, caller, accepted, foreign, *pair):
            each.close()


def test_exactly_the_recorded_connections_are_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outside = socket.create_connection(server.getsockname())
        sockets = Sockets()
        with sockets.recording():
            listener = socket.create_server(("127.0.0.1", 0))
            inside = socket.create_connection(server.getsockname())
            reused = socket.create_connection(server.getsockname())
        number = reused.fileno()
        os.dup2(outside.fileno(), number)  # the number now is another socket's
        sockets.shut()
        sockets.shut()
        assert len(sockets) == 3
        assert inside.recv(1) == b""
        outside.sendall(b"x")
        with pytest.raises(BrokenPipeError):
            inside.sendall(b"x")
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()
        for each in (outside, inside, reused, listener):
            each.close()
