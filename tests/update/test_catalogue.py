"""The catalogue of layouts: each is sent once, however many devices share it, and arrives unchanged."""

from __future__ import annotations

import os
import re
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.host.boot_clock import boot_ns
from treadle.host.sockets import connect
from treadle.update import UpdateOptions
from treadle.update.coordinator.commit_log import CommitLog, Record
from treadle.update.coordinator.coordinator_thread import Coordinator
from treadle.update.protocol.attempt import Attempt, AttemptRefusedError
from treadle.update.protocol.catalogue import Known, layout_digest, list_layouts, pack, read_layouts, unpack
from treadle.update.protocol.control import (
    Asked,
    Catalogue,
    Enter,
    Fault,
    FromCoordinator,
    Layouts,
    Listed,
    Phase,
    Proceed,
    Report,
    Sides,
    ToCoordinator,
)
from treadle.update.protocol.leases import MARGIN
from treadle.update.protocol.record import Member
from treadle.update.protocol.update_messages import PROTOCOL, Describe, Hello, Status, WeightLayout
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.wire.errors import WireError
from treadle.wire.link import Link
from treadle.wire.listeners import listen_at_path

lengths = st.lists(st.integers(0, 6), max_size=2).map(tuple)
NAMES = ("q", "k", "v", "o")


@st.composite
def layouts(draw: st.DrawFn) -> WeightLayout:
    """Any layout: with tensors without pieces, and tensors that differ from another layout's of the same name."""
    tensors = [Tensor(name, draw(lengths), "float32") for name in draw(st.sets(st.sampled_from(NAMES)))]
    pieces = []
    for tensor in tensors:
        for _ in range(draw(st.integers(0, 2))):
            stop = tuple(draw(st.integers(0, length)) for length in tensor.shape)
            pieces.append(Piece(tensor.name, Box((0,) * len(stop), stop)))
    return WeightLayout(tuple(tensors), tuple(pieces))


def listed(has: list[WeightLayout], wants: list[WeightLayout]) -> bytes:
    told = {layout_digest(layout): layout for layout in (*has, *wants)}
    return list_layouts(told, [*map(layout_digest, has)], [*map(layout_digest, wants)], range(len(has)))


@given(st.lists(st.tuples(layouts(), layouts()), min_size=1, max_size=5))
def test_what_was_told_is_what_is_known(sides: list[tuple[WeightLayout, WeightLayout]]) -> None:
    has, wants = ([*side] for side in zip(*sides, strict=True))
    known = read_layouts(listed(has, wants))
    for told, read in ((has, known.has), (wants, known.wants)):
        assert [side.pieces for side in read] == [side.pieces for side in told]
        assert [set(side.tensors) for side in read] == [set(side.tensors) for side in told]
    assert known.free_bytes == tuple(range(len(sides)))


def wants_of(holding: Holding) -> list[WeightLayout]:
    return [
        WeightLayout(tuple(holding.tensors[name] for name in dict.fromkeys(piece.tensor for piece in pieces)), pieces)
        for pieces in holding.pieces
    ]


