"""`treadle update`, from a checkpoint's directory or a trainer's function into running workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace, TracebackType

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command import TREADLE, Finished, real_treadle, treadle
from tests.support.json_output import read_json
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.torchrun import run_under_torchrun
from tests.support.update.changing import CompareElements, elements
from tests.support.update.models import Compare, model, numbers
from tests.support.update.workers import Trouble, Workers, ask_once
from tests.train.checkpoint.states import make_pipe
from treadle.cli.commands.update import _join_group, take_device
from treadle.train.checkpoint import Checkpointer, TensorPart
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


class Watch:
    """`treadle update --watch` as a person starts it; `said` is what it has printed."""

    def __init__(self, workers: Workers, directory: Path, log: Path, *more: str) -> None:
        self.log = log
        command = [
            TREADLE,
            "update",
            "--watch",
            str(directory),
            "--to",
            str(workers.sockets),
            "--bucket",
            "64KiB",
            *more,
        ]
        with log.open("wb") as out:
            env = {**os.environ, "COLUMNS": "200"}
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, process_group=0)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, text: str) -> None:
        until = time.monotonic() + PATIENT_S
        while text not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.05)

    @property
    def ranks(self) -> list[str]:
        """The update ranks' processes."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

    def interrupt(self) -> int:
        os.killpg(self.process.pid, signal.SIGINT)  # as a terminal does
        return self.process.wait(PATIENT_S)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


def test_changed_elements_alone_by_ranks_that_stay(workers: Workers, tmp_path: Path) -> None:
    run, ranks = tmp_path / "run", []
    run.mkdir()
    with Watch(workers, run, tmp_path / "log", "--changed", "elements") as watch:
        watch.until("watching")
        for version in (1, 2, 3):
            state = {t.name: torch.from_numpy(elements(t, Box.whole(t.shape), version)) for t in model(1, 32)}
            part = run / f"tmp-{version}"
            part.mkdir()
            save_file({name: each.view(torch.bfloat16) for name, each in state.items()}, part / "model.safetensors")
            part.rename(run / f"checkpoint-{version}")
            watch.until(f"version {version} is served by all workers\nmoved")
            assert [workers.tell(worker, CompareElements(version)) for worker in range(2)] == [[], []]
            ranks.append(watch.ranks)
        assert watch.interrupt() == 0, watch.said
    assert ranks == [ranks[0]] * 3
    assert len(ranks[0]) == 2
    moved = [line.split()[1:3] for line in watch.said.splitlines() if line.startswith("moved")]
    units = {"bytes": 1, "kB": 1000}
    whole, *deltas = (float(number) * units[unit] for number, unit in moved)
    assert all(delta < whole / 4 for delta in deltas), moved
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks[0])


def save_as_trainer(rank: int, directory: Path, version: int) -> None:
    """What the trainer saves at a step of this number: parameters, and an optimizer's state that no engine takes."""
    tensors = {t.name: torch.from_numpy(numbers(t, Box.whole(t.shape), version)) for t in model(1, 32)}
    parts = {name: TensorPart.whole(values.view(torch.bfloat16)) for name, values in tensors.items()}
    parts["optim.exp_avg.embed"] = TensorPart.run(torch.ones(6), 0, 6)
    state = SimpleNamespace(state_dict=lambda: parts, load_state_dict=parts.update)
    checkpoints = Checkpointer(directory, pipe=make_pipe(1))
    checkpoints.save(version, state)
    checkpoints.close()


def test_each_new_checkpoint_until_an_interrupt(workers: Workers, tmp_path: Path) -> None:
    """Of Hugging Face's form and the trainer's, one half written, one that a worker fails to load."""
    run = tmp_path / "run"
    run.mkdir()

    def serves(version: int) -> bool:
        return [workers.tell(worker, Compare(version)) for worker in range(2)] == [[], []]

    with Watch(workers, run, tmp_path / "log") as watch:
        watch.until("watching")
        staged = save(tmp_path / "staged", 3)
        half = run / "checkpoint-3"
        half.mkdir()
        parts = sorted(staged.iterdir())
        shutil.copy(parts[0], half)
        watch.until("checkpoint-3 is not loaded: it has parts and no")
        check(run_ranks(1, save_as_trainer, run, 2))  # whole at once
        watch.until("version 2 is served by all workers")
        assert serves(2)
        shutil.copy(parts[1], half)
        named = {t.name: parts[int(t not in model(1, 32)[:2])].name for t in model(1, 32)}
        workers.tell(1, Trouble("raise", "finish"))
        (half / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
        watch.until("checkpoint-3 was not committed; it is tried again in 5 s")
        assert "trouble in finish" in watch.said
        watch.until("version 3 is served by all workers")
        assert serves(3)
        assert watch.interrupt() == 0, watch.said
    assert "ending" in watch.said
    assert "Traceback" not in watch.said
    assert watch.said.count("is loaded as version") == 3


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
    done = as_ranks(workers, tmp_path, "--from", str(save(tmp_path / "two", 2)), *bucket, "--rollback", "host")
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
        (("--from", ".", "--watch", ".", "--to", "."), "--watch (which numbers versions itself)"),
        (("--watch", ".", "--version", "7", "--to", "."), "--watch (which numbers versions itself)"),
        (("--watch", "nowhere", "--to", "."), "--watch nowhere: there is no such directory"),
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


@pytest.mark.parametrize(("local", "device"), [({"LOCAL_RANK": "1"}, 1), ({}, 3)])
def test_a_rank_of_torchrun_takes_the_gpu_of_its_number_on_the_host(
    monkeypatch: pytest.MonkeyPatch, local: dict[str, str], device: int
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, timeout: None)
    monkeypatch.setattr(os, "environ", {"RANK": "3", **local})
    _join_group()
    assert taken == [device]


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    assert take_device(1) == torch.device("cuda", 1)
    assert taken == [1]
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own, 2 are visible; start at most one"):
        take_device(2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert take_device(0) is None, "buffers can be on the host then"
