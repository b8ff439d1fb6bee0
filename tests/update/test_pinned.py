"""What goes between a device and the host goes through pinned memory, without a wait that nobody asked for."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import check, run_ranks
from treadle import sim_device
from treadle.update.memory import copying
from treadle.update.memory.changed_elements import ElementRun, encode, patch
from treadle.update.memory.copying import copy, digest, finish_copies, same
from treadle.update.rank.staged_share import staged_share

pytestmark = pytest.mark.slow
PIECE_BYTES = 4 << 10


def tensors() -> list[torch.Tensor]:
    """Of several pieces, of a part of one, strided, of one element, of none."""
    whole = torch.arange(96 * 64, dtype=torch.int32).view(96, 64)
    strided, few = whole.view(96, 8, 8)[:, 1::2, 3:], whole[:3]
    return [whole, whole.view(torch.bfloat16), strided, few.view(torch.uint8), few[0, 7], whole[:, :0]]


def sim() -> torch.device:
    sim_device.load(delay_us=200, seed=1)
    torch.set_default_device("cpu")
    return torch.device(sim_device.NAME, 0)  # a name that torch knows from then on


def crosses_pinned(_: int) -> None:
    device = sim()
    copying.DEVICE_PIECE_BYTES = PIECE_BYTES
    crosses(device)


def crosses(device: torch.device) -> None:
    """Raise where a copy between the device and the host is wrong, or waits."""
    for held in tensors():
        with sim_device.forbid_waits():
            there = torch.empty(held.shape, dtype=held.dtype, device=device)
            source = held.clone()
            copy(there, source)
            source.zero_()  # it may change at once
            back, strided = torch.empty_like(held), torch.empty(*held.shape, 2, dtype=held.dtype)
            copy(back, there)
            copy(strided[..., 1], there)
            assert digest(there) == digest(held)
        assert torch.equal(back, held)
        assert torch.equal(strided[..., 1], held)
        assert same(there, held)
        if held.numel():
            there += 1
            assert not same(there, held)


def patches_pinned(_: int) -> None:
    device = sim()
    old = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
    new = old.clone()
    new[5::97] += 1
    there, stream = torch.empty_like(old, device=device), encode(old, new, [ElementRun(0, 1 << 15, 2)])
    with sim_device.forbid_waits():
        copy(there, old)
        patch(there, stream, swap=True)
    finish_copies(device)
    assert torch.equal(there.cpu(), new)
    patch(there, stream)
    assert torch.equal(there.cpu(), old)


def stages_pinned(_: int) -> None:
    device = sim()
    drawn = [("a", torch.arange(64.0)), ("b", torch.arange(32.0).view(4, 8).t())]
    there = [(name, torch.empty_like(tensor, device=device)) for name, tensor in drawn]
    for at, (_name, into) in enumerate(there):
        copy(into, drawn[at][1])
    with sim_device.forbid_waits():
        held = staged_share(there, 0, 1).held
    for piece, tensor in held.items():
        assert torch.equal(tensor, dict(drawn)[piece.tensor])


@pytest.mark.parametrize("test", [crosses_pinned, patches_pinned, stages_pinned])
def test_the_host_waits_for_no_copy_of_pageable_memory(test: object) -> None:
    assert callable(test)
    check(run_ranks(1, test, new=True))
