"""Columns of boxes: what is moved by address is what NumPy's indexing copies; digests of small items in common."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xxhash

from treadle.update import Plain, Source
from treadle.update.memory.box_columns import BoxColumns, PlacedBox, SharedDigest, first_element
from treadle.update.memory.host import HostBuffer
from treadle.update.protocol.update_messages import Begin, Map, Move, Moved, Refused, Status
from treadle.update.rank.bucket_packing import Packer
from treadle.update.rank.shares import SMALL_BYTES, Shares
from treadle.update.worker.worker import Worker
from treadle.weights.buffer_sizes import Memory
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.weights.update_plan import plan_update

ROOM = Memory(8 << 20, least_bytes=4096)


def boxes_of(shape: tuple[int, ...]) -> list[Box]:
    sides = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    return [Box(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in itertools.product(*sides)]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 3), (1, 4, 1, 2)])
def test_a_box_is_one_run_where_numpy_says_so(shape: tuple[int, ...]) -> None:
    whole = Box.whole(shape)
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    for box in boxes_of(shape):
        part = numbers[box.slices(whole)].reshape(-1)
        follow = bool((np.diff(part) == 1).all())
        assert first_element(box, whole) == (part[0] if follow else -1), box


def test_boxes_are_copied_both_ways_whatever_their_strides() -> None:
    """Out of a memory into tensors that hold a part, contiguous and not, and back; neighbours stay as they are."""
    rng = np.random.default_rng(0)
    item, held_box = Box((0, 0), (6, 8)), Box((1, 0), (6, 7))
    boxes = [box for box in boxes_of((6, 8)) if box.meet(held_box) == box][::7]
    raw = torch.from_numpy(rng.integers(0, 256, 64 + 48 * 2, dtype=np.uint8))
    numbers = raw[64:].view(torch.int16).view(6, 8)
    for box, strided in itertools.product(boxes, (False, True)):
        columns = BoxColumns([PlacedBox("w", box, "int16", 64, item)])
        tensor = torch.full((7, 5), -1, dtype=torch.int16).T if strided else torch.full((5, 7), -1, dtype=torch.int16)
        expected = tensor.clone()
        expected[box.slices(held_box)] = numbers[box.slices(item)]
        columns.copy_to(raw, {"w": tensor}, {"w": held_box})
        assert torch.equal(tensor, expected), (box, strided)
        back = torch.zeros_like(raw)
        columns.copy_from(back, {"w": tensor}, {"w": held_box})
        there = back[64:].view(torch.int16).view(6, 8)
        assert torch.equal(there[box.slices(item)], numbers[box.slices(item)])
        assert int((there != 0).sum()) <= box.num_elements


def test_a_tensor_that_is_not_what_it_was_is_an_error_and_not_written_to() -> None:
    whole = Box((0,), (8,))
    columns = BoxColumns([PlacedBox("w", whole, "float32", 0, whole)])
    raw = torch.zeros(32, dtype=torch.uint8)
    for other in (torch.ones(4), torch.ones(8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="w is held as"):
            columns.copy_to(raw, {"w": other}, {"w": whole})
        assert bool(other.all())
    with pytest.raises(ValueError, match="outside of a memory of 31"):
        columns.copy_to(raw[:31], {"w": torch.ones(8)}, {"w": whole})
    assert columns.misplaced({}) == "w is not held"
    assert columns.misplaced({"w": Box((4,), (8,))}) == "w [0:8] is not within [4:8], which is held"


def test_a_shared_digest_is_of_the_boxes_bytes_one_after_the_other() -> None:
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 512, dtype=np.uint8))
    row, square = Box((0,), (30,)), Box((0, 0), (4, 4))
    column = Box((0, 1), (4, 2))
    columns = BoxColumns(
        [
            PlacedBox("a", row, "uint8", 0, row),
            PlacedBox("b", row, "uint8", 64, row),
            PlacedBox("c", Box((1, 0), (3, 4)), "int32", 128, square),
            PlacedBox("d", column, "int32", 128, square),
        ]
    )
    parts = [raw[:30], raw[64:94], raw[144:176], raw[128:192].view(torch.int32).view(4, 4)[:, 1].contiguous()]
    for boxes in ([0], [1, 0], [0, 1, 2], [0, 3]):
        joined = b"".join(parts[at].numpy().tobytes() for at in sorted(boxes))
        assert SharedDigest(columns, boxes).of(raw) == xxhash.xxh3_128(joined).digest(), boxes


def test_only_what_the_same_workers_take_shares_a_digest_and_only_if_it_is_small() -> None:
    shapes = {f"s{i}": (100,) for i in range(8)} | {"large": (SMALL_BYTES // 4 + 1,)}
    tensors = {name: Tensor(name, shape, "float32") for name, shape in shapes.items()}
    every = tuple(Piece(name, Box.whole(shape)) for name, shape in shapes.items())
    half = tuple(piece for piece in every if piece.tensor in ("s0", "s3", "large"))
    shares = Shares(plan_update(Holding(tensors, (every,)), Holding(tensors, (every, half)), ROOM))
    (table,), (bucket,) = shares.tables, shares.plan.buckets
    by_check: dict[int, set[str]] = {}
    for take, check in zip(table.takes, table.checks, strict=True):
        by_check.setdefault(check, set()).add(bucket.items[take.item].piece.tensor)
    assert sorted(by_check.values(), key=len) == [{"large"}, {"s0", "s3"}, {"s1", "s2", "s4", "s5", "s6", "s7"}]


@dataclass
class Staged:
    """A worker that has begun, with a packed bucket of many small tensors in its buffer."""

    worker: Worker
    engine: Plain
    state: dict[str, torch.Tensor]
    buffer: HostBuffer
    move: Move


def staged() -> Staged:
    state = {f"t{i}": torch.randint(-99, 99, (4 + i % 3, 5), dtype=torch.int16) for i in range(300)}
    state |= {"turned": torch.randint(-99, 99, (6, 4), dtype=torch.int16).T, "large": torch.rand(SMALL_BYTES)}
    engine = Plain({name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()})
    worker, source = Worker(engine, 0), Source.of(state)
    want = Holding(dict(source.tensors), (engine.layout().pieces,))
    shares = Shares(plan_update(Holding(dict(source.tensors), (source.has.pieces,)), want, ROOM))
    buffer = HostBuffer.make(shares.buffer_bytes)
    assert buffer.fd is not None
    plan = shares.of_worker(0, exports=False)
    worker.handle(plan)
    worker.map(Map((buffer.size_bytes,)), [os.dup(buffer.fd)])
    asked = Begin(1, 1, plan.digest, "host", "drain", 1.0, partial=False)
    assert isinstance(worker.handle(asked), Status)
    Packer(shares, source, checked=True).fill(buffer, 0)
    return Staged(worker, engine, state, buffer, Move(1, plan.digest, 0, 0, out=False, checked=True))


def test_what_is_packed_by_columns_arrives_and_a_flipped_bit_in_any_of_many_is_found() -> None:
    made = staged()
    assert isinstance(made.worker.handle(made.move), Moved)
    assert all(torch.equal(made.engine.held[name], tensor) for name, tensor in made.state.items())
    for at in (0, 64 * 17 + 5, 64 * 299):
        other = staged()
        other.buffer.tensor[at] ^= 4
        refused = other.worker.handle(other.move)
        assert isinstance(refused, Refused), at
        assert refused.code == "corrupt"
        assert "more tensors up to t" in refused.text
