"""Verdicts on the orders of torch and Megatron: no default of theirs is blamed, torch's deferred receives are."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import treadle
from communicators import NAMES, megatron_order, torch_order, verdicts
from treadle.schedules import generate

SIZES = [2, 4, *(pytest.param(pp, marks=pytest.mark.nightly) for pp in (8, 16))]


@pytest.mark.slow
@pytest.mark.parametrize("pp", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_torch_ends_by_default_and_hangs_with_deferred_receives(name: str, pp: int) -> None:
    schedule = generate(name, pp=pp, microbatches=2 * pp)
    default = torch_order(schedule, defer=False)
    assert set(verdicts(default).values()) == {"ends"}
    assert treadle.verify(default, lazy=True).clean
    deferred = verdicts(torch_order(schedule, defer=True))
    assert "hangs when large" in deferred["pair"]
    assert "hangs when large" in deferred["group"]
    assert ("hangs" in deferred["direction"]) == (name not in ("1f1b", "zb-h1"))
    assert ("crossing" in deferred["channel"]) == (name == "zb-v" or (name == "dualpipev" and pp > 2))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("pp", SIZES)
@pytest.mark.parametrize("vpp", [1, 2])
def test_megatron_ends(pp: int, vpp: int) -> None:
    schedule = megatron_order(pp, vpp, 2 * pp)
    assert set(verdicts(schedule).values()) == {"ends"}
