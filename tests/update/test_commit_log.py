"""The commit log: one holder at a time, and directories that outlive a crash."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.support.ranks import check, run_ranks
from treadle.update.coordinator.commit_log import CommitLog, peek
from treadle.update.protocol.record import Member, Record


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


def test_the_number_of_an_attempt_is_on_disk_before_a_worker_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = CommitLog(tmp_path / "l")
    ledger.begin(0)
    synced: list[tuple[str, str]] = []

    def sync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced.append((path.name, path.read_text()))

    monkeypatch.setattr(os, "fsync", sync)
    assert ledger.begin(0) == 2
    assert synced == [("attempts", "2")]
    ledger.close()


def test_a_log_with_a_changed_byte_is_refused_whichever_it_is(tmp_path: Path) -> None:
    ledger = CommitLog(tmp_path / "l")
    ledger.begin(7, members=(Member(0, "slot", "incarnation", 123, "host"),))
    ledger.commit(71, 8)
    ledger.close()
    path = tmp_path / "l" / "ledger.json"
    written = path.read_bytes()
    assert b'"version":71,"epochs":[8]' in written
    for at in range(len(written)):
        for bit in (0, 1, 5):
            path.write_bytes(written[:at] + bytes([written[at] ^ (1 << bit)]) + written[at + 1 :])
            try:
                assert peek(tmp_path / "l") == ledger.record, path.read_bytes()  # as where a space became a tab
            except ValueError as error:
                assert "is not a ledger" in str(error)  # noqa: PT017
    path.write_bytes(written.replace(b"[8]", b"[9]"))
    with pytest.raises(ValueError, match=r"its digest is not that of its content.*newest copy back.*takeover=True"):
        CommitLog(tmp_path / "l")
    path.write_bytes(written)
    assert peek(tmp_path / "l") == ledger.record


def test_a_log_without_a_digest_is_read_and_gets_one_with_the_next_decision(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir(mode=0o700)
    path, before = tmp_path / "l" / "ledger.json", Record(3, (5,), "id")
    path.write_bytes(msgspec.json.encode(before))
    ledger = CommitLog(tmp_path / "l")
    assert ledger.record == before
    ledger.commit(4, ledger.begin(0))
    ledger.close()
    assert b'"digest":"' in path.read_bytes()
    assert peek(tmp_path / "l") == ledger.record == Record(4, (6,), "id")
