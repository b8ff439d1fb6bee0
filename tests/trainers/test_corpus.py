"""Configurations that people run, restated as facts: all are read, and what touches step or memory is understood."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from held_to.rows import read_rows
from held_to.runs import job_of
from tests.trainers.random_jobs import same
from treadle.estimate import load_cluster
from treadle.trainers import TRAINERS, read_job
from treadle.trainers.megatron_effects import touches

CORPUS = Path(__file__).parent / "data" / "megatron_options.csv"
"""One row per distinct set of options that touch a step or its memory, of Megatron-LM's functional tests of gpt, moe
and mixtral at d98e8a64: how many tests have it, GPUs on which it divides, the options."""


def rows() -> list[dict[str, str]]:
    with CORPUS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_options_of_megatrons_functional_tests_are_read_and_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests, counts, unknown = 0, Counter[str](), set()
    for row in rows():
        script = tmp_path / "launch.sh"
        script.write_text(f"torchrun pretrain_gpt.py {row['options']}\n")
        found = read_job(script, load_cluster(f"h100:{row['gpus']}"))
        assert found.trainer == "megatron"
        tests += int(row["tests"])
        counts["in the estimate"] += found.num_read
        for each in found.unread:
            counts["unknown" if each.matters == "unknown" else "named"] += 1
            unknown |= {each.setting} if each.matters == "unknown" else set()
    share = 1 - counts["unknown"] / counts.total()
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{tests} configurations, {len(rows())} distinct, read; of {counts.total():,} options that touch step or "
            f"memory {share:.1%} are understood: {counts['in the estimate']:,} in the estimate, "
            f"{counts['named']:,} reported with what they touch, {counts['unknown']} unknown"
        )
    assert tests >= 270
    assert share >= 0.95, unknown
    assert counts["in the estimate"] / counts.total() >= 0.85


def test_an_option_that_nobody_has_described_counts_as_one_that_matters() -> None:
    assert touches("a_new_kind_of_parallelism")
    assert not touches("tensorboard_dir")


@pytest.mark.parametrize("row", read_rows("bridge"), ids=lambda row: f"{row['release']}-{row['model']}-{row['gpu']}")
def test_published_runs_of_bridge_are_written_and_read_as_the_same_job(row: dict[str, str], tmp_path: Path) -> None:
    job = job_of(row, row["model"])
    mlp = "mlp" in job.recompute and job.model.is_moe  # Treadle's own module, between moe_act and moe
    job = replace(job, recompute=tuple(name for name in job.recompute if not (mlp and name == "mlp")))
    file = tmp_path / "run_config.yaml"
    file.write_text(TRAINERS["bridge"].launch(job))
    found = read_job(file, job.cluster)
    assert (found.trainer, found.unread) == ("bridge", ())
    assert same(found.job) == same(job)
