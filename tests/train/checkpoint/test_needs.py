"""What a checkpoint has against what a run needs, and a directory's checkpoints, without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treadle.train.checkpoint import TensorPart, complete_steps, on_disk
from treadle.train.checkpoint.checkpoint_needs import unmet, unneeded


def test_what_is_missing_is_named_with_the_nearest_there_is() -> None:
    need = {name: TensorPart.whole(torch.zeros(2)) for name in ("a.weight", "b.weight", "c.weight", "d.weight", "e")}
    have = {"a.wait": "[2] float32"}
    assert unmet(have, need) == ("it has no a.weight, b.weight, c.weight and 2 more; the nearest it has is a.wait")
    assert unneeded(have, need) == "it has a.wait, which no rank of this run has"


def test_another_shape_or_type_is_named() -> None:
    need = {"a": TensorPart.run(torch.zeros(2), first=1, size=5)}
    assert unmet({"a": "[5] float32"}, need) is None
    assert unmet({"a": "[6] float32"}, need) == "it has a as [6] float32, needed as [5] float32"
    assert unmet({"a": "[5] bfloat16"}, need) == "it has a as [5] bfloat16, needed as [5] float32"


def write(directory: Path, step: int, content: bytes) -> None:
    partial = directory / f"step-{step:08d}.partial"
    partial.mkdir(parents=True)
    (partial / ".metadata").write_bytes(content)
    on_disk.publish(partial, {}, {"step": step})


def test_a_published_checkpoint_replaces_one_of_its_step_and_old_ones_go(tmp_path: Path) -> None:
    for step in (3, 1, 20, 123456789):
        write(tmp_path, step, b"old")
    write(tmp_path, 20, b"newer")
    (tmp_path / "step-00000002").mkdir()  # damaged, and older than what is kept
    (tmp_path / "step-00000021.partial").mkdir()
    (tmp_path / "step-final").mkdir()
    assert complete_steps(tmp_path) == [1, 3, 20, 123456789]
    assert (tmp_path / "step-00000020" / ".metadata").read_bytes() == b"newer"
    assert on_disk.keep_newest(tmp_path, 123456789, 2) == []
    assert complete_steps(tmp_path) == on_disk.found_steps(tmp_path) == [20, 123456789]
    on_disk.remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-123456789", "step-final"]


def test_later_steps_of_another_run_are_set_aside_and_the_newest_save_stays(tmp_path: Path) -> None:
    for step in (8, 10, 2):
        write(tmp_path, step, b"")
    assert on_disk.keep_newest(tmp_path, 2, 1) == [8, 10]
    assert complete_steps(tmp_path) == [2]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000002", "step-00000008.aside", "step-00000010.aside"]


def test_a_file_that_another_rank_wrote_and_nobody_sees_is_not_published(tmp_path: Path) -> None:
    partial = tmp_path / "step-00000002.partial"
    partial.mkdir()
    (partial / ".metadata").touch()
    with pytest.raises(ValueError, match=r"__1_0.distcp, which other ranks .* not shared between nodes; give --checkp"):
        on_disk.publish(partial, {"__1_0.distcp": on_disk.FileFacts(0, "")}, {})
    assert on_disk.found_steps(tmp_path) == []


def test_a_manifest_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    path.mkdir()
    for content in ("", "[1]", "{}", '{"files": {}, "extra": {}}', '{"form": 3, "xxh3_128": "0"}'):
        (path / on_disk.MANIFEST).write_text(content)
        with pytest.raises(on_disk.DamagedError, match=r"manifest\.json "):
            on_disk.read_manifest(tmp_path, 1)
        assert complete_steps(tmp_path) == []
        assert on_disk.found_steps(tmp_path) == [1]
