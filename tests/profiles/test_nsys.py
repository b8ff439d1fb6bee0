"""Nsight Systems' exports, made after their documentation: the run again, by its schedule and every op's time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.profiles.nsys_files import NS, Work, of_megatron, of_pithtrain, of_torch, write_export
from tests.profiles.recorded import traced
from treadle.ir.ops import LaneKind
from treadle.ir.trace import Trace
from treadle.profiles.imported import Imported
from treadle.profiles.importing import import_profile
from treadle.profiles.readers.nsys import NsysReader


def exported(directory: Path, trace: Trace, works: Callable[[Trace, int], list[Work]]) -> list[Path]:
    """A file for each rank; their sessions began at different times."""
    return [
        write_export(directory / f"rank{rank}.sqlite", {70 + rank: works(trace, rank)}, shift=rank * 12_345)
        for rank in range(trace.program.num_ranks)
    ]


def check_times(imported: Imported, trace: Trace, num_steps: int = 1) -> None:
    program = trace.program
    computed = program.lane_kind[program.lane_of] == LaneKind.COMPUTE
    assert len(imported.steps.numbers) == num_steps
    for number in imported.steps.numbers:
        again = imported.steps.trace(number)
        for found, made in ((again.start, trace.start), (again.end, trace.end)):
            assert np.array_equal(found[computed], (made - trace.start.min())[computed] * (NS // trace.clock.ticks))


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", None), ("interleaved", 2), ("zb-h1", None), ("zb-v", None)])
def test_torchs_names_are_the_run_again(tmp_path: Path, name: str, vpp: int | None) -> None:
    schedule = treadle.generate(name, pp=4, microbatches=8, vpp=vpp)
    trace = traced(schedule)
    exported(tmp_path, trace, lambda trace, rank: list(of_torch(trace, rank, 2)))
    imported = import_profile([tmp_path])
    assert imported.schedule == schedule
    check_times(imported, trace, 2)
    assert "not tried on a recording of a real pipeline" in str(imported.remarks[0])


@pytest.mark.parametrize(("name", "vpp", "num_mb"), [("1f1b", None, 8), ("interleaved", 2, 8), ("interleaved", 3, 12)])
def test_megatrons_messages_tell_what_was_computed_between_them(
    tmp_path: Path, name: str, vpp: int | None, num_mb: int
) -> None:
    schedule = treadle.generate(name, pp=4, microbatches=num_mb, vpp=vpp)
    trace = traced(schedule)
    exported(tmp_path, trace, lambda trace, rank: list(of_megatron(trace, rank, 2)))
    imported = import_profile([tmp_path])
    assert imported.schedule == schedule
    check_times(imported, trace, 2)


def test_pithtrains_chunks_are_the_run_again(tmp_path: Path) -> None:
    schedule = treadle.generate("interleaved-overlap", pp=4, microbatches=8, vpp=2)
    trace = traced(schedule)
    assert trace.program.joined.any()
    imported = import_profile(exported(tmp_path, trace, lambda trace, rank: list(of_pithtrain(trace, rank))))
    assert imported.schedule == schedule
    check_times(imported, trace)
    assert any("'weight chunk' names no micro-batch" in str(remark) for remark in imported.remarks)


def test_processes_of_one_file_are_told_by_their_devices(tmp_path: Path) -> None:
    trace = traced(treadle.generate("1f1b", pp=2, microbatches=4))
    works = {80 + rank: list(of_torch(trace, rank)) for rank in (0, 1)}
    imported = import_profile([write_export(tmp_path / "node.sqlite", works)])
    check_times(imported, trace)
    assert any("taken to be their devices'" in str(remark) for remark in imported.remarks)


def test_ranges_without_kernels_have_the_hosts_times(tmp_path: Path) -> None:
    trace = traced(treadle.generate("1f1b", pp=2, microbatches=4))
    works = {80: list(of_torch(trace, 0))}
    recording = NsysReader().read([write_export(tmp_path / "rank0.sqlite", works, device=False)], lambda _: None)
    assert any("times are the host's" in str(remark) for remark in recording.remarks)
    assert recording.waits_inside
    assert len(recording.ranks[0]) == 8


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_rank_of_megatrons_is_refused(tmp_path: Path, missing: int) -> None:
    trace = traced(treadle.generate("1f1b", pp=4, microbatches=8))
    files = exported(tmp_path, trace, lambda trace, rank: list(of_megatron(trace, rank)))
    with pytest.raises(ValueError, match="give the files of all"):
        import_profile([file for rank, file in enumerate(files) if rank != missing])


def test_files_that_are_no_export_are_refused_with_the_way_out(tmp_path: Path) -> None:
    report = tmp_path / "rank0.nsys-rep"
    report.write_bytes(b"anything")
    with pytest.raises(ValueError, match="nsys export --type sqlite"):
        import_profile([report])
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE t (x INT)")
    with pytest.raises(ValueError, match="NVTX_EVENTS, and here end, globalTid, start is missing"):
        import_profile([other])
    empty = write_export(tmp_path / "rank1.sqlite", {5: []})
    with pytest.raises(ValueError, match="no range names the work of a pipeline"):
        import_profile([empty])
    whole = write_export(tmp_path / "rank2.sqlite", {5: [Work(f"PP:0F{mb}", ()) for mb in range(500)]})
    whole.write_bytes(whole.read_bytes()[:9000])
    with pytest.raises(ValueError, match=r"rank2.sqlite: cannot be read as a SQLite database"):
        import_profile([whole])
