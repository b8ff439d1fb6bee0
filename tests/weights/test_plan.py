"""Plans of weight updates: any layout to any layout, every wanted byte arrives exactly once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.update.moving import BYTES, carry_out, random_tensors
from treadle.weights.bucket_stream import stream_of
from treadle.weights.buffer_sizes import ALIGN, Memory, choose_buffers
from treadle.weights.layouts import (
    REPLICATE,
    Owner,
    Parallel,
    Replicate,
    Shard,
    from_mesh,
    owned,
    replicated,
    sharded,
    spread,
)
from treadle.weights.tensor_boxes import Box, Holding, Piece, Tensor
from treadle.weights.update_checks import verify_update
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import UpdatePlan, plan_update

DTYPES = ("bfloat16", "float8_e4m3fn", "float32", "uint8", "int64")


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, Tensor]:
    tensors = {}
    for i in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        family = draw(st.sampled_from(("", "", "a", "b")))
        tensors[f"t{i}"] = Tensor(f"t{i}", shape, draw(st.sampled_from(DTYPES)), family)
    return tensors


def placement(draw: st.DrawFn, tensor: Tensor, num: int) -> Shard | Owner | Replicate:
    match draw(st.sampled_from(["replicate", "own", *(["shard"] if tensor.shape else [])])):
        case "shard":
            return Shard(draw(st.integers(0, len(tensor.shape) - 1)))
        case "own":
            return Owner(draw(st.integers(0, num - 1)))
    return REPLICATE


@st.composite
def mesh_layouts(draw: st.DrawFn, tensors: dict[str, Tensor]) -> Holding:
    """Placements drawn tensor by tensor on a mesh of up to two dimensions; every byte is somewhere."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    rules = {n: tuple(placement(draw, t, size) for size in mesh) for n, t in tensors.items()}
    order = draw(st.permutations(range(len(mesh))))
    return from_mesh(tensors.values(), mesh, rules.__getitem__, order=order)


@st.composite
def box_layouts(draw: st.DrawFn, tensors: dict[str, Tensor]) -> Holding:
    """Any boxes at all, overlapping each other, on any ranks: what workers may want."""
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        mine = []
        for name, tensor in tensors.items():
            for _ in range(draw(st.integers(0, 3))):
                ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in tensor.shape]
                mine.append(Piece(name, Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))))
        pieces.append(tuple(mine))
    return Holding(tensors, tuple(pieces))


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    free = draw(st.integers(8 * ALIGN, 8192))
    return Memory(free, share=1.0, target_bytes=draw(st.integers(ALIGN, 4096)), least_bytes=ALIGN)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Holding, Holding, Memory]:
    tensors = draw(tensor_sets())
    have = draw(mesh_layouts(tensors))
    if draw(st.booleans()):  # boxes over boxes, some of them part of others
        extra = draw(box_layouts(tensors))
        have = Holding(tensors, (*have.pieces, *extra.pieces))
    want = draw(st.one_of(mesh_layouts(tensors), box_layouts(tensors)))
    return have, want, draw(memories())


def check(plan: UpdatePlan, have: Holding, want: Holding) -> None:
    """The bytes of every worker are those it wants, each of them once; what it does not want does not come."""
    whole = random_tensors(plan.tensors)
    came = carry_out(plan, have, whole)
    assert len(came) == len(want.pieces)
    for onto, pieces in zip(came, want.pieces, strict=True):
        for name, tensor in plan.tensors.items():
            wanted = np.zeros(tensor.shape, BYTES[tensor.itemsize])
            for piece in pieces:
                if piece.tensor == name:
                    wanted[piece.box.slices(Box.whole(tensor.shape))] = 1
            assert np.array_equal(onto[name][1], wanted)
            assert np.array_equal(onto[name][0], np.where(wanted == 1, whole[name], 0))