def test_replicas_cost_nothing() -> None:
    """PP4 x EP8 into TP8: thirty times as many devices are a few bytes a device more."""
    tensors = [Tensor(f"layers.{i}.experts.{j}.w", (64, 64), "bfloat16") for i in range(8) for j in range(16)]
    number = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.")

    def of(replicas: int) -> bytes:
        have = Parallel(4, 8, 1, replicas, lambda n: _number(n, 1) // 2, lambda n: _number(n, 2) // 2)
        want = Parallel(tp=8, replicas=4 * replicas, dim=lambda name: 0)
        return listed(wants_of(have.holding(tensors)), wants_of(want.holding(tensors)))

    def _number(name: str, part: int) -> int:
        found = number.match(name)
        assert found is not None
        return int(found[part])

    told = of(30)
    many = read_layouts(told)
    assert len(many.has) == 960
    assert len({id(side) for side in (*many.has, *many.wants)}) == 32 + 8, "ranks that are alike share one layout"
    assert len(told) <= len(of(1)) + 4 * len(many.has)


@pytest.mark.parametrize(
    "bad",
    [
        Catalogue((), (), (Listed((0, 0), ()),), (0,), (0,), (1,)),
        Catalogue((Tensor("q", (), "int8"),), (), (Listed((0, 0), ()),), (0,), (0,), (1,)),
        Catalogue((), (), (Listed((), (3,)),), (0,), (0,), (1,)),
        Catalogue((), (), (Listed((), ()),), (0,), (1,), (1,)),
        Catalogue((), (), (Listed((), ()),), (0,), (0, 0), (1,)),
        Catalogue((Tensor("q", (), "int8"),), (Box((), ()),), (Listed((0, 0, 0), ()),), (0,), (0,), (1,)),
    ],
)
def test_a_catalogue_that_names_what_it_has_not_is_refused(bad: Catalogue) -> None:
    with pytest.raises(WireError, match="a catalogue"):
        read_layouts(pack(bad))


def test_a_piece_of_a_tensor_that_was_not_told_is_refused() -> None:
    with pytest.raises(WireError, match=r"k \[0:4\] is listed, and k itself is not"):
        listed([WeightLayout((Q,), (Piece("k", Box((0,), (4,))),))], [LOW])
    with pytest.raises(WireError, match="twice"):
        listed([WeightLayout((Q, Tensor("q", (4,), "float32")), ())], [LOW])


def test_numbers_do_not_count_from_the_end() -> None:
    with pytest.raises(WireError, match="malformed"):
        unpack(pack(Catalogue((), (), (Listed((), ()),), (-1,), (0,), (1,))))


def test_what_is_no_catalogue_is_refused_and_does_not_grow() -> None:
    good = pack(Catalogue((), (), (Listed((), (0,) * 1000),), (), (), ()))
    with pytest.raises(WireError, match="larger than 500 unpacked"):
        unpack(good, most_bytes=500)
    for bad in (
        b"",
        good[:-1],
        good + b"x",
        b"x" + good,
        zlib.compress(b""),
        zlib.compress(msgspec.msgpack.encode({"tensors": []})),
    ):
        with pytest.raises(WireError, match="a catalogue of"):
            unpack(bad)


# -- who is asked ------------------------------------------------------------------------------------------------------

Q = Tensor("q", (8,), "float32")
WHOLE, LOW, HIGH = (
    WeightLayout((Q,), (Piece("q", Box((a,), (b,))),), copies) for a, b, copies in ((0, 8, 0), (0, 4, 1), (4, 8, 0))
)


def entered(wants: list[WeightLayout]) -> Attempt:
    """An attempt that all ranks entered; every source has all of tensor q."""
    attempt = Attempt(len(wants), epoch=3, phase="layout")
    for rank, layout in enumerate(wants):
        status = Status(rank, 1, "serving", None, 0, 0, can_export=True)
        digests = layout_digest(WHOLE), layout_digest(layout)
        attempt.entered[rank] = Enter(rank, Asked("update", 1), *digests, status, 0)
        attempt.settled[rank] = Report(3, "settle", status)
    return attempt


def test_of_ranks_that_are_alike_one_is_asked() -> None:
    attempt = entered([LOW, HIGH, LOW, HIGH])
    sends = attempt.questions()
    assert [(sends[rank].has, sends[rank].wants) for rank in range(4)] == [
        (True, True),
        (False, True),
        (False, False),
        (False, False),
    ]
    assert {send.group for send in sends.values()} == {3}, "ranks that have no group make that of this attempt"
    wants = [LOW, HIGH, None, None]
    for rank in range(4):
        attempt.said[rank] = Report(3, "layout", sides=Sides(7, WHOLE if rank == 0 else None, wants[rank]))
    laid_out = attempt.layouts(Record(), attempt.catalogue())
    assert laid_out is not None
    assert laid_out.catalogue is not None
    assert read_layouts(laid_out.catalogue) == Known((WHOLE,) * 4, (LOW, HIGH, LOW, HIGH), (7,) * 4)


def test_a_rank_that_was_asked_and_does_not_tell_is_named() -> None:
    attempt = entered([LOW, HIGH])
    attempt.said[0] = Report(3, "layout", sides=Sides(7, WHOLE, LOW))
    for sides, text in ((Sides(7, None, None), "nobody sent"), (None, "does not tell its free memory")):
        attempt.said[1] = Report(3, "layout", sides=sides)
        with pytest.raises(AttemptRefusedError, match=text) as refused:
            attempt.catalogue()
        assert refused.value.who == "update rank 1"


class Ranks:
    """Two update ranks as the coordinator hears them, over its own sockets."""

    def __init__(self, path: Path) -> None:
        self.links: list[Link[Any]] = []
        for rank in range(2):
            link: Link[Any] = Link(connect(path), FromCoordinator)
            link.trust()
            link.send(Hello(PROTOCOL, "join", rank, 2, 1, "here"))
            assert link.receive(10) == Proceed(0, "enter")
            self.links.append(link)

    def say(self, *messages: Any) -> list[Any]:
        """Each rank's message, and what each hears then."""
        for link, message in zip(self.links, messages, strict=True):
            link.send(message)
        return [link.receive(10) for link in self.links]

    def enter(self, version: int) -> tuple[int, list[Any]]:
        """Up to what the coordinator says after all have settled."""
        status = [Status(rank, 1, "lapsed", None, 0, 0) for rank in range(2)]
        digests = [(layout_digest(WHOLE), layout_digest(wants)) for wants in (LOW, HIGH)]
        enter = [Enter(r, Asked("update", version), *digests[r], status[r], 0) for r in range(2)]
        epoch = self.say(*enter)[0].epoch
        return epoch, self.say(*[Report(epoch, "settle", status[rank]) for rank in range(2)])

    def tell(self, epoch: int, sends: list[Any]) -> list[Any]:
        told = [(WHOLE if send.has else None, wants) for send, wants in zip(sends, (LOW, HIGH), strict=True)]
        return self.say(*[Report(epoch, "layout", sides=Sides(7, *told[rank])) for rank in range(2)])


def test_leases_of_an_earlier_coordinator_last_from_the_new_term_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one grants until the term is on disk, however long that takes."""
    lease_ns = 9 * 10**9
    log = CommitLog(tmp_path / "ledger")
    log.lead(lease_ns)
    log.begin(0, members=(Member(0, "slot", "incarnation", 1, "host"),))
    log.commit(1, 1)
    written: list[int] = []
    sync = os.fsync

    def slow(fd: int) -> None:
        time.sleep(0.05)
        sync(fd)
        written.append(boot_ns())

    monkeypatch.setattr(os, "fsync", slow)
    listener = listen_at_path(tmp_path / "c.sock", ToCoordinator)
    coordinator = Coordinator(listener, log, 2, UpdateOptions(deadline_s=10.0, drain_s=0, lease_s=9.0))
    try:
        until = coordinator._state.leases.out["incarnation"]
        assert until is not None
        assert written
        assert until >= written[-1] + lease_ns + lease_ns // MARGIN
    finally:
        coordinator.close()


def test_layouts_are_known_once_all_have_made_a_plan_of_them(tmp_path: Path) -> None:
    listener = listen_at_path(tmp_path / "c.sock", ToCoordinator)
    coordinator = Coordinator(listener, CommitLog(tmp_path / "ledger"), 2, UpdateOptions(deadline_s=10.0, drain_s=0))
    try:
        ranks = Ranks(tmp_path / "c.sock")
        epoch, sends = ranks.enter(1)
        assert all(isinstance(told, Layouts) and told.catalogue for told in ranks.tell(epoch, sends))
        ranks.links[1].send(Fault(epoch, "worker 1", "plan", -1, "no memory"))
        assert all(isinstance(link.receive(10), Fault) for link in ranks.links)
        epoch, sends = ranks.enter(1)
        assert all(isinstance(send, Describe) for send in sends), "rank 0 may not have got as far as reading them"
        ranks.tell(epoch, sends)
        phases: list[Phase] = ["plan", "begin", "finish", "open"]
        for phase in phases:
            assert all(isinstance(m, Proceed) for m in ranks.say(*[Report(epoch, phase, value="x")] * 2))
        _, layouts = ranks.enter(2)
        assert all(isinstance(told, Layouts) and told.catalogue is None for told in layouts)
    finally:
        coordinator.close()
        for link in ranks.links:
            link.close()
