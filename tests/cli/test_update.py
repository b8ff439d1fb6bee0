"""`treadle update`, from a checkpoint's directory or a trainer's function into running workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.json_output import read_json
from tests.support.paths import ROOT
from tests.support.patience import HUNG_S
from tests.support.update.models import Compare, model, numbers
from tests.support.update.workers import Trouble, Workers, ask_once
from treadle.cli.commands.update import _take_device
from treadle.update.protocol.messages import Refused
from treadle.weights.layouts import Parallel
from treadle.weights.pieces import Box

pytestmark = pytest.mark.slow

SCRIPT = """
import typer
from treadle.cli.commands.update import update
typer.run(update)
"""

TRAINER = """
import torch.distributed as dist
from tests.support.update.models import model, source_of
from treadle.weights.layouts import spread

def source():
    return source_of(spread(model(1, 32), dist.get_world_size()), dist.get_rank(), 5)
"""


@pytest.fixture
def workers() -> Iterator[Workers]:
    tensors = model(1, 32)
    with Workers(Parallel(tp=2, dim=lambda name: 0).holding(tensors)) as made:
        yield made


def treadle_update(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (cwd / "update.py").write_text(SCRIPT)
    command = [sys.executable, str(cwd / "update.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HUNG_S, check=False)


def save(directory: Path, version: int) -> Path:
    directory.mkdir()
    tensors = model(1, 32)
    for part, half in enumerate((tensors[:2], tensors[2:])):
        state = {t.name: torch.from_numpy(numbers(t, Box.whole(t.shape), version)).view(torch.bfloat16) for t in half}
        save_file(state, directory / f"model-{part}.safetensors")
    return directory


def test_a_directory_into_an_engine_or_not_at_all(workers: Workers, tmp_path: Path) -> None:
    to = ("--to", str(workers.sockets), "--bucket", "64KiB")
    done = treadle_update(tmp_path, "--from", str(save(tmp_path / "one", 1)), *to, "--json")
    assert done.returncode == 0, done.stderr
    shown = read_json("update", done.stdout)
    assert (shown["version"], shown["attempt"]) == (1, 1)
    assert shown["bytes"] >= sum(tensor.size_bytes for tensor in model(1, 32))
    workers.tell(1, Trouble("raise", "finish"))
    done = treadle_update(tmp_path, "--from", str(save(tmp_path / "two", 2)), *to)
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "worker 1" in told
    assert "until version 2 is committed" in told  # what the way back costs was said before
    assert [workers.tell(worker, Compare(1)) for worker in range(2)] == [[]] * 2


def test_a_trainer_into_an_engine(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{TRAINER}")
    done = treadle_update(tmp_path, "--from", "trainer:source", "--to", str(workers.sockets), "--version", "5")
    assert done.returncode == 0, done.stderr
    assert "version 5 is served by all workers" in done.stdout
    assert [workers.tell(worker, Compare(5)) for worker in range(2)] == [[]] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--to", "."), "an update needs --from"),
        (("--from", ".", "--to", "."), "has no sockets of workers"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = treadle_update(tmp_path, *arguments)
    assert done.returncode != 0
    assert told in done.stderr


def test_a_trainer_that_is_not_there_is_told(workers: Workers, tmp_path: Path) -> None:
    told = []
    for trainer in ("nobody.here:source", "json:source"):
        done = treadle_update(tmp_path, "--from", trainer, "--to", str(workers.sockets), "--compare-sources", "all")
        told.append(" ".join(done.stderr.replace("[rank0]: ", "").split()))  # lines are wrapped
    assert "--from nobody.here:source: there is no module 'nobody' here" in told[0]
    assert "has no 'source'; name the function that makes a Source" in told[1]


def test_nothing_to_recover(workers: Workers, tmp_path: Path) -> None:
    done = treadle_update(tmp_path, "--recover", "--to", str(workers.sockets))
    assert done.returncode == 1
    assert "no version was ever committed" in done.stderr.replace("\n", " ")
    assert isinstance(ask_once(workers.sockets, 0), Refused)


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    assert _take_device(1) == torch.device("cuda", 1)
    assert taken == [1]
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own, 2 are visible; start at most one"):
        _take_device(2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert _take_device(0) is None, "buffers can be on the host then"
