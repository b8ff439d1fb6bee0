"""The checks of `treadle selfcheck` on this machine's accelerator, one test each."""

from __future__ import annotations

import pytest
import torch

from tests.support.patience import PATIENT_S
from treadle.selfcheck import Setup
from treadle.selfcheck.checks import Check, all_checks, run_check

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="no accelerator: torch.accelerator.is_available() is False"
)


@pytest.mark.parametrize("check", list(all_checks()), ids=lambda check: check.name)
def test_check_passes_on_the_device(check: Check) -> None:
    num_ranks = max(2, min(4, torch.accelerator.device_count()))
    result = run_check(check, Setup(num_ranks=num_ranks, quick=True, deadline_s=PATIENT_S))
    if result.status == "skipped":
        pytest.skip(result.about)
    assert result.status == "passed", f"{result.about}; {result.advice}"
