"""Digests that a device makes: the sums that their text describes, the same on the host and on a device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.update import far
from treadle.update.memory.copying import DIGEST_BYTES
from treadle.update.memory.device_sums import CHUNK_BYTES, COLUMNS, ROWS, Sums
from treadle.update.memory.host import HostBuffer
from treadle.update.rank.bucket_packing import Packer
from treadle.update.rank.shares import Shares
from treadle.update.rank.source import Source
from treadle.update.worker.staging import arrivals_of
from treadle.update.worker.worker_plan import WorkerPlan
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel, replicated
from treadle.weights.tensor_boxes import Tensor
from treadle.weights.update_plan import plan_update

GROWTH = 0x5851F42D4C957F2D


@pytest.fixture(scope="module")
def sums() -> Sums:
    return Sums(torch.empty(0, dtype=torch.uint8))


def of(sums: Sums, *boxes: torch.Tensor) -> list[int]:
    found: list[int] = sums.of(boxes).tolist()
    return found


def by_the_text(raw: bytes, columns: Sequence[Sequence[int]], rows: Sequence[int]) -> list[int]:
    """Every product by itself, in Python's integers."""
    padded = raw + bytes(-len(raw) % 4)
    found = []
    for weights in columns:
        total = 0
        for begin in range(0, len(padded), CHUNK_BYTES):
            chunk = padded[begin : begin + CHUNK_BYTES]
            words = [int.from_bytes(chunk[at : at + 4], "little", signed=True) for at in range(0, len(chunk), 4)]
            part = sum(word * weights[at % COLUMNS] * rows[at // COLUMNS] for at, word in enumerate(words))
            total = total * GROWTH + part
        total = (total * GROWTH + len(raw)) % 2**64
        found.append(total - 2**64 if total >= 2**63 else total)
    return found


@pytest.mark.parametrize("size_bytes", [0, 1, 4, 7, 4 * COLUMNS, 9 * COLUMNS + 3])
def test_sums_are_those_of_the_text(sums: Sums, size_bytes: int) -> None:
    raw = random.Random(size_bytes).randbytes(size_bytes)
    columns, rows = sums._columns.tolist(), sums._rows.tolist()
    assert (len(columns[0]), len(rows)) == (COLUMNS, ROWS)
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    assert of(sums, tensor) == by_the_text(raw, columns, rows)


def test_weights_are_odd_and_differ(sums: Sums) -> None:
    weights = torch.cat([sums._columns.view(-1), sums._rows])
    assert (weights & 1).all()
    assert len(set(weights.tolist())) == len(weights)


def test_a_device_makes_the_host_s_sums(sums: Sums) -> None:
    far.enter()
    matrix = torch.randint(-9, 9, (70, 3 * COLUMNS // 70 + 5), dtype=torch.int16).view(torch.bfloat16)
    there = far.far(matrix.clone())
    for part in (slice(None), slice(3, 40)):
        found = Sums(there).of([there[:, part], there[5, 1:]]).cpu().tolist()
        assert found == of(sums, matrix[:, part], matrix[5, 1:])


def test_boxes_are_summed_as_their_bytes_in_a_row(sums: Sums) -> None:
    raw = torch.randint(0, 255, (CHUNK_BYTES + 100_003,), dtype=torch.uint8)
    whole = of(sums, raw)
    for cut in (1, 77_777, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 5):
        assert of(sums, raw[:cut], raw[cut:cut], raw[cut:]) == whole


def test_what_differs_is_seen(sums: Sums) -> None:
    """One bit; the highest bits of two words; words exchanged, within a row and across rows and chunks; a zero more."""
    raw = torch.randint(1, 255, (CHUNK_BYTES + 4 * COLUMNS,), dtype=torch.uint8)
    whole = of(sums, raw)
    places = [0, 4, 4 * COLUMNS, 4 * COLUMNS * (ROWS - 1) + 8, CHUNK_BYTES, CHUNK_BYTES + 12]
    for one, other in itertools.pairwise(places):
        both = raw.clone()
        both[[one + 3, other + 3]] ^= 128
        exchanged = raw.clone()
        exchanged[one : one + 4], exchanged[other : other + 4] = raw[other : other + 4], raw[one : one + 4]
        single = raw.clone()
        single[one] ^= 1
        for wrong in (both, exchanged, single):
            assert all(a != b for a, b in zip(of(sums, wrong), whole, strict=True))
    assert of(sums, raw, raw.new_zeros(1)) != whole


def test_a_checked_bucket_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What crosses to the host are digests: the source's and the worker's, of a large tensor and of small ones."""
    far.enter()
    crossed = [0]
    copy, dispatch = far._copy, far.FarTensor.__torch_dispatch__

    def counting(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(target, far.FarTensor) != isinstance(source, far.FarTensor):
            crossed[0] += target.nbytes
        return copy(target, source, non_blocking)

    def dispatching(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") is not None and kwargs["device"].type == "cpu":
            crossed[0] += args[0].nbytes
        return dispatch(func, types, args, kwargs)

    monkeypatch.setattr(far, "_copy", counting)
    monkeypatch.setattr(far.FarTensor, "__torch_dispatch__", classmethod(dispatching))
    held = {"large": torch.rand(256, 301), **{f"small{at}": torch.rand(33) for at in range(3)}}
    tensors = [Tensor(name, tuple(part.shape), "float32") for name, part in held.items()]
    dim = lambda name: 1 if name == "large" else None  # noqa: E731  # a strided half, and what both take
    plan = plan_update(replicated(tensors, 1), Parallel(tp=2, dim=dim).holding(tensors), Memory(1 << 22))
    shares = Shares(plan)
    (number,) = range(len(plan.buckets))
    buffer = far.FarBuffer(HostBuffer.make(shares.buffer_bytes))
    source = Source.of({name: far.far(part.clone()) for name, part in held.items()})
    Packer(shares, source, checked=True, sums=True).pack(buffer.tensor, number)
    for worker in range(2):
        wants = WorkerPlan(shares.of_worker(worker, exports=False))
        share = wants.share(number)
        assert share is not None
        arrivals = arrivals_of(wants, share, buffer, checked=True)
        assert arrivals.wrong() is None
        place = next(item for item in share.items if item.piece.tensor == "small1").offset_bytes
        buffer.tensor.memory[place] ^= 1  # type: ignore[attr-defined]
        assert "small" in str(arrivals_of(wants, share, buffer, checked=True).wrong())
        buffer.tensor.memory[place] ^= 1  # type: ignore[attr-defined]
    num_checks = shares.tables[number].num_checks
    assert 0 < crossed[0] <= 8 * DIGEST_BYTES * num_checks
    buffer.close()
