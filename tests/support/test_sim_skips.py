"""The list of what does not run on the device of threads names files and tests that are there."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT
from tests.support.sim_skips import SIM_SKIPS


@pytest.mark.parametrize("begin", SIM_SKIPS)
def test_what_is_skipped_is_there(begin: str) -> None:
    path, _, name = begin.partition("::")
    if name:
        assert re.search(rf"^def {re.escape(name.partition('[')[0])}", (ROOT / path).read_text(), re.MULTILINE)
    assert (ROOT / path).exists()
