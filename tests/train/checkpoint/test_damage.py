"""Damages of a saved checkpoint, one at a time: the checkpoint before it is taken, which is said, or it is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.cases import refusal
from tests.support.ranks import check, run_ranks
from tests.train.checkpoint.states import Box, make_pipe
from treadle.train.checkpoint import Checkpointer, complete_steps, on_disk

WORLD = 2
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json")
PAGE = 4096


class Pages(Box):
    """A box whose runs take several pages of a file."""

    def __init__(self, value: float, rank: int, world: int) -> None:
        super().__init__(value, rank, world)
        self.run, self._place = torch.full((5000,), value + rank), (rank * 5000, world * 5000)


@dataclass(frozen=True)
class Saved:
    """Steps 1 and 2 of a run, and of another one with other numbers."""

    run: Path
    other: Path


def save_both(rank: int, directory: Path) -> None:
    pipe = make_pipe(WORLD)
    for name, more in (("run", 0.0), ("other", 0.5)):
        checkpoints = Checkpointer(directory / name, pipe=pipe)
        for step in (1, 2):
            checkpoints.save(step, Pages(step + more, rank, WORLD), {"step": step + more})
        checkpoints.close()
    pipe.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("saved")
    check(run_ranks(WORLD, save_both, directory))
    run = directory / "run"
    assert complete_steps(run) == [1, 2]
    assert sorted(path.name for path in (run / "step-00000002").iterdir()) == sorted(FILES)
    return Saved(run, directory / "other")


def flipped(path: Path, _other: Saved) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zeroed(path: Path, _other: Saved) -> None:
    content = bytearray(path.read_bytes())
    first = max(0, len(content) // 2 - PAGE)
    content[first : first + PAGE] = bytes(len(content[first : first + PAGE]))
    path.write_bytes(content)


def cut_off(path: Path, _other: Saved) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path, _other: Saved) -> None:
    path.write_bytes(b"")


def longer(path: Path, _other: Saved) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def removed(path: Path, _other: Saved) -> None:
    path.unlink()


def a_directory(path: Path, _other: Saved) -> None:
    path.unlink()
    path.mkdir()


def of_another_run(path: Path, saved: Saved) -> None:
    shutil.copy(saved.other / "step-00000002" / path.name, path)


def of_another_step(path: Path, saved: Saved) -> None:
    shutil.copy(saved.run / "step-00000001" / path.name, path)


HARMS = (flipped, zeroed, cut_off, emptied, longer, removed, a_directory, of_another_run, of_another_step)


def the_step_before_under_this_name(step: Path, saved: Saved) -> None:
    shutil.rmtree(step)
    shutil.copytree(saved.run / "step-00000001", step)


def no_file_at_all(step: Path, _saved: Saved) -> None:
    shutil.rmtree(step)
    step.mkdir()


def one_rank_of_a_second_writer(step: Path, saved: Saved) -> None:
    """Two runs that wrote at once: one rank's data of the other run, and its manifest and metadata."""
    for name in ("__1_0.distcp", ".metadata", "manifest.json"):
        shutil.copy(saved.other / "step-00000002" / name, step / name)


def no_digests(step: Path, _saved: Saved) -> None:
    """As earlier versions wrote it."""
    sizes = {path.name: path.stat().st_size for path in step.iterdir() if path.name != "manifest.json"}
    (step / "manifest.json").write_text(json.dumps({"files": sizes, "extra": {"step": 2}}))


WHOLE = {
    the_step_before_under_this_name: "manifest.json is of step 1",
    no_file_at_all: "manifest.json: No such file",
    one_rank_of_a_second_writer: "__0_0.distcp has other bytes than were written",
}

Outcome = tuple[int | str | None, float, list[str], str]
"""What `latest` returned or raised, the number that was loaded, what was said, and how `load` of step 2 is refused."""


