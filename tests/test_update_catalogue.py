"""What ranks tell each other of layouts: each once, whatever many devices share it, and nothing is lost on the way."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.update.attempt import Attempt, Refusal
from weft.update.catalogue import Known, layout_digest, list_layouts, read_layouts
from weft.update.ledger import Record
from weft.update.wire.control import Catalogue, Enter, Listed, Settled, Sides
from weft.update.wire.errors import WireError
from weft.update.wire.messages import Status, Wants
from weft.weights.layouts import Parallel
from weft.weights.pieces import Box, Holding, Piece, Tensor

lengths = st.lists(st.integers(0, 6), max_size=2).map(tuple)
NAMES = ("q", "k", "v", "o")


@st.composite
def layouts(draw: st.DrawFn) -> Wants:
    """Any, with tensors that it has no piece of, and others than another has under the same name."""
    tensors = [Tensor(name, draw(lengths), "float32") for name in draw(st.sets(st.sampled_from(NAMES)))]
    pieces = []
    for tensor in tensors:
        for _ in range(draw(st.integers(0, 2))):
            stop = tuple(draw(st.integers(0, length)) for length in tensor.shape)
            pieces.append(Piece(tensor.name, Box((0,) * len(stop), stop)))
    return Wants(tuple(tensors), tuple(pieces))


def listed(has: list[Wants], wants: list[Wants]) -> Catalogue:
    told = {layout_digest(layout): layout for layout in (*has, *wants)}
    return list_layouts(told, [*map(layout_digest, has)], [*map(layout_digest, wants)], range(len(has)))


def sent(catalogue: Catalogue) -> tuple[Known, int]:
    """What comes out at the other end, and how many bytes it was."""
    body = msgspec.msgpack.encode(catalogue)
    return read_layouts(msgspec.msgpack.decode(body, type=Catalogue)), len(body)


@settings(max_examples=200)
@given(st.lists(st.tuples(layouts(), layouts()), min_size=1, max_size=5))
def test_what_was_told_is_what_is_known(sides: list[tuple[Wants, Wants]]) -> None:
    has, wants = ([*side] for side in zip(*sides, strict=True))
    known, _ = sent(listed(has, wants))
    for told, read in ((has, known.has), (wants, known.wants)):
        assert [side.pieces for side in read] == [side.pieces for side in told]
        assert [set(side.tensors) for side in read] == [set(side.tensors) for side in told]
    assert known.free_bytes == tuple(range(len(sides)))


def wants_of(holding: Holding) -> list[Wants]:
    return [
        Wants(tuple(holding.tensors[name] for name in dict.fromkeys(piece.tensor for piece in pieces)), pieces)
        for pieces in holding.pieces
    ]


def test_replicas_cost_nothing() -> None:
    """PP4 x EP8 into TP8: a hundred times as many devices are a few bytes a device more."""
    tensors = [Tensor(f"layers.{i}.experts.{j}.w", (64, 64), "bfloat16") for i in range(8) for j in range(16)]
    number = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.")

    def of(replicas: int) -> tuple[Known, int]:
        have = Parallel(4, 8, 1, replicas, lambda n: _number(n, 1) // 2, lambda n: _number(n, 2) // 2)
        want = Parallel(tp=8, replicas=4 * replicas, dim=lambda name: 0)
        return sent(listed(wants_of(have.holding(tensors)), wants_of(want.holding(tensors))))

    def _number(name: str, part: int) -> int:
        found = number.match(name)
        assert found is not None
        return int(found[part])

    (few, few_bytes), (many, many_bytes) = of(1), of(100)
    assert (len(few.has), len(many.has)) == (32, 3200)
    assert len({id(side) for side in (*many.has, *many.wants)}) == 32 + 8, "ranks that are alike share one layout"
    assert many_bytes - few_bytes <= 10 * (len(many.has) - len(few.has))


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
        read_layouts(bad)


def test_numbers_do_not_count_from_the_end() -> None:
    body = msgspec.msgpack.encode(Catalogue((), (), (Listed((), ()),), (-1,), (0,), (1,)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=Catalogue)


# -- who is asked ------------------------------------------------------------------------------------------------------

Q = Tensor("q", (8,), "float32")
WHOLE, LOW, HIGH = (Wants((Q,), (Piece("q", Box((a,), (b,))),)) for a, b in ((0, 8), (0, 4), (4, 8)))


def entered(wants: list[Wants]) -> Attempt:
    """All have the whole of it."""
    attempt = Attempt(len(wants), epoch=3)
    for rank, layout in enumerate(wants):
        status = Status(rank, 1, "serving", None, 0, 0)
        digests = layout_digest(WHOLE), layout_digest(layout)
        attempt.entered[rank] = Enter(rank, "update", 1, None, None, *digests, status, True, 0)
        attempt.settled[rank] = Settled(3, rank, status)
    return attempt


def test_of_ranks_that_are_alike_one_is_asked() -> None:
    attempt = entered([LOW, HIGH, LOW, HIGH])
    sends = attempt.sends()
    assert [(sends[rank].has, sends[rank].wants) for rank in range(4)] == [
        (True, True),
        (False, True),
        (False, False),
        (False, False),
    ]
    wants = [LOW, HIGH, None, None]
    sides = {rank: Sides(3, rank, 7, WHOLE if rank == 0 else None, wants[rank]) for rank in range(4)}
    laid_out = attempt.layouts(Record(), attempt.catalogue(sides))
    assert laid_out is not None
    assert laid_out.catalogue is not None
    known, _ = sent(laid_out.catalogue)
    assert known == Known((WHOLE,) * 4, (LOW, HIGH, LOW, HIGH), (7,) * 4)


def test_a_rank_that_was_asked_and_does_not_tell_is_named() -> None:
    attempt = entered([LOW, HIGH])
    sides = {0: Sides(3, 0, 7, WHOLE, LOW), 1: Sides(3, 1, 7, None, None)}
    with pytest.raises(Refusal, match="nobody told") as refused:
        attempt.catalogue(sides)
    assert refused.value.who == "update rank 1"
