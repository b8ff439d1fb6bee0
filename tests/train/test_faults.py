"""A run that is disturbed, under torchrun: a killed rank, SIGTERM. It ends as the run that nobody disturbed."""

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
from tests.support.ranks import check, run_ranks
from tests.train.held_run import DIRECTORY, held_at
from tests.train.tiny import flags_of, tiny
from train_runs import losses_of, rank_processes, rows_of, started_run
from treadle.train.checkpoint import complete_steps
from treadle.train.run_config import TrainConfig
from treadle.train.trainer import Trainer

STEPS, KILLED_AT, STOPPED_AT = 10, 5, 7


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + HUNG_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def _train(rank: int, config: TrainConfig) -> None:
    trainer = Trainer(config)
    trainer.run()
    trainer.close()


@pytest.mark.slow
def test_a_run_that_is_killed_stopped_and_started_again_has_bitwise_the_losses_of_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, disturbed = (
        tiny(
            tmp_path / name,
            parallel={"pp": 2, "schedule": "interleaved-overlap"},
            training={"steps": STEPS},
            data={"cache": str(tmp_path / "data")},
        )
        for name in ("undisturbed", "disturbed")
    )
    check(run_ranks(2, _train, undisturbed))
    log, output = tmp_path / "log", tmp_path / "disturbed"
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    killed, stopped = held_at(tmp_path, KILLED_AT), held_at(tmp_path, STOPPED_AT)
    killed.touch()
    stopped.touch()
    with started_run(flags_of(disturbed), 2, log, restarts=2, program=("-m", "tests.train.held_run")) as process:
        _wait_until(lambda: max(losses_of(output), default=0) == KILLED_AT, process, log)
        os.kill(rank_processes(process)[1], signal.SIGKILL)
        killed.unlink()
        _wait_until(lambda: max(losses_of(output)) == STOPPED_AT, process, log)
        os.kill(rank_processes(process)[1], signal.SIGTERM)  # one rank is told, all of them stop
        stopped.unlink()
        assert process.wait(HUNG_S) == 0, log.read_text()
    told = log.read_text()
    resumed = re.search(r"resumed at step (\d+) \(restart 1\)", told)
    assert resumed is not None, told
    assert 0 < int(resumed[1]) <= KILLED_AT
    saved = re.search(r"stopped by SIGTERM, saved at step (\d+); the same command goes on from there", told)
    assert saved is not None, told
    step = int(saved[1])
    assert STOPPED_AT <= step < STEPS
    assert complete_steps(output / "checkpoints")[-1] == step
    assert max(losses_of(output)) == step

    check(run_ranks(2, _train, disturbed))
    assert [row["step"] for row in rows_of(output)][-1] == STEPS
    assert losses_of(output) == losses_of(tmp_path / "undisturbed")
    assert sorted(losses_of(output)) == list(range(1, STEPS + 1))
    assert complete_steps(output / "checkpoints") == [STEPS - 2, STEPS]