def check_buckets(plan: UpdatePlan, want: Holding, memory: Memory) -> None:
    """Buckets fit their buffers, are in their order, and hold nothing that nobody takes."""
    assert plan.bucket_bytes * (plan.num_h2d + plan.num_ipc) <= memory.usable_bytes
    assert plan.bucket_bytes == max((b.size_bytes for b in plan.buckets), default=0)
    order = [(bucket.round, bucket.source) for bucket in plan.buckets]
    assert order == sorted(set(order))
    assert {turn for turn, _ in order} == set(range(len({turn for turn, _ in order})))
    wanted = {name: np.zeros(tensor.shape, bool) for name, tensor in plan.tensors.items()}
    for pieces in want.pieces:
        for piece in pieces:
            wanted[piece.tensor][piece.box.slices(Box.whole(plan.tensors[piece.tensor].shape))] = True
    moved = {name: np.zeros(tensor.shape, int) for name, tensor in plan.tensors.items()}
    for bucket in plan.buckets:
        assert bucket.items
        for item in bucket.items:
            assert item.offset_bytes % ALIGN == 0
            tensor = plan.tensors[item.piece.tensor]
            moved[tensor.name][item.piece.box.slices(Box.whole(tensor.shape))] += 1
    for name, times in moved.items():
        assert np.array_equal(times, wanted[name].astype(int))


def reachable(have: Holding, want: Holding) -> bool:
    """Does somebody have every wanted byte, by counting elements."""
    for name, tensor in want.tensors.items():
        had, wanted = np.zeros(tensor.shape, bool), np.zeros(tensor.shape, bool)
        for holding, there in ((have, had), (want, wanted)):
            for pieces in holding.pieces:
                for piece in pieces:
                    if piece.tensor == name:
                        there[piece.box.slices(Box.whole(tensor.shape))] = True
        if (wanted & ~had).any():
            return False
    return True


@pytest.mark.slow
@settings(max_examples=120)
@given(problems())
def test_every_wanted_byte_arrives_exactly_once(problem: tuple[Holding, Holding, Memory]) -> None:
    have, want, memory = problem
    assert reachable(have, want)
    plan = plan_update(have, want, memory)
    check(plan, have, want)
    check_buckets(plan, want, memory)
    assert verify_update(lower_update(stream_of(plan))).clean


@settings(max_examples=80)
@given(st.data())
def test_a_byte_that_nobody_has_is_named(data: st.DataObject) -> None:
    tensors = data.draw(tensor_sets())
    have, want = data.draw(box_layouts(tensors)), data.draw(box_layouts(tensors))
    if reachable(have, want):
        check(plan := plan_update(have, want, Memory(1 << 20)), have, want)
        assert plan.digest() == plan_update(have, want, Memory(1 << 20)).digest()
        return
    with pytest.raises(ValueError, match=r"t\d \[.*\] is wanted, but no rank has \[.*\] of it"):
        plan_update(have, want, Memory(1 << 20))


def sent_by(plan: UpdatePlan) -> dict[int, int]:
    sent: dict[int, int] = {}
    for bucket in plan.buckets:
        sent[bucket.source] = sent.get(bucket.source, 0) + bucket.size_bytes
    return sent


def matrices(num: int, rows: int = 64, columns: int = 32, dtype: str = "bfloat16") -> list[Tensor]:
    return [Tensor(f"w{i}", (rows, columns), dtype) for i in range(num)]


def buckets_of(size: int, free: int = 1 << 20) -> Memory:
    return Memory(free, share=1.0, target_bytes=size, least_bytes=ALIGN)


def test_replicas_share_the_sending() -> None:
    plan = plan_update(replicated(matrices(40), 4), replicated(matrices(40), 2), buckets_of(8192))
    assert set(sent_by(plan).values()) == {10 * 4096}


def test_one_tensor_that_all_have_is_sent_by_all() -> None:
    whole = matrices(1, rows=1000)
    plan = plan_update(replicated(whole, 4), replicated(whole, 1), buckets_of(1 << 16))
    assert list(sent_by(plan).values()) == [16000] * 4
    assert [bucket.items[0].piece.box.shape for bucket in plan.buckets] == [(250, 32)] * 4


def test_sources_that_would_send_little_are_fewer() -> None:
    memory = Memory(1 << 20, share=1.0, target_bytes=1 << 16, least_bytes=5 * 4096)
    plan = plan_update(replicated(matrices(12), 8), replicated(matrices(12), 1), memory)
    assert sorted(sent_by(plan).values()) == [2 * 4096, 5 * 4096, 5 * 4096]


