"""The commit log: one holder at a time, and directories that outlive a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.ranks import check, run_ranks
from treadle.update.coordinator.commit_log import CommitLog


def hold(rank: int, path: Path) -> str:
    try:
        CommitLog(path).close()
    except BlockingIOError as error:
        return str(error)
    return "held"


def test_one_coordinator_holds_the_ledger_in_one_process_too(tmp_path: Path) -> None:
    held = CommitLog(tmp_path / "l")
    (tmp_path / "a").symlink_to(tmp_path)
    for path in (tmp_path / "l", tmp_path / "a" / "l"):
        with pytest.raises(BlockingIOError, match="another coordinator holds"):
            CommitLog(path)
    (told,) = check(run_ranks(1, hold, tmp_path / "l"))
    assert "another coordinator holds" in told, "a second try released it"
    held.close()
    held.close()
    again = CommitLog(tmp_path / "l")
    held.close()
    with pytest.raises(BlockingIOError):
        CommitLog(tmp_path / "l")
    again.close()


def test_a_new_ledger_has_its_directories_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    ledger = CommitLog(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}
    ledger.close()
    synced.clear()
    CommitLog(tmp_path / "a" / "b").close()
    assert synced == []
