"""`treadle update`, from a checkpoint's directory or a trainer's function into running workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command import Finished, real_treadle, treadle
from tests.support.json_output import read_json
from tests.support.ranks import check
from tests.support.torchrun import run_under_torchrun
from tests.support.update.models import Compare, model, numbers
from tests.support.update.workers import Trouble, Workers, ask_once
from treadle.cli.commands.update import _take_device
from treadle.update.protocol.update_messages import Refused
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Box

pytestmark = pytest.mark.slow

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


def as_ranks(workers: Workers, cwd: Path, *arguments: str) -> Finished:
    """What rank 0 says of an update by one rank for each worker, under torchrun; all of them end alike."""
    command = ("update", *arguments, "--to", str(workers.sockets))
    ends = check(run_under_torchrun(len(workers.processes), _treadle, cwd, command))
    assert {end.returncode for end in ends} == {ends[0].returncode}
    assert {end.stdout for end in ends[1:]} == {""}
    return ends[0]


def _treadle(cwd: Path, arguments: tuple[str, ...]) -> Finished:
    return treadle(*arguments, cwd=cwd)


def save(directory: Path, version: int) -> Path:
    directory.mkdir()
    tensors = model(1, 32)
    for part, half in enumerate((tensors[:2], tensors[2:])):
        state = {t.name: torch.from_numpy(numbers(t, Box.whole(t.shape), version)).view(torch.bfloat16) for t in half}
        save_file(state, directory / f"model-{part}.safetensors")
    return directory


def test_a_directory_into_an_engine_or_not_at_all(workers: Workers, tmp_path: Path) -> None:
    """The first update is by ranks that the command itself starts."""
    bucket = ("--bucket", "64KiB")
    to = ("--to", str(workers.sockets))
    done = real_treadle("update", "--from", str(save(tmp_path / "one", 1)), *to, *bucket, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = read_json("update", done.stdout)
    assert (shown["version"], shown["attempt"]) == (1, 1)
    assert shown["bytes"] >= sum(tensor.size_bytes for tensor in model(1, 32))
    workers.tell(1, Trouble("raise", "finish"))
    done = as_ranks(workers, tmp_path, "--from", str(save(tmp_path / "two", 2)), *bucket)
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "worker 1" in told
    assert "until version 2 is committed" in told  # what the way back costs was said before
    assert [workers.tell(worker, Compare(1)) for worker in range(2)] == [[]] * 2


def test_a_trainer_into_an_engine(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    done = as_ranks(workers, tmp_path, "--from", "trainer:source", "--version", "5")
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
    done = treadle("update", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_trainer_that_is_not_there_is_told(workers: Workers, tmp_path: Path) -> None:
    for trainer, told in (
        ("nobody.here:source", "--from nobody.here:source: there is no module 'nobody' here"),
        ("json:source", "has no 'source'; name the function that makes a Source"),
    ):
        done = as_ranks(workers, tmp_path, "--from", trainer, "--compare-sources", "all")
        assert done.returncode == 2
        assert told in done.stderr


def test_nothing_to_recover(workers: Workers, tmp_path: Path) -> None:
    done = as_ranks(workers, tmp_path, "--recover")
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
