"""The least of what host, control group and limit leave."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from treadle.host.free_memory import available_bytes, unused_bytes


def test_the_least_of_host_and_group_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    assert available_bytes(proc, cgroup) is None
    for directory in (proc, cgroup):
        directory.mkdir()
    (proc / "meminfo").write_text("MemTotal:       900 kB\nMemAvailable:   500 kB\n")
    assert available_bytes(proc, cgroup) == 500 * 1024
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("100000\n")
    assert available_bytes(proc, cgroup) == 500 * 1024
    (cgroup / "memory.max").write_text("300000\n")
    assert available_bytes(proc, cgroup) == 200_000
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 70000\n")
    assert available_bytes(proc, cgroup) == 270_000
    (cgroup / "memory.current").write_text("600000\n")
    assert available_bytes(proc, cgroup) == 0


def test_groups_around_count_of_either_version(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/pod/box\n0::/user.slice/a.service\n")
    assert unused_bytes(proc, cgroup) is None
    own, around = cgroup / "user.slice" / "a.service", cgroup / "user.slice"
    own.mkdir(parents=True)
    for group, most, now in ((own, "max", 1000), (around, "9000", 2000)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{now}\n")
    assert unused_bytes(proc, cgroup) == 7000
    (own / "memory.max").write_text("4000\n")
    assert unused_bytes(proc, cgroup) == 3000
    older = cgroup / "memory" / "pod"
    older.mkdir(parents=True)
    (older / "memory.limit_in_bytes").write_text("5000\n")
    (older / "memory.usage_in_bytes").write_text("4500\n")
    (older / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 200\n")
    assert unused_bytes(proc, cgroup) == 700


def test_the_limit_of_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("10 5 1 1 0 1 0\n")
    page = resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (50 * page, 50 * page))
    assert available_bytes(tmp_path, tmp_path) == 40 * page
