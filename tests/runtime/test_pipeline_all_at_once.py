"""Everything at once, gradient by gradient against one process and bit by bit against serial lanes, under delays.

Tied embedding and head, an MTP block that shares the head's weight, a dense layer beside MoE ones, micro-batches of
five lengths, attention and experts computed again, offload, dropout and auxiliary losses.
"""

from __future__ import annotations

import pytest

from tests.support.fuzz import Life, live
from tests.support.fuzz_models import Config
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks

SIZES = {
    "1f1b": (4, 1, 5),
    "interleaved-overlap": (2, 2, 4),
    "dualpipe": (4, 1, 8),
    "dualpipev": (2, 2, 4),
    "zb-v": (2, 1, 5),
    "v-min": (2, 1, 5),
}
"""(pp, ep, micro-batches)."""


def everything(schedule: str) -> Config:
    pp, ep, num_mb = SIZES[schedule]
    return Config(
        schedule,
        "offload",
        "float64",
        num_mb=num_mb,
        num_classes=48,
        num_layers=2 if schedule == "interleaved-overlap" else 1,
        dropout=True,
        aux="own",
        layered=True,
        ep=ep,
        unequal=True,
        recompute="attn+mlp",
        mtp=True,
        dense=True,
        tied=True,
        pp=pp,
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SIZES)
def test_gradients_are_those_of_one_process(schedule: str) -> None:
    config = everything(schedule)
    life = Life(seed=5, number=0, config=config, num_steps=2, deadline_s=PATIENT_S, stop=True, plant=None)
    records = check(run_ranks(config.world, live, life))
    assert [finding for record in records for finding in record.findings] == []
    assert all(record.num_draws == 2 for record in records)
