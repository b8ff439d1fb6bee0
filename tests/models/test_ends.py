"""The loss over runs of tokens: the numbers of torch's cross entropy, and nothing saved but the logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from counted.kernels import SavedBytes
from treadle.models import IGNORED, ends, loss_fn


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(8)
    target = torch.randint(0, 33, (2, 25), generator=draw)
    target[0, 3:9] = IGNORED
    return (3 * torch.randn(2, 25, 33, generator=draw)).to(dtype), target


@pytest.mark.parametrize("num_at_once", [1, 7, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_is_torchs(dtype: torch.dtype, num_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients to the bit; the sum too where it is one run, else as near to float64 as float32 sums are."""
    monkeypatch.setattr(ends, "_AT_ONCE_BYTES", num_at_once * 33 * 4)
    logits, target = drawn(dtype)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    made = loss_fn(ours, target)
    flat = theirs.flatten(0, 1).float()
    wanted = functional.cross_entropy(flat, target.flatten(), ignore_index=IGNORED, reduction="sum")
    for loss in (made, wanted):
        torch.autograd.backward(0.37 * loss)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    exact = functional.cross_entropy(flat.double(), target.flatten(), ignore_index=IGNORED, reduction="sum")
    assert torch.equal(made, wanted) if num_at_once == 50 else abs(made.double() - exact) <= 1e-6 * exact


def test_nothing_of_float32_is_saved() -> None:
    logits, target = drawn(torch.bfloat16)
    saved = SavedBytes()
    with saved:
        loss_fn(logits.requires_grad_(), target)
    assert saved.total == logits.nbytes + target.nbytes
