"""Runs that are disturbed, under torchrun: killed ranks, SIGTERM. They end as the run that nobody disturbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.patience import HUNG_S
from tests.train.tiny import flags_of, losses_of, tiny
from treadle.train.checkpoint import complete_steps
from treadle.train.config import TrainConfig

pytestmark = pytest.mark.slow


@contextmanager
def _started(config: TrainConfig, num_ranks: int, log: Path, *, restarts: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run under torchrun; nothing of it outlives the context."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--standalone", "--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    command += ["-m", "treadle.train", *flags_of(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + HUNG_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def _ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of a run's ranks, in order of ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
        found.update(dict.fromkeys(ranks, child))
    return [found[rank] for rank in sorted(found)]


def _done(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_killed_rank_is_restarted_and_the_losses_are_bitwise_the_same(tmp_path: Path) -> None:
    layout = {"pp": 2, "schedule": "interleaved-overlap"}
    steps = 16
    runs = {
        name: tiny(tmp_path / name, parallel=layout, training={"steps": steps}, data={"cache": str(tmp_path / "data")})
        for name in ("undisturbed", "killed")
    }
    with _started(runs["undisturbed"], 2, tmp_path / "undisturbed.log") as process:
        assert process.wait(HUNG_S) == 0, (tmp_path / "undisturbed.log").read_text()
    log, output = tmp_path / "killed.log", tmp_path / "killed"
    with _started(runs["killed"], 2, log, restarts=2) as process:
        _wait_until(lambda: _done(output) >= 5, process, log)
        os.kill(_ranks_of(process)[1], signal.SIGKILL)
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
    with _started(config, 2, log) as process:
        _wait_until(lambda: _done(output) >= 3, process, log)
        os.kill(_ranks_of(process)[1], signal.SIGTERM)  # one rank is told, all of them stop
        assert process.wait(HUNG_S) == 0, log.read_text()
    found = re.search(r"stopped by SIGTERM, saved at step (\d+); the same command goes on from there", log.read_text())
    assert found is not None, log.read_text()
    step = int(found[1])
    assert 3 <= step < 60
    assert complete_steps(output / "checkpoints") == [step]
    assert max(losses_of(output)) == step
