"""The codec of changed elements: what comes out is what went in, bit for bit, and it goes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.update.memory.changed_elements import BLOCK, ElementRun, encode, patch, room_for
from treadle.weights.tensor_boxes import ITEMSIZE

KINDS = sorted(ITEMSIZE)


def memory(size_bytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8))


def change(raw: torch.Tensor, runs: list[ElementRun], rate: float, seed: int) -> torch.Tensor:
    """Other elements at some places, each of them different in one bit at least."""
    made, rng = raw.clone(), np.random.default_rng(seed)
    for offset, num, itemsize in runs:
        part = made[offset : offset + num * itemsize].view(num, itemsize).numpy()
        places = rng.random(num) < rate
        part[places, rng.integers(0, itemsize, int(places.sum()))] ^= np.uint8(1 << rng.integers(0, 8))
    return made


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[ElementRun], int]:
    """Runs of all dtypes, each at a multiple of 64 bytes, and the size of the memory."""
    runs, at = [], 0
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=4)):
        num = draw(st.sampled_from([0, 1, 2, 7, 63, 1001, BLOCK - 1, BLOCK, BLOCK + 1]))
        runs.append(ElementRun(at, num, ITEMSIZE[kind]))
        at += -(-num * ITEMSIZE[kind] // 64) * 64
    return runs, at


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from([0.0, 0.0005, 0.01, 0.055, 0.07, 0.3, 0.9, 1.0]), st.integers(0, 1000))
def test_a_stream_brings_what_differs_and_goes_back(
    layout: tuple[list[ElementRun], int], rate: float, seed: int
) -> None:
    runs, size_bytes = layout
    old = memory(size_bytes, seed)
    new = change(old, runs, rate, seed + 1)
    stream = encode(old, new, runs)
    held = old.clone()
    touched = patch(held, stream, swap=True)
    assert torch.equal(held, new)
    for first in range(0, size_bytes, 64):  # what is not in a range was not touched
        if not any(start < first + 64 and first < end for start, end in touched):
            assert torch.equal(old[first : first + 64], new[first : first + 64])
    patch(held, stream)
    assert torch.equal(held, old), "the way back"
    plain = sum(num * itemsize for _, num, itemsize in runs)
    assert len(stream) <= plain + room_for(runs)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.03, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_a_stream_is_as_small_as_the_smallest_form(rate: float, itemsize: int) -> None:
    num = 3 * BLOCK
    runs = [ElementRun(0, num, itemsize)]
    old = memory(num * itemsize, 1)
    new = change(old, runs, rate, 2)
    changed = int((old.view(num, itemsize) != new.view(num, itemsize)).any(1).sum())
    forms = [changed * (2 + itemsize), num / 8 + changed * itemsize, num * itemsize]
    assert len(encode(old, new, runs)) <= 1.02 * min(forms) + room_for(runs)


def test_bits_are_compared_and_not_numbers() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, float("nan")])
    bits = old.clone().view(torch.int32)
    bits[0] = -(2**31)  # -0.0, which equals 0.0
    bits[1] ^= 1  # another payload; the other NaN stays, and does not equal itself
    new = bits.view(torch.float32)
    stream = encode(old.view(torch.uint8), new.view(torch.uint8), [ElementRun(0, 4, 4)])
    held = old.clone()
    patch(held.view(torch.uint8), stream)
    assert torch.equal(held.view(torch.int32), bits)
    same = encode(old.view(torch.uint8), old.clone().view(torch.uint8), [ElementRun(0, 4, 4)])
    assert len(same) == 8, "no block"


def test_a_change_of_elements_already_there_is_no_harm() -> None:
    """The way back of a load that broke off: some elements are new, some are old."""
    runs = [ElementRun(0, 5000, 2)]
    old = memory(10_000, 3)
    new = change(old, runs, 0.05, 4)
    stream, held = encode(old, new, runs), old.clone()
    patch(held, stream, swap=True)
    torn = torch.cat([new[:4000], old[4000:]])
    patch(torn, stream)
    assert torch.equal(torn, old)


def test_a_malformed_stream_is_refused() -> None:
    old = memory(4096, 5)
    stream = encode(old, change(old, [ElementRun(0, 1024, 4)], 0.05, 6), [ElementRun(0, 1024, 4)])
    patch(old.clone(), stream)
    rng, refused = np.random.default_rng(7), 0
    for cut in (0, 3, 8, 20, len(stream) - 8):
        with pytest.raises(ValueError, match="stream"):
            patch(old.clone(), stream[:cut].clone())
    for _ in range(2000):
        broken = stream.clone()
        broken[rng.integers(0, 32)] = int(rng.integers(0, 256))
        try:
            patch(old.clone(), broken)
        except (ValueError, IndexError):
            refused += 1
    assert refused > 1000
    with pytest.raises(ValueError, match="no block of 64 bytes"):
        patch(old[:64].clone(), stream)