def resume_all(rank: int, directories: list[Path]) -> list[Outcome]:
    pipe = make_pipe(WORLD)
    found = []
    for directory in directories:
        said: list[str] = []
        checkpoints, pages = Checkpointer(directory, pipe=pipe, say=said.append), Pages(0.0, rank, WORLD)
        latest: int | str | None
        try:
            latest = checkpoints.latest()
        except ValueError as error:
            latest = str(error)
        refused = refusal(lambda: checkpoints.load(2, pages)) if latest != 2 else ""  # noqa: B023
        assert pages.holds(0.0, rank), "what was refused has changed nothing"
        if isinstance(latest, int):
            assert checkpoints.load(latest, pages) == {"step": pages.whole[0, 0].item()}
            assert pages.holds(pages.whole[0, 0].item(), rank), "one number on all ranks and in all pages"
        found.append((latest, pages.whole[0, 0].item(), said, refused))
        checkpoints.close()
    pipe.close()
    return found


@pytest.mark.slow
def test_a_damaged_checkpoint_is_never_loaded(saved: Saved, tmp_path: Path) -> None:
    cases: dict[tuple[str, ...], str] = {}

    def add(case: tuple[str, ...], named: str) -> Path:
        shutil.copytree(saved.run, tmp_path / str(len(cases)))
        cases[case] = named
        return tmp_path / str(len(cases) - 1)

    for name in FILES:
        for harm in HARMS:
            swapped = (name, harm) == ("manifest.json", of_another_run)
            named = ".metadata" if swapped else name  # that manifest is whole, and the files are not its own
            harm(add((name, harm.__name__), named) / "step-00000002" / name, saved)
    for whole, named in WHOLE.items():
        whole(add((whole.__name__,), named) / "step-00000002", saved)
    every = add(("every step",), "step 1")
    for step in (1, 2):
        flipped(every / f"step-0000000{step}" / "__1_0.distcp", saved)
    restored = add(("another run's backup, whole",), "")
    shutil.rmtree(restored / "step-00000002")
    shutil.copytree(saved.other / "step-00000002", restored / "step-00000002")

    no_digests(add(("no digests",), "") / "step-00000002", saved)

    first, second = check(run_ranks(WORLD, resume_all, [tmp_path / str(number) for number in range(len(cases))]))
    for (case, named), (latest, value, said, refused), (same, same_value, unsaid, _) in zip(
        cases.items(), first, second, strict=True
    ):
        assert (same, same_value, unsaid) == (latest, value, []), case
        if case == ("another run's backup, whole",):
            assert (latest, value, said) == (2, 2.5, []), "it is what that run wrote"
        elif case == ("no digests",):
            assert (latest, value) == (2, 2.0)
            assert "has no digests, as an earlier version of Treadle wrote it" in said[0]
        elif case == ("every step",):
            assert isinstance(latest, str), case
            assert "is intact" in latest
            assert all(f"step {step} in " in latest for step in (1, 2))
            assert latest.count("__1_0.distcp has other bytes than were written") == 2
            assert value == 0.0
        else:
            assert (latest, value) == (1, 1.0), (case, latest)
            (line,) = said
            assert "the checkpoint of step 2 in " in line
            assert named in line, case
            assert line.endswith("; the checkpoint before it is taken")
            assert "\n" not in line
            assert "step-00000002 is not loaded: " in refused
            assert named in refused


@pytest.mark.slow
def test_a_bit_of_a_manifest_changes_it_or_nothing(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved.run / "step-00000002", tmp_path / "step-00000002")
    path, manifest = tmp_path / "step-00000002" / on_disk.MANIFEST, on_disk.read_manifest(tmp_path, 2)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert on_disk.read_manifest(tmp_path, 2) == manifest, bit
        except on_disk.DamagedError:
            continue


def test_digests_are_those_of_the_files(saved: Saved) -> None:
    manifest = on_disk.read_manifest(saved.run, 2)
    assert set(manifest.files) == set(FILES) - {on_disk.MANIFEST}
    for name, facts in manifest.files.items():
        assert facts == on_disk.FileFacts.of(saved.run / "step-00000002" / name)
