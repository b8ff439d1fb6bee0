"""Ranks that hold the same pieces are compared: what is seen, what is not, and that no mixture is served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import SMALL, Compare, model, source_of
from tests.support.update.workers import Asker, Workers
from treadle.update import Source, UpdateError, UpdateOptions, Updater, WeightSource
from treadle.update.memory.host import HostBuffer
from treadle.update.rank.bucket_packing import Packer
from treadle.update.rank.comparing import BLOCK_BYTES, EVERY, SourceComparison, comparison, same
from treadle.update.rank.shares import Shares
from treadle.update.update_options import CompareSources
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.weights.update_plan import plan_update

pytestmark = pytest.mark.slow

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)


class OnDemand:
    """A source that makes the elements of a piece when it is asked for them, and notes the order."""

    def __init__(self, inner: Source) -> None:
        self.tensors, self.has, self._inner = inner.tensors, inner.has, inner
        self.asked: list[Piece] = []

    def local(self, piece: Piece) -> torch.Tensor:
        self.asked.append(piece)
        return self._inner.local(piece).clone()


def test_a_source_may_make_its_pieces_when_they_are_asked_for() -> None:
    have, want = replicas(2)
    shares = Shares(plan_update(have, want, SMALL))
    source = source_of(have, 0, 1)
    lazy: WeightSource = OnDemand(source)
    one, other = (HostBuffer.make(shares.buffer_bytes) for _ in range(2))
    own = [number for number, bucket in enumerate(shares.plan.buckets) if bucket.source == 0]
    for number in own:
        Packer(shares, source, checked=True).fill(one, number)
        Packer(shares, lazy, checked=True).fill(other, number)
        assert torch.equal(one.tensor, other.tensor)
    assert isinstance(lazy, OnDemand)
    assert lazy.asked == [item.piece for number in own for item in shares.plan.buckets[number].items]


LARGE = Tensor("large", (512, 512), "bfloat16")


def replicas(num: int) -> tuple[Holding, Holding]:
    tensors = [*model(2, 32), LARGE]
    return Parallel(replicas=num).holding(tensors), Parallel(tp=num, dim=lambda name: 0).holding(tensors)


@dataclass(frozen=True)
class Wrong:
    """A rank's difference from the others: one element of a tensor, or all of it."""

    rank: int
    tensor: str
    whole: bool

    def source(self, have: Holding, rank: int, version: int) -> Source:
        made = source_of(have, rank, version)
        for piece, local in made.held.items():
            if rank == self.rank and piece.tensor == self.tensor:
                raw = local.view(torch.int16).view(-1)
                raw[:] = raw + 1 if self.whole else raw
                raw[777 % len(raw)] += 1
        return made


def three_updates(
    rank: int, places: tuple[Path, Path], have: Holding, options: UpdateOptions, wrong: Wrong | None
) -> list[Any]:
    """The first version is the same on all ranks, the second may not be, the third is again."""
    told: list[Any] = []
    with Updater(places[0], ledger=places[1], options=options) as updater:
        updater.update(source_of(have, rank, 1), 1)
        try:
            source = wrong.source(have, rank, 2) if wrong is not None else source_of(have, rank, 2)
            told.append(updater.update(source, 2).version)
        except UpdateError as error:
            told.append(str(error))
        torch.distributed.barrier()
        told.append(updater.update(source_of(have, rank, 3), 3).version)
    return told


def updates(workers: Workers, have: Holding, options: UpdateOptions, wrong: Wrong | None) -> list[list[Any]]:
    places = workers.sockets, workers.ledger
    return check(run_ranks(len(have.pieces), three_updates, places, have, options, wrong))


@pytest.mark.parametrize(
    ("compare", "wrong"),
    [
        ("all", Wrong(1, "large", whole=False)),
        ("all", Wrong(0, "layers.1.norm", whole=False)),
        ("sample", Wrong(1, "layers.0.down", whole=True)),
    ],
)
def test_ranks_that_differ_are_refused_by_name_and_no_mixture_is_served(compare: CompareSources, wrong: Wrong) -> None:
    have, want = replicas(2)
    with Workers(want) as workers:
        for second, third in updates(workers, have, replace(OPTIONS, compare_sources=compare, rollback="host"), wrong):
            assert second.startswith("update ranks 0 and 1, in phase load of attempt 2: they hold different weights")
            assert f"all as version 2: {wrong.tensor} [" in second
            assert "give all ranks the same weights" in second
            assert third == 3, "an attempt with the same weights after it"
        for worker in range(2):
            asker = Asker(workers.sockets, worker)
            assert asker.status().rollbacks == 1, "it went back to version 1 in between"
            asker.close()
            assert workers.tell(worker, Compare(3)) == []


def test_of_many_ranks_the_one_that_differs_can_be_told() -> None:
    have, want = replicas(4)
    options = replace(OPTIONS, compare_sources="all")
    with Workers(want) as workers:
        told = {second for second, _ in updates(workers, have, options, Wrong(2, "large", whole=True))}
        assert len(told) == 1, "all ranks raise the same"
        (text,) = told
        if "differ from update rank 2's" in text:  # told by the rank that has other weights: it differs from all
            assert text.startswith("update ranks 0, 1, 2 and 3, ")
        else:
            assert "of update rank 2 differ from" in text
            assert "what update rank" in text