def test_who_has_more_of_its_own_sends_less_of_what_all_have() -> None:
    own, shared = Tensor("own", (96, 32), "bfloat16"), [Tensor(f"all{i}", (32, 32), "bfloat16") for i in range(9)]
    have = from_mesh([own, *shared], (4,), lambda name: (Owner(0) if name == "own" else REPLICATE,))
    plan = plan_update(have, replicated([own, *shared], 1), buckets_of(8192))
    assert sent_by(plan) == {0: 3 * 2048, 1: 3 * 2048, 2: 3 * 2048, 3: 3 * 2048}


def test_workers_that_want_the_same_share_their_takes() -> None:
    want = Parallel(tp=2, replicas=3, dim=lambda name: 0).holding(matrices(4))
    plan = plan_update(replicated(matrices(4), 2), want, buckets_of(8192))
    assert plan.takes[0] is plan.takes[2] is plan.takes[4]
    assert plan.takes[1] is plan.takes[3] is not plan.takes[0]
    assert len({id(row) for row in plan.takes}) == 2


def test_sources_take_turns_in_the_order_of_tensors() -> None:
    plan = plan_update(spread(matrices(8), 4), replicated(matrices(8), 1), buckets_of(4 * 4096))
    assert [(b.round, b.source) for b in plan.buckets] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    plan = plan_update(sharded(matrices(8), 4), replicated(matrices(8), 1), buckets_of(4096))
    sent = [(b.round, b.source, {item.piece.tensor for item in b.items}) for b in plan.buckets]
    assert sent == [(r, s, {f"w{r}"}) for r in range(8) for s in range(4)]


