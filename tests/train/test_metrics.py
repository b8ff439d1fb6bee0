"""The line of a step."""

from __future__ import annotations

import json
import resource
import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from tests.support.ranks import check, run_ranks
from train_runs import rows_of
from treadle.train.run_log import RunLog, StepFacts

FACTS = StepFacts(7, 2.5, 0.01, 1234.5, 0.25, None, 2**30, 1.5, 3e-4)


def test_a_line_names_all_facts_and_a_dash_for_what_was_not_measured() -> None:
    assert FACTS.line(100) == (
        "step   7/100  loss  2.5000  aux 0.0100    1,234 tok/s  bubble  25.0%  hidden      -  peak  1.00 GiB"
        "  norm   1.500  lr 3.00e-04"
    )


def test_lines_of_a_run_are_aligned() -> None:
    other = replace(FACTS, step=100, loss=11.25, tokens_per_s=123456, bubble=None, hidden=1.0, grad_norm=100.25)
    assert len(other.line(100)) == len(FACTS.line(100))
    assert "aux" not in replace(FACTS, aux_loss=None).line(100)


def write_three_steps(rank: int, output: Path) -> str:
    """The kernel cuts the row of step 2 off in its middle."""
    limits, told, path = resource.getrlimit(resource.RLIMIT_FSIZE), StringIO(), output / "metrics.jsonl"
    with redirect_stdout(told):
        log = RunLog(output, 0, steps=4, tensorboard=False, on_gpu=False)
        for step in (1, 2, 3, 4):
            full = step in (2, 3)
            soft = path.stat().st_size + 20 if full else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))
            log.step(replace(FACTS, step=step), printed=False)
        log.close()
    return told.getvalue()


@pytest.mark.slow
def test_a_run_goes_on_where_a_row_cannot_be_written(tmp_path: Path) -> None:
    (told,) = check(run_ranks(1, write_three_steps, tmp_path))
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 4]
    lost, again = told.splitlines()
    assert lost.startswith("metrics.jsonl has no row of step 2, and none until one can be written: [Errno ")
    assert again == "metrics.jsonl goes on with step 4; it lacks 2 rows"


def test_a_row_that_was_cut_off_stays_a_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    log = RunLog(tmp_path, 0, steps=4, tensorboard=False, on_gpu=False)
    log.step(FACTS, printed=False)
    log.close()
    cut, row = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (cut, json.loads(row)["step"]) == ('{"step": 1', 7)


def test_rows_have_the_time_and_the_restart(tmp_path: Path) -> None:
    began = time.time() - 0.001  # rounded
    for restart in (0, 1):
        log = RunLog(tmp_path, 0, steps=9, tensorboard=False, on_gpu=False, restart=restart)
        log.step(FACTS, printed=False)
        log.evaluation(7, 2.0, 100)
        log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["restart"] for row in rows] == [0, 0, 1, 1]
    assert all(began <= row["time"] <= time.time() + 0.001 for row in rows)


def test_memory_of_a_process_is_not_called_that_of_a_gpu() -> None:
    assert "  process  1.00 GiB" in FACTS.line(100, on_gpu=False)
