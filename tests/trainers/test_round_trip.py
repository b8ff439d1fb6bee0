"""What is written for a trainer is read back as the same job; what it cannot run is not written."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainers.random_jobs import jobs, same
from treadle.trainers import TRAINERS, TrainerFormat, read_job

QUIET = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=lambda each: each.name)
@settings(max_examples=40, deadline=None, suppress_health_check=[*QUIET, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_written_is_read_back_as_the_same_job(
    trainer: TrainerFormat, data: st.DataObject, tmp_path: Path
) -> None:
    job = data.draw(jobs(trainer))
    file = tmp_path / f"launch{trainer.suffix}"
    file.write_text(trainer.launch(job))
    found = read_job(file, job.cluster, job.model if trainer.names_model else None)
    assert found.trainer == trainer.name
    assert asdict(same(found.job)) == asdict(same(job))
    assert found.unread == ()
    assert found.notes == ()
