"""The commit log: one holder at a time, and directories that outlive a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.update.coordinator.commit_log import CommitLog

HOLD = """
import sys
from pathlib import Path
from treadle.update.coordinator.commit_log import CommitLog
CommitLog(Path(sys.argv[1]))
"""


def test_one_coordinator_holds_the_ledger_in_one_process_too(tmp_path: Path) -> None:
    held = CommitLog(tmp_path / "l")
    (tmp_path / "a").symlink_to(tmp_path)
    for path in (tmp_path / "l", tmp_path / "a" / "l"):
        with pytest.raises(BlockingIOError, match="another coordinator holds"):
            CommitLog(path)
    other = subprocess.run([sys.executable, "-c", HOLD, tmp_path / "l"], capture_output=True, text=True, check=False)
    assert "another coordinator holds" in other.stderr, "a second try released it"
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
