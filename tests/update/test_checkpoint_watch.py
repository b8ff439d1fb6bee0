"""Which checkpoints of a directory are loaded, and when: whole ones, in order, each once."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from treadle.update.checkpoint_watch import LEAST_WAIT_S, LONGEST_WAIT_S, CheckpointWatch
from treadle.update.rank.checkpoint import described, unfinished


@dataclass
class Watched:
    """A directory under watch, a clock that a test moves, and what was said."""

    directory: Path
    now_s: float = 0.0
    committed: int = 0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = CheckpointWatch(self.directory, unfinished, self.said.append, lambda: self.now_s)

    def next(self) -> int | None:
        """The version of the next checkpoint, which is committed with that."""
        found = self.watch.look(self.committed)
        if found is None:
            return None
        self.committed = found.version
        return found.version

    def looks(self, num: int = 6) -> list[int]:
        return [version for version in (self.next() for _ in range(num)) if version is not None]


def save(path: Path, parts: int = 1, value: float = 1.0) -> Path:
    """A checkpoint as Hugging Face's libraries write it: parts, and then the index."""
    path.mkdir(exist_ok=True)
    tensors = {f"w{part}": torch.full((8, 4), value) for part in range(parts)}
    if parts == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    named = {name: f"model-{part + 1:05}-of-{parts:05}.safetensors" for part, name in enumerate(tensors)}
    for name, file in named.items():
        save_file({name: tensors[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return path


def test_each_new_one_once_in_the_order_of_numbers(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.looks() == []
    for number in (10, 9, 100):
        save(tmp_path / f"checkpoint-{number}", parts=number % 2 + 1)
    assert watched.looks() == [9, 10, 100]
    save(tmp_path / "checkpoint-50")  # 100 is committed
    save(tmp_path / "step101")
    assert watched.looks() == [101]


def test_of_those_before_the_newest_whole_one(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        save(tmp_path / f"checkpoint-{number}")
    torn = save(tmp_path / "checkpoint-5") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    watched = Watched(tmp_path, committed=1)
    assert watched.looks() == [4]
    save(tmp_path / "checkpoint-5")  # in its place
    assert watched.looks() == [5]
    assert len(watched.said) == 1
    assert "checkpoint-5 is not loaded: model.safetensors has" in watched.said[0]


def test_half_a_checkpoint_is_not_read(tmp_path: Path) -> None:
    """Every state that a writer passes through, byte by byte in the header, and file by file."""
    whole = save(tmp_path / "whole", parts=3)
    watched = Watched(tmp_path / "seen")
    at = tmp_path / "seen" / "checkpoint-7"
    at.mkdir(parents=True)
    for file in [*sorted(whole.glob("*.safetensors")), whole / "model.safetensors.index.json"]:
        content = file.read_bytes()
        for size in (0, 4, 8, 20, len(content) // 2, len(content) - 1):
            (at / file.name).write_bytes(content[:size])
            assert watched.looks(3) == [], (file.name, size)
        (at / file.name).write_bytes(content)
        assert watched.looks(3) == ([7] if file.suffix == ".json" else [])
    assert described(at).keys() == described(whole).keys()


def test_an_index_before_its_files_is_waited_with(tmp_path: Path) -> None:
    watched, path = Watched(tmp_path), save(tmp_path / "checkpoint-3", parts=2)
    part = path / "model-00002-of-00002.safetensors"
    content = part.read_bytes()
    part.unlink()
    assert watched.looks() == []
    assert watched.said == [
        "checkpoint-3 is not loaded: model.safetensors.index.json names model-00002-of-00002.safetensors, "
        "which is not there"
    ]
    part.write_bytes(content)
    assert watched.looks() == [3]


def test_a_directory_that_still_changes_is_waited_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    for value in range(4):
        save(tmp_path / "checkpoint-1", value=value)
        assert watched.next() is None, "no two looks were the same"
    assert watched.next() == 1


@pytest.mark.parametrize("name", ["checkpoint", "step-00000003.partial", ".7", "tmp-checkpoint-7", "checkpoint-0"])
def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path, name: str) -> None:
    watched = Watched(tmp_path)
    save(tmp_path / name)
    (tmp_path / "8").touch()
    assert watched.looks() == []
    assert watched.said == []


def test_one_that_was_not_committed_comes_again_later_or_is_passed_over(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.looks()
    save(tmp_path / "checkpoint-1")
    waits = []
    for _ in range(8):
        watched.watch.look(0)
        found = watched.watch.look(0)
        assert found is not None
        waits.append(watched.watch.failed(found))
        assert watched.watch.look(0) is None
        watched.now_s += waits[-1]
    assert waits == [min(LEAST_WAIT_S * 2**turn, LONGEST_WAIT_S) for turn in range(8)]
    watched.now_s -= 1
    save(tmp_path / "checkpoint-2")
    assert watched.looks() == [2]
    watched.now_s += 1000
    assert watched.looks() == []


def test_two_with_one_number_and_a_directory_that_goes(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert watched.looks() == []
    save(tmp_path / "run" / "a-1")
    save(tmp_path / "run" / "b-1")
    assert watched.looks() == [1]
    shutil.rmtree(tmp_path / "run")
    assert watched.looks() == []
    assert watched.said == [
        "b-1 is not loaded: it has the number of a-1, which counts; rename one of them",
        "run is not loaded: No such file or directory; it is looked for again",
    ]
