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

SIZES = {"1f1b": 5, "interleaved-overlap": 8, "dualpipe": 10, "dualpipev": 8, "zb-v": 7}
"""Micro-batches."""


def everything(schedule: str, pp: int, ep: int) -> Config:
    return Config(
        schedule,
        "offload",
        "float64",
        num_mb=SIZES[schedule],
        num_classes=48,
        num_layers=2 if pp == 2 else 1,
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


@pytest.mark.parametrize(("pp", "ep"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("schedule", SIZES)
def test_gradients_are_those_of_one_process(schedule: str, pp: int, ep: int) -> None:
    config = everything(schedule, pp, ep)
    life = Life(seed=5, number=0, config=config, num_steps=2, deadline_s=PATIENT_S, stop=True, plant=None)
    records = check(run_ranks(config.world, live, life))
    assert [finding for record in records for finding in record.findings] == []
    assert all(record.num_draws == 2 for record in records)