@pytest.mark.parametrize("compare", ["sample", "all"])
def test_ranks_that_are_alike_pass(compare: CompareSources) -> None:
    have, want = replicas(2)
    with Workers(want) as workers:
        assert updates(workers, have, replace(OPTIONS, compare_sources=compare), None) == [[2, 3]] * 2


def test_a_mixture_passes_only_where_nobody_looks() -> None:
    """Without a comparison every byte matches its source, and two ranks' weights are served as one version."""
    have, want = replicas(2)
    options = replace(OPTIONS, compare_sources="off", rollback="none")
    with Workers(want) as workers:
        wrong = Wrong(1, "large", whole=True)
        assert [second for second, _ in updates(workers, have, options, wrong)] == [2, 2]


# ---- one rank's part -------------------------------------------------------------------------------------------------


def arrived(have: Holding, want: Holding, theirs: list[Source], rank: int, compare: CompareSources, turn: int) -> Any:
    """The differences a rank finds in all buckets of the others."""
    from treadle.update.rank.bucket_packing import Packer

    shares = Shares(plan_update(have, want, SMALL))
    found = comparison(shares.plan, theirs[rank], rank, compare, turn)
    assert found is not None
    buffer = HostBuffer.make(shares.buffer_bytes)
    for number, bucket in enumerate(shares.plan.buckets):
        if bucket.source != rank:
            Packer(shares, theirs[bucket.source], checked=True).fill(buffer, number)
            found.look(buffer, number)
    buffer.close()
    return found


def test_a_sample_sees_one_element_in_some_updates_and_the_same_sixteen_later() -> None:
    have, want = replicas(2)
    theirs = [Wrong(1, "large", whole=False).source(have, rank, 1) for rank in range(2)]

    def seen(compare: CompareSources, turn: int) -> bool:
        return any(arrived(have, want, theirs, rank, compare, turn).different for rank in range(2))

    turns = [seen("sample", turn) for turn in range(2 * EVERY)]
    assert turns[:EVERY] == turns[EVERY:]
    assert 1 <= sum(turns[:EVERY]) < EVERY
    assert seen("all", 0)


def test_where_nobody_has_the_same_nothing_is_looked_at() -> None:
    tensors = model(2, 32)
    have = Parallel(tp=2, dim=lambda name: 0).holding(tensors)
    found: SourceComparison = arrived(have, have, [source_of(have, rank, 1) for rank in range(2)], 0, "all", 0)
    assert not found.equal
    assert not found.different


def test_boxes_that_overlap_in_part_are_compared_there() -> None:
    tensor = Tensor("w", (8, 4), "float32")
    boxes = Box((0, 0), (6, 4)), Box((4, 0), (8, 4))
    have = Holding({"w": tensor}, tuple((Piece("w", box),) for box in boxes))
    want = Holding({"w": tensor}, ((Piece("w", Box.whole((8, 4))),),) * 2)
    rows = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    theirs = [Source(have.tensors, {Piece("w", box): rows[box.slices(Box.whole((8, 4)))].clone()}) for box in boxes]
    assert {*arrived(have, want, theirs, 0, "all", 0).equal, *arrived(have, want, theirs, 1, "all", 0).equal}
    theirs[1].held[Piece("w", boxes[1])][1, 3] += 1
    found = [arrived(have, want, theirs, rank, "all", 0).different for rank in range(2)]
    assert Piece("w", Box((4, 0), (6, 4))) in [piece for by in found for some in by.values() for piece in some]


def test_there_is_nothing_to_compare_without_a_source_or_when_it_is_off() -> None:
    have, want = replicas(2)
    plan = plan_update(have, want, SMALL)
    assert comparison(plan, None, 0, "all", 0) is None
    assert comparison(plan, source_of(have, 0, 1), 0, "off", 0) is None
    with pytest.raises(ValueError, match="compare_sources is sample, all or off, got 'some'"):
        UpdateOptions(compare_sources="some")  # type: ignore[arg-type]


SHAPES = st.sampled_from([(), (1,), (5000,), (100_000,), (3, 70_000), (64, 64), (40, 5000), (2, 3, 9000), (0, 4)])


@given(SHAPES, st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]), st.integers(0, 2**40), st.data())
def test_blocks(shape: tuple[int, ...], dtype: Any, turn: int, data: st.DataObject) -> None:
    """A sample finds any difference within as many turns as there are blocks to take turns; no other is found."""
    strided = data.draw(st.booleans()) and len(shape) > 1
    one = np.zeros(shape, dtype)
    other = np.zeros((*shape[:-1], shape[-1] + 3), dtype)[..., 3:] if strided else one.copy()

    def equal(every: int, turn: int) -> bool:
        return same(torch.from_numpy(one), torch.from_numpy(other), every, turn)

    assert equal(1, 0)
    assert equal(EVERY, turn)
    if not one.size:
        return
    at = np.unravel_index(data.draw(st.integers(0, one.size - 1)), shape)
    other[at] += 1
    assert not equal(1, 0)
    found = [not equal(EVERY, turn + later) for later in range(EVERY)]
    assert any(found)
    if not strided and one.nbytes >= EVERY * BLOCK_BYTES and one.nbytes % BLOCK_BYTES == 0:
        assert sum(found) == 1
    other[...] = one + 1
    assert not equal(EVERY, turn), "one that differs in every block is found at once"
