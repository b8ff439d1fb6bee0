"""Profiles that something happened to: each is refused, or what is odd is said; none is taken for the whole run."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.profiles.small_profiles import NUM_RANKS, NUM_STEPS, WRITERS, Event, changed, of_rank, run
from treadle.profiles.importing import import_profile

Spoil = Callable[[Path, str], None]


def said(directory: Path) -> str:
    """What is said about a profile, whether it is refused or not."""
    try:
        imported = import_profile([directory])
    except ValueError as error:
        return str(error)
    return "\n".join(map(str, imported.remarks))


def events(directory: Path, form: str, change: Callable[[Event], Iterable[Event]], rank: int = 2) -> None:
    """Write the run again, with the events of a rank changed."""
    WRITERS[form](directory, changed(run(), rank, change))


# -- ways to spoil a profile -------------------------------------------------------------------------------------------


def cut_file(directory: Path, form: str) -> None:
    path = of_rank(directory, 2)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def cut_compressed_file(directory: Path, form: str) -> None:
    path = of_rank(directory, 2)
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    path.with_name(f"{path.name}.gz").write_bytes(packed[: len(packed) * 2 // 3])


def missing_rank(directory: Path, form: str) -> None:
    of_rank(directory, 2).unlink()


def missing_last_rank(directory: Path, form: str) -> None:
    of_rank(directory, 3).unlink()


def clock_off_by_a_second(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [event._replace(start=event.start + 1e6, end=event.end + 1e6)])


def renamed_process_group(directory: Path, form: str) -> None:
    for path in directory.iterdir():
        path.write_text(path.read_text().replace("mesh_pp", "mesh_banana"))


def one_rank_of_one_step(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [event] if event.step == 0 else [])


def lost_microbatch(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [] if (event.mb, event.step) == (3, 1) else [event])


def lost_backward(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [] if (event.mb, event.step, event.kind) == (3, 1, "B") else [event])


def microbatch_lost_in_all_steps(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [] if event.mb == 3 else [event])


def rank_twice(directory: Path, form: str) -> None:
    path = of_rank(directory, 2)
    (directory / "copy").mkdir()
    shutil.copy(path, directory / "copy" / path.name)


def two_runs(directory: Path, form: str) -> None:
    (directory / "other").mkdir()
    WRITERS[form](directory / "other", run())


def two_forms(directory: Path, form: str) -> None:
    (directory / "other").mkdir()
    WRITERS["primus" if form != "primus" else "kineto"](directory / "other", run())


def rank_of_another_run(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [event] if event.mb < 4 else [])


def wrong_units(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [event._replace(start=event.start * 1000, end=event.end * 1000)])


def ends_before_it_starts(directory: Path, form: str) -> None:
    events(directory, form, lambda event: [event._replace(start=event.end, end=event.start)])


def empty_file(directory: Path, form: str) -> None:
    of_rank(directory, 2).write_bytes(b"")


def not_a_profile(directory: Path, form: str) -> None:
    of_rank(directory, 2).write_text("slurmstepd: error: *** JOB 4711 CANCELLED ***\n")


def other_json(directory: Path, form: str) -> None:
    of_rank(directory, 2).write_text(json.dumps({"lr": 0.001}))


def no_events(directory: Path, form: str) -> None:
    WRITERS[form](directory, [[] for _ in range(NUM_RANKS)])


def note_beside(directory: Path, form: str) -> None:
    (directory / "README.txt").write_text("step 7 was slow\n")


def ranks_swapped(directory: Path, form: str) -> None:
    ranks = run()
    WRITERS[form](directory, [ranks[0], ranks[2], ranks[1], ranks[3]])


def starts_within_a_step(directory: Path, form: str) -> None:
    begin = run()[0][5].start
    WRITERS[form](directory, [[event for event in rank if event.start >= begin] for rank in run()])


ANY = tuple(WRITERS)
TEXT = ("kineto", "ndtimeline", "primus")
SPOILS: dict[Spoil, tuple[tuple[str, ...], str]] = {
    cut_file: (ANY, r"rank_?2.*(cut off|malformed)"),
    cut_compressed_file: (TEXT, r"rank_?2.*cut off"),
    missing_rank: (ANY, r"missing profiles of pipeline rank 2|no file has a forward of stage 2"),
    missing_last_rank: (
        ANY,
        r"missing profiles of pipeline rank 3|first 3 of 4 ranks of 1f1b: files of the last ranks are missing",
    ),
    clock_off_by_a_second: (
        ANY,
        r"clocks were moved .* rank 2 by -1\.000 s|pp_rank_2\.json: step 1: ends 1290 ms after",
    ),
    renamed_process_group: (("kineto",), r"no process group is called that of a pipeline \(mesh_banana"),
    one_rank_of_one_step: (ANY, r"step [12] is left out: .*rank_?2.* has nothing of it"),
    lost_microbatch: (ANY, r"step [12] is left out: .*rank_?2.* has 14 cells"),
    lost_backward: (ANY, r"step [12] is left out: .*rank_?2.* has 15 cells"),
    microbatch_lost_in_all_steps: (ANY, r"rank 2 of the pipeline has no F[37]\.0.* lost a part of the step"),
    rank_twice: (ANY, r"are both of rank 2|: of rank 2, as|rank2.*recorded twice, and counts once"),
    two_runs: (ANY, r"are both of rank 0|: of rank 0, as|rank0.*recorded twice, and counts once|are of two runs"),
    two_forms: (ANY, r"files of different forms are not of one run"),
    rank_of_another_run: (ANY, r"rank 2 of the pipeline has no F4\.0"),
    wrong_units: (ANY, r"rank_?2.*(computes 1,000 times as long|units are mixed)"),
    ends_before_it_starts: (ANY, r"ends before it starts|none before it|contradict each other"),
    empty_file: (ANY, r"rank_?2.*: empty"),
    not_a_profile: (ANY, r"rank_?2.*not read: no profile"),
    other_json: (ANY, r"rank_?2.*not read: no profile"),
    no_events: (
        ANY,
        r"no op of a pipeline|no profile is there|no pp_rank_0|no range names|no event of a rank whose place",
    ),
    note_beside: (ANY, r"README\.txt: not read"),
    ranks_swapped: (ANY, r"the schedule as recorded does not verify"),
    starts_within_a_step: (ANY, r"step [01] is left out: .*rank_?0.* has 11 cells"),
}
"""Each way, the forms that it can happen to, and what is said then."""


@pytest.mark.parametrize("form", ANY)
def test_the_profiles_that_are_spoiled_here_are_whole(tmp_path: Path, form: str) -> None:
    WRITERS[form](tmp_path, run())
    imported = import_profile([tmp_path])
    assert imported.named
    assert imported.schedule.name == "1f1b"
    assert len(imported.steps.numbers) == NUM_STEPS
    text = said(tmp_path)
    for _, pattern in SPOILS.values():
        assert re.search(pattern, text) is None


@pytest.mark.parametrize(
    ("spoil", "form"),
    [
        pytest.param(spoil, form, id=f"{spoil.__name__}-{form}")
        for spoil, (forms, _) in SPOILS.items()
        for form in forms
    ],
)
def test_a_spoiled_profile_is_refused_or_reported_by_name(tmp_path: Path, spoil: Spoil, form: str) -> None:
    WRITERS[form](tmp_path, run())
    spoil(tmp_path, form)
    assert re.search(SPOILS[spoil][1], said(tmp_path)) is not None, said(tmp_path)


@pytest.mark.parametrize("bad", ["NaN", '"abc"', "Infinity", "null"])
@pytest.mark.parametrize(("form", "field"), [("kineto", "ts"), ("kineto", "dur"), ("ndtimeline", "ts")])
def test_times_that_are_no_numbers_are_refused_by_file_and_event(
    tmp_path: Path, form: str, field: str, bad: str
) -> None:
    WRITERS[form](tmp_path, run())
    path = of_rank(tmp_path, 2)
    text = path.read_text()
    times = list(re.finditer(rf'"{field}": *([^,}}]+)', text))
    found = times[len(times) // 2]
    path.write_text(text[: found.start(1)] + bad + text[found.end(1) :])
    value = {"NaN": "'?(nan|NaN)'?", "Infinity": "'?(inf|Infinity)'?", "null": "None", '"abc"': "'abc'"}[bad]
    with pytest.raises(ValueError, match=rf"rank_?2.*: event '.*{field} {value}.*microseconds, as finite numbers"):
        import_profile([tmp_path])
