"""Runs that are disturbed, under torchrun: killed ranks, SIGTERM. They end as the run that nobody disturbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.patience import HUNG_S
from tests.train.tiny import flags_of, tiny
from train_runs import losses_of, rank_processes, rows_of, started_run
from treadle.train.checkpoint import complete_steps

pytestmark = pytest.mark.slow


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + HUNG_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def _done(output: Path) -> int:
    return len(rows_of(output))


def test_a_killed_rank_is_restarted_and_the_losses_are_bitwise_the_same(tmp_path: Path) -> None:
    layout = {"pp": 2, "schedule": "interleaved-overlap"}
    steps = 16
    runs = {
        name: tiny(tmp_path / name, parallel=layout, training={"steps": steps}, data={"cache": str(tmp_path / "data")})
        for name in ("undisturbed", "killed")
    }
    with started_run(flags_of(runs["undisturbed"]), 2, tmp_path / "undisturbed.log") as process:
        assert process.wait(HUNG_S) == 0, (tmp_path / "undisturbed.log").read_text()
    log, output = tmp_path / "killed.log", tmp_path / "killed"
    with started_run(flags_of(runs["killed"]), 2, log, restarts=2) as process:
        _wait_until(lambda: _done(output) >= 5, process, log)
        os.kill(rank_processes(process)[1], signal.SIGKILL)
        assert process.wait(HUNG_S) == 0, log.read_text()
    told = log.read_text()
    resumed = re.search(r"resumed at step (\d+) \(restart 1\)", told)
    assert resumed is not None, told
    assert 0 < int(resumed[1]) < steps
    assert losses_of(output) == losses_of(tmp_path / "undisturbed")
    assert len(losses_of(output)) == steps
    assert complete_steps(output / "checkpoints") == [14, 16]


def test_sigterm_saves_and_leaves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "run"
    config = tiny(output, parallel={"dp": 2}, training={"steps": 60}, checkpoint={"every": 0})
    with started_run(flags_of(config), 2, log) as process:
        _wait_until(lambda: _done(output) >= 3, process, log)
        os.kill(rank_processes(process)[1], signal.SIGTERM)  # one rank is told, all of them stop
        assert process.wait(HUNG_S) == 0, log.read_text()
    found = re.search(r"stopped by SIGTERM, saved at step (\d+); the same command goes on from there", log.read_text())
    assert found is not None, log.read_text()
    step = int(found[1])
    assert 3 <= step < 60
    assert complete_steps(output / "checkpoints") == [step]
    assert max(losses_of(output)) == step
