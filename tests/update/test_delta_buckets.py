"""Changed elements from a source's tensors to an engine's and back, in one process: every dtype, bit for bit."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.update import Plain, Source
from treadle.update.memory.host import HostBuffer
from treadle.update.protocol.update_messages import Begin, Finish, Grant, Map, Move, Moved, Refused, Status
from treadle.update.rank.bucket_packing import Packer
from treadle.update.rank.committed_share import CommittedShare
from treadle.update.rank.delta_packing import DeltaPacker, NotedPacker, delta_room
from treadle.update.rank.shares import Shares
from treadle.update.worker.worker import Worker
from treadle.weights.buffer_sizes import Memory
from treadle.weights.tensor_boxes import ITEMSIZE, Holding
from treadle.weights.update_plan import plan_update

KINDS = sorted(kind for kind in ITEMSIZE if hasattr(torch, kind))
State = dict[str, torch.Tensor]


def of_bits(raw: np.ndarray, kind: str) -> torch.Tensor:
    made = torch.empty(raw.size, dtype=torch.uint8)
    made[:] = torch.from_numpy(raw.reshape(-1))
    return made.view(getattr(torch, kind))


def state_of(kinds: list[tuple[str, int]], seed: int) -> State:
    rng = np.random.default_rng(seed)
    return {
        f"{at}.{kind}": of_bits(rng.integers(0, 256, num * ITEMSIZE[kind], dtype=np.uint8), kind)
        for at, (kind, num) in enumerate(kinds)
    }


def changed(state: State, rate: float, seed: int) -> State:
    """Other bits in some elements; of some of these only the highest bit is another, which is often a sign."""
    rng, made = np.random.default_rng(seed), {}
    for name, tensor in state.items():
        size = tensor.element_size()
        raw = tensor.view(torch.uint8).numpy().reshape(-1, size).copy()
        chosen = rng.random(len(raw)) < rate
        raw[chosen, size - 1] ^= rng.choice(np.array([0x80, 1], np.uint8), int(chosen.sum()))
        made[name] = of_bits(raw, name.split(".")[1])
    return made


class Pair:
    """A rank and a worker that share a buffer."""

    def __init__(self, state: State) -> None:
        self.engine = Plain({name: of_bits(bits(tensor) ^ 0xFF, name.split(".")[1]) for name, tensor in state.items()})
        self.worker, source = Worker(self.engine, 0), Source.of(state)
        have, want = (
            Holding(dict(source.tensors), (pieces,)) for pieces in (source.has.pieces, self.engine._layout.pieces)
        )
        self.shares = Shares(plan_update(have, want, Memory(8 << 20, target_bytes=1 << 18, least_bytes=4096)))
        self.buffer = HostBuffer.make(self.shares.buffer_bytes + delta_room(self.shares.plan))
        assert self.buffer.fd is not None
        self.plan = self.shares.of_worker(0, exports=False)
        self.worker.handle(self.plan)
        self.worker.map(Map((self.buffer.size_bytes,)), [os.dup(self.buffer.fd)])
        self.share = CommittedShare()

    def load(self, state: State, epoch: int, *, delta: bool) -> int:
        """Load a version; the bytes of its deltas."""
        asked = Begin(epoch, epoch, self.plan.digest, "host", "drain", 1.0, partial=False, delta=delta)
        assert not isinstance(told := self.worker.handle(asked), Refused), told
        self.share.begin("", epoch, self.shares.digest)
        noted = NotedPacker(self.shares, Packer(self.shares, Source.of(state), checked=True), self.share)
        numbers, moved = list(range(len(self.shares.plan.buckets))), 0
        with DeltaPacker(noted, numbers if delta else [], 60.0) as deltas:
            for number in numbers:
                size_bytes = deltas.size_bytes(number) if delta else 0
                (deltas if delta else noted).fill(self.buffer, number)
                told = self.worker.handle(self.move(epoch, number, size_bytes))
                assert isinstance(told, Moved), told
                moved += size_bytes
        assert self.holds(state)
        return moved

    def move(self, epoch: int, bucket: int, delta_bytes: int) -> Move:
        return Move(epoch, self.plan.digest, bucket, 0, out=False, checked=True, delta_bytes=delta_bytes)

    def commit(self, epoch: int) -> None:
        self.worker.handle(Finish(epoch))
        told = self.worker.handle(Grant(epoch, epoch, (epoch,)))
        assert isinstance(told, Status)
        assert (told.state, told.version) == ("serving", epoch)
        self.share.settle("", (epoch,))

    def holds(self, state: State) -> bool:
        return all(np.array_equal(bits(self.engine.held[name]), bits(tensor)) for name, tensor in state.items())


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


SIZES = st.sampled_from([0, 1, 2, 7, 31, 33, 1001, 70_001])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), SIZES), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.003, 0.01, 0.1, 1.0]),
    st.integers(0, 99),
)
def test_any_change_arrives_goes_back_and_arrives(kinds: list[tuple[str, int]], rate: float, seed: int) -> None:
    old = state_of(kinds, seed)
    new = changed(old, rate, seed)
    pair = Pair(old)
    pair.load(old, 1, delta=False)
    pair.commit(1)
    moved = pair.load(new, 2, delta=True)
    pair.worker.handle(Grant(2, 1, (1,)))
    assert pair.holds(old), "went back"
    assert (pair.worker.state, pair.worker.now.version) == ("serving", 1)
    pair.share.settle("", (1,))
    assert pair.load(new, 3, delta=True) == moved, "the same changes, against what was committed"
    pair.commit(3)
    assert pair.load(new, 4, delta=True) == 8 * len(pair.shares.plan.buckets), "nothing has changed"
    pair.commit(4)


def test_a_delta_is_taken_only_over_the_version_that_is_served() -> None:
    state = state_of([("bfloat16", 5000)], 1)
    pair = Pair(state)
    asked = Begin(1, 1, pair.plan.digest, "host", "drain", 1.0, partial=False, delta=True)
    told = pair.worker.handle(asked)
    assert isinstance(told, Refused)
    assert "serves no version that a part could be added to" in told.text
    pair.load(state, 1, delta=False)
    pair.commit(1)
    pair.load(changed(state, 0.01, 2), 2, delta=True)
    told = pair.worker.handle(pair.move(2, 0, 0))
    assert isinstance(told, Moved), "a bucket that was loaded is not loaded a second time"
    assert pair.holds(changed(state, 0.01, 2))


@pytest.mark.parametrize("delta_bytes", [-1, 0, 3, 1 << 40])
def test_sizes_that_cannot_be_are_refused(delta_bytes: int) -> None:
    state = state_of([("bfloat16", 5000)], 1)
    pair = Pair(state)
    pair.load(state, 1, delta=False)
    pair.commit(1)
    asked = Begin(2, 2, pair.plan.digest, "host", "drain", 1.0, partial=False, delta=True)
    pair.worker.handle(asked)
    assert isinstance(pair.worker.handle(pair.move(2, 0, delta_bytes)), Refused)
    pair.worker.handle(Grant(2, 1, (1,)))
    assert pair.holds(state)
    assert pair.worker.state == "serving"
