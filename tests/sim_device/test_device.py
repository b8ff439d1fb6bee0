"""The device of threads behaves as CUDA does, in processes of their own: a process has it for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.ranks import check, run_ranks
from treadle import sim_device

pytestmark = pytest.mark.slow
NUM = 20
SIZE = 64


def alone(test: Callable[[int], None]) -> None:
    check(run_ranks(1, on_sim, test, new=True))


def on_sim(rank: int, test: Callable[[int], None]) -> None:
    sim_device.load(delay_us=200, seed=3)
    torch.set_default_device("sim")
    test(rank)


def returns_before_its_kernel(_: int) -> None:
    x = torch.ones(4)
    sim_device.sleep(300)
    begun = time.monotonic()
    y = x * 2
    event = torch.Event(torch.device("sim", 0), enable_timing=True)
    event.record()
    assert not event.query()
    assert y.tolist() == [2.0] * 4
    assert event.query()
    assert time.monotonic() - begun > 0.2


def wrong_reads(*, recorded: bool) -> int:
    """How many of some blocks another stream reads wrongly that is not waited for at their ends."""
    other, current, wrong = torch.Stream("sim"), torch.accelerator.current_stream(), 0
    ones = torch.ones(SIZE, SIZE)
    for number in range(NUM):
        block = torch.full((SIZE, SIZE), float(number))
        other.wait_stream(current)
        with other:
            sim_device.sleep(2)
            made = block @ ones
        if recorded:
            block.record_stream(other)
        del block
        current.wait_stream(other)
        wrong += not bool((made.cpu() == SIZE * number).all())
    return wrong


def freed_block_is_poisoned(_: int) -> None:
    assert wrong_reads(recorded=False) > NUM // 2
    assert wrong_reads(recorded=True) == 0


def pinned_copies_leave_the_host_free(_: int) -> None:
    there = torch.ones(1 << 10)
    room = torch.empty(1 << 10, pin_memory=True, device="cpu")
    assert room.is_pinned()
    room.fill_(7.0)
    sim_device.take_waits()
    sim_device.sleep(100)
    room.copy_(there, non_blocking=True)
    assert room[0] == 7.0
    assert sim_device.take_waits() == {}
    torch.accelerator.synchronize()
    assert room[0] == 1.0
    there.copy_(torch.zeros(1 << 10, device="cpu"), non_blocking=True)
    assert sim_device.take_waits() == {"aten::copy_ from pageable memory": 1}
    with sim_device.forbid_waits(), pytest.raises(RuntimeError, match="_local_scalar_dense makes the host wait"):
        there.sum().item()


def numbers_come_from_its_generators(_: int) -> None:
    torch.manual_seed(3)
    first = torch.rand(8)
    torch.default_generator.manual_seed(3)
    assert torch.equal(torch.rand(8, device="cpu"), first.cpu())
    assert sorted(torch.randperm(8).tolist()) == list(range(8))
    state = torch.get_device_module("sim").get_rng_state()
    second = torch.nn.functional.dropout(torch.ones(64), 0.5)
    torch.get_device_module("sim").set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64), 0.5), second)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(8), first)
    own = torch.Generator("sim").manual_seed(5)
    again = torch.Generator("sim").manual_seed(5)
    assert torch.equal(torch.rand(8, generator=own), torch.rand(8, generator=again))


def its_module_makes_a_stream_current(_: int) -> None:
    module, stream = torch.get_device_module("sim"), torch.Stream("sim")
    with module.stream(stream):  # torch.distributed.checkpoint does so as it writes
        assert torch.accelerator.current_stream() == stream
    with module.stream(None):
        assert torch.accelerator.current_stream() != stream


def mistakes_raise(_: int) -> None:
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        torch.ones(3) + torch.ones(3, device="cpu")
    with pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        torch.ones(3) + torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(ValueError, match="there is no sim:9, but 8 of them"):
        torch.accelerator.set_device_index(9)


def error_of_a_kernel_comes_later(_: int) -> None:
    table, wrong = torch.ones(4, 4), torch.tensor([9])
    torch.nn.functional.embedding(wrong, table)
    with pytest.raises(RuntimeError, match="a kernel of sim failed"):
        torch.accelerator.synchronize()


@pytest.mark.parametrize(
    "test",
    [
        returns_before_its_kernel,
        freed_block_is_poisoned,
        pinned_copies_leave_the_host_free,
        numbers_come_from_its_generators,
        its_module_makes_a_stream_current,
        mistakes_raise,
        error_of_a_kernel_comes_later,
    ],
    ids=lambda test: test.__name__,
)
def test_device(test: Callable[[int], None]) -> None:
    alone(test)


def train_on_sim(_: int, dtype: torch.dtype) -> None:
    sim_device.load(delay_us=200, seed=3)
    torch.set_num_threads(1)
    models = []
    for device in ("cpu", "sim"):
        torch.set_default_device("cpu")
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10))
        model = model.to(device, dtype)
        adamw = torch.optim.AdamW(model.parameters(), 0.01)
        x, labels = torch.randn(16, 32).to(device, dtype), torch.randint(0, 10, (16,)).to(device)
        for _ in range(3):
            adamw.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), labels))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
        models.append(model)
    for cpu, sim in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(cpu, sim.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_is_that_of_the_cpu_to_the_last_bit(dtype: torch.dtype) -> None:
    check(run_ranks(1, train_on_sim, dtype, new=True))


def load_at_once(_: int) -> None:
    both = threading.Barrier(2)

    def load() -> None:
        both.wait()
        sim_device.load()

    with ThreadPoolExecutor(2) as threads:
        for loaded in [threads.submit(load) for _ in range(2)]:
            loaded.result()
    assert torch.ones(2, device="sim").tolist() == [1.0, 1.0]


def test_two_threads_load_it_at_once() -> None:
    check(run_ranks(1, load_at_once, new=True))