@pytest.mark.parametrize("target_bytes", [4096, 3 * 4096, 40_000])
def test_a_worker_assembles_one_window_at_a_time(target_bytes: int) -> None:
    """Engines that need whole tensors put them together from all sources' parts."""
    plan = plan_update(sharded(matrices(24), 8), replicated(matrices(24), 1), buckets_of(target_bytes))
    missing: dict[str, int] = {}
    most = 0
    for bucket in plan.buckets:
        for item in bucket.items:
            name = item.piece.tensor
            missing[name] = missing.get(name, plan.tensors[name].size_bytes) - 2 * item.piece.box.num_elements
        most = max(most, sum(plan.tensors[name].size_bytes for name, left in missing.items() if left))
    assert not any(missing.values())
    assert most <= target_bytes
    assert plan.bucket_bytes <= -(-target_bytes // 8 // ALIGN) * ALIGN


def quantised(num: int, rows: int = 256) -> list[Tensor]:
    """A weight in blocks of 128 x 128, and a scale a block, as DeepSeek-V3's checkpoints have them."""
    return [
        tensor
        for i in range(num)
        for tensor in (
            Tensor(f"w{i}", (rows, 256), "float8_e4m3fn", f"w{i}"),
            Tensor(f"w{i}_scale", (rows // 128, 2), "float32", f"w{i}"),
        )
    ]


def buckets_with(plan: UpdatePlan, family: str) -> list[dict[str, Box]]:
    found = [
        {item.piece.tensor: item.piece.box for item in b.items if plan.tensors[item.piece.tensor].family == family}
        for b in plan.buckets
    ]
    return [boxes for boxes in found if boxes]


def test_families_stay_together() -> None:
    """Buckets that end after every other tensor if they did not."""
    tensors = quantised(6)
    size = 256 * 256 + ALIGN
    for have in (replicated(tensors, 2), spread(tensors, 3)):
        plan = plan_update(have, replicated(tensors, 1), buckets_of(size + 100))
        for i in range(6):
            (boxes,) = buckets_with(plan, f"w{i}")
            assert set(boxes) == {f"w{i}", f"w{i}_scale"}
        assert not plan.notes


def test_shards_of_a_family_stay_together() -> None:
    tensors = quantised(3, rows=1024)
    plan = plan_update(sharded(tensors, 4), replicated(tensors, 1), buckets_of(256 * 256 + ALIGN))
    for i in range(3):
        for boxes in buckets_with(plan, f"w{i}"):
            assert boxes[f"w{i}"].start[0] == boxes[f"w{i}_scale"].start[0] * 128
            assert boxes[f"w{i}"].stop[0] == boxes[f"w{i}_scale"].stop[0] * 128
    assert not plan.notes


def test_a_family_larger_than_a_bucket_is_cut_at_rows_in_step() -> None:
    tensors = quantised(1, rows=1024)
    plan = plan_update(owned(tensors, 1, lambda name: 0), replicated(tensors, 1), buckets_of(100_000))
    parts = buckets_with(plan, "w0")
    assert len(parts) == 4
    for boxes in parts:
        assert boxes["w0"].start[0] == boxes["w0_scale"].start[0] * 128
        assert boxes["w0"].stop[0] == boxes["w0_scale"].stop[0] * 128
    assert not plan.notes


def test_a_family_that_cannot_stay_together_is_noted() -> None:
    tensors = quantised(1)
    apart = owned(tensors, 2, lambda name: int("scale" in name))
    plan = plan_update(apart, replicated(tensors, 1), buckets_of(1 << 17))
    assert plan.notes == ("family w0: no rank has matching pieces of all its tensors, so they travel apart",)
    torn = plan_update(replicated(tensors, 1), replicated(tensors, 1), buckets_of(1024))
    assert "family w0: larger than a bucket" in torn.notes[-1]
    check(torn, replicated(tensors, 1), replicated(tensors, 1))


def test_a_tensor_larger_than_a_bucket_is_cut_into_rows_and_rows_into_parts() -> None:
    wide = [Tensor("wide", (3, 5, 400), "float32")]
    have = want = replicated(wide, 1)
    for size, shapes in ((24000, {(3, 5, 400)}), (8000, {(1, 5, 400)}), (1600, {(1, 1, 400)}), (512, {(1, 1, 100)})):
        plan = plan_update(have, want, buckets_of(-(-size // ALIGN) * ALIGN))
        assert {item.piece.box.shape for bucket in plan.buckets for item in bucket.items} == shapes
        check(plan, have, want)


def part_of(holding: Holding, plan: UpdatePlan) -> Holding:
    return Holding(plan.tensors, tuple(tuple(p for p in row if p.tensor in plan.tensors) for row in holding.pieces))


def test_only_what_changed_moves() -> None:
    tensors = matrices(6)
    have, want = sharded(tensors, 2), replicated(tensors, 2)
    plan = plan_update(have, want, buckets_of(1 << 16), only={"w1", "w4"})
    assert set(plan.tensors) == {"w1", "w4"}
    assert sum(bucket.size_bytes for bucket in plan.buckets) == 2 * 4096
    check(plan, part_of(have, plan), part_of(want, plan))
    with pytest.raises(ValueError, match="names 'w7', which is neither had nor wanted"):
        plan_update(have, want, buckets_of(1 << 16), only={"w7"})
    assert plan_update(have, want, buckets_of(1 << 16), only=()).buckets == ()


@pytest.mark.parametrize(
    ("free", "buffers", "notes"),
    [
        (4 * 8192, (2, 2), 0),
        (4 * 8192 - 1, (1, 2), 1),
        (3 * 4096, (1, 2), 1),
        (3 * 4096 - 1, (0, 2), 2),
        (2 * 4096 - 1, (0, 1), 3),
    ],
)
def test_less_memory_means_fewer_buffers_and_says_so(free: int, buffers: tuple[int, int], notes: int) -> None:
    memory = Memory((free, 1 << 30), share=1.0, target_bytes=8192, least_bytes=4096)
    have, want = replicated(matrices(9, columns=64), 1), replicated(matrices(9, columns=64), 2)
    plan = plan_update(have, want, memory)
    assert (plan.num_h2d, plan.num_ipc) == buffers
    assert len(plan.notes) == notes
    assert all("usable on a device" in note for note in plan.notes)
    assert (plan.num_h2d + plan.num_ipc) * plan.bucket_bytes <= free
    check(plan, have, want)


def test_the_copy_of_an_engine_takes_room_of_buffers() -> None:
    whole = choose_buffers(Memory(1000 << 20, share=1.0, target_bytes=200 << 20), 200 << 20)
    assert (whole.num_h2d, whole.num_ipc, whole.limit_bytes) == (2, 2, 200 << 20)
    beside = choose_buffers(Memory(1000 << 20, share=1.0, target_bytes=200 << 20, copies=2), 200 << 20)
    assert (beside.num_h2d, beside.num_ipc, beside.limit_bytes) == (1, 2, 200 << 20)
    assert "2 of them the engine's copy" in beside.notes[0]
    with pytest.raises(ValueError, match="one bucket of 1048576 and 2 that the engine copies"):
        choose_buffers(Memory(2 << 20, share=1.0, copies=2), 1 << 20)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4095 bytes free, .* less than one bucket of 4096; free memory"):
        plan_update(replicated(matrices(9), 1), replicated(matrices(9), 1), Memory(4095, 1.0, 8192, 4096))


def test_a_single_round_has_no_use_for_a_second_copy_buffer() -> None:
    plan = plan_update(spread(matrices(4), 4), replicated(matrices(4), 1), buckets_of(1 << 14))
    assert (plan.num_h2d, plan.num_ipc, plan.bucket_bytes) == (1, 2, 4096)


def test_digests_tell_plans_apart() -> None:
    tensors = matrices(6)
    have, want = sharded(tensors, 2), replicated(tensors, 2)
    plan = plan_update(have, want, buckets_of(8192))
    assert plan.digest() == plan_update(have, want, buckets_of(8192)).digest()
    assert plan.digest() == replace(plan, notes=("a note",)).digest()
    copied = tuple(tuple(tuple(replace(take) for take in bucket) for bucket in row) for row in plan.takes)
    unshared = replace(plan, takes=copied)
    assert unshared.takes[0][0][0] is not plan.takes[0][0][0]
    assert plan.digest() == unshared.digest()
    others = [
        plan_update(have, want, buckets_of(4096)),
        plan_update(have, sharded(tensors, 2), buckets_of(8192)),
        plan_update(have, want, buckets_of(8192), only={"w1"}),
        replace(plan, num_ipc=1),
        replace(plan, takes=plan.takes[:1]),
        replace(plan, buckets=(replace(plan.buckets[0], source=1), *plan.buckets[1:])),
    ]
    assert len({plan.digest(), *(other.digest() for other in others)}) == len(others) + 1


def test_what_cannot_be_moved_is_refused() -> None:
    one = [Tensor("w", (4, 4), "float32")]
    with pytest.raises(ValueError, match=r"worker expects float32 \(4, 4\), source has bfloat16 \(4, 4\)"):
        plan_update(replicated([Tensor("w", (4, 4), "bfloat16")], 1), replicated(one, 1), Memory(1 << 30))
    with pytest.raises(ValueError, match=r"worker 0 wants a tensor that no rank has: 'w'; give a source"):
        plan_update(replicated([], 1), replicated(one, 1), Memory(1 << 30))
    with pytest.raises(ValueError, match=r"'float7'; known are float64, "):
        Tensor("w", (1,), "float7")
    with pytest.raises(ValueError, match="outside of its shape"):
        Holding({"w": one[0]}, ((Piece("w", Box((0, 0), (5, 4))),),))
    with pytest.raises(ValueError, match="a tensor that is not in `tensors`"):
        Holding({}, ((Piece("w", Box((0, 0), (4, 4))),),))
    with pytest.raises(ValueError, match="0 <= start to stop >= start"):
        Box((2,), (1,))


@pytest.mark.parametrize("layers", [12, pytest.param(120, marks=pytest.mark.nightly)])
def test_many_pieces_are_planned(layers: int) -> None:
    """Of 500 tensors a layer into TP16 on 2,048 workers, from 256 ranks: with 120 layers a million."""
    tensors = [Tensor(f"{i}.{j}", (2048, 7168), "float8_e4m3fn", f"{i}.{j}") for i in range(layers) for j in range(250)]
    scales = [Tensor(f"{t.name}.scale", (16, 56), "float32", t.name) for t in tensors]
    both = [tensor for pair in zip(tensors, scales, strict=True) for tensor in pair]
    want = Parallel(tp=16, replicas=128, dim=lambda name: 0).holding(both)
    have = spread(both, 256)
    plan = plan_update(have, want, Memory(60 << 30))
    assert sum(len(bucket.items) for bucket in plan.buckets) == len(both)
    assert sum(len(takes) for takes in plan.takes[5]) == len(both)
    assert not plan.notes
