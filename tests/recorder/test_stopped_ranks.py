"""A rank that stops, at every cell of every schedule: no other rank is accused, and renamed files accuse none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stopped_dumps import SIZES, Stop, stops, verdict, write_stopped
from treadle.recorder import find_hang
from treadle.schedules import SCHEDULES, generate

QUICK = ("interleaved-overlap", "1f1b")
NIGHTLY = [
    pytest.param(name, size, id=f"{name}-{size[0]}-{size[2]}", marks=pytest.mark.nightly)
    for name, sizes in SIZES.items()
    for size in sizes
]


def _accused(name: str, size: tuple[int, int | None, int], directory: Path) -> dict[Stop, str]:
    """The stops of which another rank is accused, with what is said."""
    pp, vpp, num_mb = size
    schedule = generate(name, pp=pp, vpp=vpp, microbatches=num_mb)
    found = {stop: verdict(schedule, stop, directory) for stop in stops(schedule)}
    assert sum(verdict == "right" for verdict, _ in found.values()) > 0.75 * len(found)
    return {stop: sentence for stop, (verdict, sentence) in found.items() if verdict == "wrong"}


def test_all_schedules_are_stopped() -> None:
    assert set(SIZES) == set(SCHEDULES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCHEDULES]
)
def test_no_other_rank_is_accused(name: str, tmp_path: Path) -> None:
    assert not _accused(name, SIZES[name][1], tmp_path)


@pytest.mark.parametrize(("name", "size"), NIGHTLY)
def test_no_other_rank_is_accused_at_any_size(name: str, size: tuple[int, int | None, int], tmp_path: Path) -> None:
    assert not _accused(name, size, tmp_path)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("name", "rank", "place"), [("zb-v", 1, 11), ("zb-v", 2, 8), ("dualpipev", 2, 8)])
def test_receives_that_cross_accuse_nobody(name: str, rank: int, place: int, eager: bool, tmp_path: Path) -> None:
    """Receives in the order of use are crossed with the sends of these: what was received is not what was sent."""
    schedule = generate(name, pp=4, microbatches=8)
    found, sentence = verdict(schedule, Stop(rank, place, "use", eager), tmp_path)
    assert found == "right", sentence
    remarks = find_hang(tmp_path, schedule).remarks
    assert any("messages are crossed" in remark for remark in remarks)


def test_a_joined_pair_waits_for_the_inputs_of_both(tmp_path: Path) -> None:
    schedule = generate("interleaved-overlap", pp=3, vpp=2, microbatches=6)
    write_stopped(schedule, Stop(1, 3, eager=True), tmp_path)
    (found,) = find_hang(tmp_path, schedule).pipelines
    assert (found.cause, found.at_fault) == ("stopped", (1,)), found.sentence


def test_renamed_files_accuse_nobody(tmp_path: Path) -> None:
    schedule = generate("1f1b", pp=4, microbatches=4)
    write_stopped(schedule, Stop(2, 4), tmp_path)
    first, second = tmp_path / "trace_1", tmp_path / "trace_2"
    swapped = first.read_text(), second.read_text()
    first.write_text(swapped[1])
    second.write_text(swapped[0])
    with pytest.raises(ValueError, match="the dump of rank 1 of the pipeline has messages of rank 2"):
        find_hang(tmp_path, schedule)


def test_a_mistyped_schedule_accuses_nobody(tmp_path: Path) -> None:
    ran = generate("1f1b", pp=4, microbatches=4)
    write_stopped(ran, Stop(2, 7), tmp_path)
    for mistyped in (generate("1f1b", pp=4, microbatches=8), generate("interleaved", pp=4, vpp=2, microbatches=4)):
        with pytest.raises(ValueError, match="no rank's fault: '--schedule 1f1b --pp 4 -m 4' explains"):
            find_hang(tmp_path, mistyped)
    assert find_hang(tmp_path, ran).pipelines[0].at_fault == (2,)


def test_a_run_without_dumps_is_shown_a_way(tmp_path: Path) -> None:
    schedule = generate("1f1b", pp=2, microbatches=4)
    with pytest.raises(ValueError, match=r"TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_DUMP_TEMP_FILE; .*py-spy dump"):
        find_hang(tmp_path, schedule)
    write_stopped(schedule, Stop(0, 0), tmp_path)
    for path in tmp_path.iterdir():
        path.write_text(
            path.read_text().replace("nccl:send", "gloo:all_reduce").replace("nccl:recv", "gloo:all_reduce")
        )
    with pytest.raises(ValueError, match=r"no sends and receives; .*py-spy dump"):
        find_hang(tmp_path, schedule)
