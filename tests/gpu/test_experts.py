"""Grouped experts on the accelerator: the kernel is used where it needs no wait, and its numbers are the loop's."""

from __future__ import annotations

import pytest
import torch

from treadle.runtime.model import grouped_mm
from treadle.runtime.model.grouped_mm import RowGroups
from treadle.selfcheck import Setup
from treadle.selfcheck.check_experts import experts_in_rank, far

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="no accelerator: torch.accelerator.is_available() is False"
)


def test_experts_are_the_loop_in_every_type() -> None:
    experts_in_rank(Setup(num_ranks=2), 0)


def test_groups_without_rows_have_zero_gradients_in_bfloat16() -> None:
    device = torch.accelerator.current_accelerator()
    left, right = (torch.randn(48, 64).to(device, torch.bfloat16) for _ in range(2))
    groups = RowGroups([0, 16, 0, 32, 0])
    made = grouped_mm.grouped_outer(left, right, groups).cpu()
    assert not made[[0, 2, 4]].any()
    assert far(made[1], left[:16].t().float() @ right[:16].float()) < 0.02
