"""A rank that stops, at every cell of every schedule: no other rank is accused, and renamed files accuse none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stopped_dumps import cells_of, write_stopped
from treadle.passes.cells import lower_cells
from treadle.recorder import find_hang
from treadle.schedules import SCHEDULES, generate

QUICK = ("interleaved-overlap", "1f1b")


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCHEDULES]
)
def test_no_other_rank_is_accused(name: str, eager: bool, tmp_path: Path) -> None:
    vpp = 2 if name.startswith("interleaved") else None
    schedule = generate(name, pp=2, vpp=vpp, microbatches=4)
    program = lower_cells(schedule)
    for rank in range(schedule.pp):
        for place in range(len(cells_of(program, rank))):
            directory = tmp_path / f"{rank}-{place}"
            directory.mkdir()
            op = write_stopped(schedule, (rank, place), directory, eager=eager)
            (found,) = find_hang(directory, schedule).pipelines
            assert set(found.at_fault) <= {rank}, (rank, op, found.sentence)


def test_a_joined_pair_waits_for_the_inputs_of_both(tmp_path: Path) -> None:
    schedule = generate("interleaved-overlap", pp=3, vpp=2, microbatches=6)
    write_stopped(schedule, (1, 3), tmp_path, eager=True)
    (found,) = find_hang(tmp_path, schedule).pipelines
    assert (found.cause, found.at_fault) == ("stopped", (1,)), found.sentence


def test_renamed_files_accuse_nobody(tmp_path: Path) -> None:
    schedule = generate("1f1b", pp=4, microbatches=4)
    write_stopped(schedule, (2, 4), tmp_path)
    first, second = tmp_path / "trace_1", tmp_path / "trace_2"
    swapped = first.read_text(), second.read_text()
    first.write_text(swapped[1])
    second.write_text(swapped[0])
    with pytest.raises(ValueError, match="the dump of rank 1 of the pipeline has messages of rank 2"):
        find_hang(tmp_path, schedule)


def test_a_mistyped_schedule_accuses_nobody(tmp_path: Path) -> None:
    ran = generate("1f1b", pp=4, microbatches=4)
    write_stopped(ran, (2, 7), tmp_path)
    for mistyped in (generate("1f1b", pp=4, microbatches=8), generate("interleaved", pp=4, vpp=2, microbatches=4)):
        with pytest.raises(ValueError, match="no rank's fault: '--schedule 1f1b --pp 4 -m 4' explains"):
            find_hang(tmp_path, mistyped)
    assert find_hang(tmp_path, ran).pipelines[0].at_fault == (2,)
