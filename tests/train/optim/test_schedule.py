"""Learning rates, and settings that are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from treadle.train.optim import OptimizerConfig, WarmupStableDecay


def test_the_rate_rises_stays_and_falls() -> None:
    lr = WarmupStableDecay(lr=4.0, steps=100, warmup_steps=10, decay_steps=20, final_lr=0.4)
    rates = [lr(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.4)
    assert rates[9:81] == [4.0] * 72
    assert all(before > after for before, after in pairwise(rates[80:]))
    assert lr(100) == lr(1000) == pytest.approx(0.4)


@pytest.mark.parametrize(("shape", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_decay_follows_its_shape(shape: Any, halfway: float) -> None:
    lr = WarmupStableDecay(lr=1.0, steps=100, decay_steps=50, decay_shape=shape)
    assert lr(75) == pytest.approx(halfway)
    assert lr(0) == lr(50) == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warmup_steps": 60, "decay_steps": 50}, "60 steps of warm-up and 50 of decay are more than the 100"),
        ({"final_lr": 2.0}, "final_lr from 0 to lr"),
        ({"decay_shape": "steep"}, "linear, cosine or sqrt, got 'steep'"),
        ({"warmup_steps": -1}, "0 or more"),
    ],
)
def test_phases_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WarmupStableDecay(**{"lr": 1.0, "steps": 100, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "sgd"}, "adamw, muon, got 'sgd'"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"weight_decay": -0.1}, "weight_decay is 0 or more"),
        ({"muon_lr": "spectral"}, "original or match_rms_adamw"),
        ({"bucket_mb": 0.0}, "more than 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**changes)
