"""A checkpoint's `.metadata` is a pickle: what it would run is not run, and is refused by name."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from tests.support.cases import refusal
from tests.support.ranks import check, run_ranks
from tests.train.checkpoint.states import Box, make_pipe
from treadle.fields.plain_pickle import UnreadablePickleError, load_plain
from treadle.train.checkpoint import Checkpointer, on_disk
from treadle.train.checkpoint.metadata_reader import KNOWN, CheckpointReader
from treadle.train.checkpoint.saved_weights import read_weights

WORLD = 2


def save(rank: int, directory: Path) -> None:
    checkpoints = Checkpointer(directory, pipe=make_pipe(WORLD))
    checkpoints.save(1, Box(1.0, rank, WORLD))
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    check(run_ranks(WORLD, save, directory))
    return directory / "step-00000001"


class Runs:
    """It makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@dataclass
class Called:
    """A known name with arguments of the file's choice."""

    called: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return self.called, self.arguments


def test_what_torch_wrote_is_read_as_torch_reads_it(saved: Path) -> None:
    read, torchs = CheckpointReader(saved).read_metadata(), FileSystemReader(saved).read_metadata()
    assert read.state_dict_metadata == torchs.state_dict_metadata
    assert read.storage_data == torchs.storage_data
    assert len(read.storage_data) > 1


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_every_type_are_read(protocol: int, saved: Path) -> None:
    whole = FileSystemReader(saved).read_metadata()
    whole.planner_data = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
    assert load_plain(pickle.dumps(whole, protocol), KNOWN) == whole


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_a_command_does_not(protocol: int, saved: Path, tmp_path: Path) -> None:
    whole = FileSystemReader(saved).read_metadata()
    whole.planner_data = Runs(tmp_path / "made")
    with pytest.raises(UnreadablePickleError, match=r"it imports 'posix\.mkdir'"):
        load_plain(pickle.dumps(whole, protocol), KNOWN)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (pickle.dumps(Called(torch.Size, ("no sizes",))), "Size refuses its arguments"),
        (b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}b.", "sets attributes of something else"),
        (b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81K\x01b.", "Metadata refuses its attributes"),
        (b"\x80\x02ctorch\nfloat32\n)\x81.", "makes an object of something else"),
        (b"\x80\x02ctorch\nSize\n)\x81.", "Size is not made so"),
        (b"\x80\x02K\x01)R.", "calls something else"),
        (b"\x80\x02ctorch\n", "ends too early"),
    ],
)
def test_known_names_do_only_what_they_are_known_for(pickled: bytes, said: str) -> None:
    with pytest.raises(UnreadablePickleError, match=said):
        load_plain(pickled, KNOWN)


def resume(rank: int, directory: Path) -> str:
    pipe = make_pipe(WORLD)
    checkpoints, box = Checkpointer(directory, pipe=pipe), Box(0.0, rank, WORLD)
    refused = refusal(lambda: checkpoints.load(1, box))
    assert box.holds(0.0, rank)
    checkpoints.close()
    pipe.close()
    return refused


def test_a_checkpoint_with_a_foreign_name_is_refused_by_resumes_and_by_updates(saved: Path, tmp_path: Path) -> None:
    """Its manifest fits, as whoever can change one file can change the other."""
    forged = tmp_path / saved.name
    shutil.copytree(saved, forged)
    manifest = on_disk.read_manifest(tmp_path, 1)
    (forged / on_disk.METADATA).write_bytes(pickle.dumps(Metadata({}, Runs(tmp_path / "made"))))
    facts = {**manifest.files, on_disk.METADATA: on_disk.FileFacts.of(forged / on_disk.METADATA)}
    (forged / on_disk.MANIFEST).write_bytes(replace(manifest, files=facts).to_bytes())
    with pytest.raises(ValueError, match=r"step-00000001 is not read: its \.metadata is refused: .*posix\.mkdir"):
        read_weights(forged, 0, 1)
    for refused in check(run_ranks(WORLD, resume, tmp_path)):
        assert "step-00000001 is not loaded: its .metadata cannot be read here" in refused
        assert "posix.mkdir" in refused
    assert not (tmp_path / "made").exists()
