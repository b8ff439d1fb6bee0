"""The forms of a schedule: round trips, what is refused and where, and torch's own loader."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import treadle
from tests.support.paths import GOLDEN
from treadle.files import FORMATS, format_of, json_form, parse_any, torch_csv
from treadle.ir import Action, B, Cell, Channel, F, I, Kind, Pair, Placement, Row, Schedule, W, text
from treadle.ir.text import ParseError
from treadle.ir.turn import CELL, Turn
from treadle.schedules import SCHEDULES, generate

SIZES = [
    (1, 1, 2),
    (1, 2, 3),
    (2, 1, 4),
    (2, 2, 4),
    (2, 3, 2),
    (3, 2, 7),
    (4, 1, 3),
    (4, 2, 10),
    (6, 2, 12),
    (8, 2, 20),
]


def examples() -> Iterator[Schedule]:
    """Every schedule at every size above that it can do."""
    for name in SCHEDULES:
        for pp, vpp, num_mb in SIZES:
            try:
                yield generate(name, pp=pp, vpp=vpp, microbatches=num_mb)
            except ValueError:
                continue


EXAMPLES = list(examples())
ONE_PIPE = [schedule for schedule in EXAMPLES if schedule.placement.num_pipes == 1]


def size_id(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.pp}-{schedule.vpp}-{schedule.num_microbatches}"


def custom(schedule: Schedule) -> Schedule:
    """What the CSV keeps: not the name; nor the placement's, where one table has two (v and loop on a rank)."""
    return replace(schedule, name="custom", placement=Placement.table(schedule.placement.stages))


def test_every_schedule_has_several_sizes() -> None:
    for name in SCHEDULES:
        assert sum(schedule.name == name for schedule in EXAMPLES) >= 3, name


# Round trips


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("schedule", EXAMPLES, ids=size_id)
def test_round_trip(schedule: Schedule, form: str) -> None:
    content = FORMATS[form].dump(schedule)
    assert FORMATS[form].parse(content, "a file") == schedule
    assert format_of(content) == form


@pytest.mark.parametrize("schedule", ONE_PIPE, ids=size_id)
def test_torch_csv_round_trip(schedule: Schedule) -> None:
    content = torch_csv.dump(schedule)
    assert torch_csv.parse(content) == custom(schedule)
    assert schedule.pp == 1 or custom(schedule).placement == schedule.placement
    assert format_of(content) == "torch-csv"


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    pp, vpp = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(pp * vpp)))
    table = tuple(tuple(order[rank * vpp : (rank + 1) * vpp]) for rank in range(pp))
    return draw(
        st.sampled_from(
            [
                Placement.loop(pp, vpp),
                Placement.v(pp, vpp),
                Placement.bidirectional(pp),
                Placement.table(table),
            ]
        )
    )


def actions(*kinds: Kind) -> st.SearchStrategy[Action]:
    return st.builds(Action, st.sampled_from(kinds), st.integers(0, 10**6 - 1), st.integers(0, 12))


def rows(pp: int) -> st.SearchStrategy[tuple[Row, ...]]:
    cells: st.SearchStrategy[Cell] = st.one_of(actions(*Kind), st.builds(Pair, actions(Kind.F), actions(Kind.B)))
    row = st.lists(cells, max_size=8).map(tuple)
    return st.lists(row, min_size=pp, max_size=pp).map(tuple)


def receives(pp: int) -> st.SearchStrategy[dict[Channel, tuple[Action, ...]]]:
    channels = [(src, dst) for src in range(pp) for dst in range(pp) if src != dst]
    if not channels:
        return st.just({})
    labels = st.lists(actions(Kind.F, Kind.B), max_size=5).map(tuple)
    return st.dictionaries(st.sampled_from(channels), labels, max_size=4)


@st.composite
def issues(draw: st.DrawFn, rows: tuple[Row, ...]) -> tuple[tuple[Turn, ...], ...]:
    """An order of issue of these rows; its messages are any."""
    if len(rows) == 1 or draw(st.booleans()):
        return ()
    found = []
    for rank, row in enumerate(rows):
        peer = st.sampled_from([peer for peer in range(len(rows)) if peer != rank])
        messages = st.builds(lambda *turn: Turn(*turn), st.sampled_from("><"), peer, st.booleans())
        waits = st.builds(lambda to, place: Turn("wait>", to, place=place), peer, st.integers(0, 9))
        turns = draw(st.lists(st.one_of(messages, waits), max_size=5))
        for _ in row:
            turns.insert(draw(st.integers(0, len(turns))), CELL)
        found.append((turns[0]._replace(joined=False), *turns[1:]) if turns else ())
    return tuple(found)


NAMES = st.text(max_size=12).filter(str.isprintable)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Anything that can be written down, sound or not."""
    placement = draw(placements())
    num_mb = draw(st.integers(1, 10**5)) * placement.num_pipes
    pp = placement.pp
    cells = draw(rows(pp))
    return Schedule(draw(NAMES), placement, num_mb, cells, draw(receives(pp)), draw(issues(cells)))


@pytest.mark.slow
@given(schedules())
@example(Schedule("a name: mine:", Placement.loop(1), 1, ((),)))
@example(Schedule("", Placement.loop(2), 1, ((), ()), {(0, 1): ()}))
def test_text_round_trip_of_anything(schedule: Schedule) -> None:
    assert text.parse(text.dump(schedule)) == schedule
    assert parse_any(text.dump(schedule)) == schedule


@pytest.mark.slow
@given(schedules(), st.sampled_from(["", "rank", "rank ", "Rank "]))
def test_text_without_chunks_is_read_exactly_if_there_is_one(schedule: Schedule, rank: str) -> None:
    lines = text.dump(replace(schedule, name="x")).splitlines(True)
    short = "".join(re.sub(r"([FBIW][0-9]+)\.0\b", r"\1", line if line[0] == "#" else rank + line) for line in lines)
    actions = [a for row in schedule.rows for cell in row for a in cell.actions]
    chunks = max([schedule.vpp, *(a.chunk + 1 for a in actions)])
    left_out = any(a.chunk == 0 for a in [*actions, *(a for row in schedule.receives.values() for a in row)])
    if chunks == 1 or not left_out:
        assert parse_any(short) == replace(schedule, name="x")
    else:
        with pytest.raises(ParseError, match="has no chunk"):
            parse_any(short)


@given(schedules())
def test_json_round_trip_of_anything(schedule: Schedule) -> None:
    assert json_form.parse(json_form.dump(schedule)) == schedule
    assert parse_any(json_form.dump(schedule)) == schedule


@given(st.data())
def test_torch_csv_round_trip_of_anything_it_can_carry(data: st.DataObject) -> None:
    """Any cells, sound or not, that show every stage of one pipe and the last micro-batch."""
    placement = data.draw(placements().filter(lambda p: p.num_pipes == 1))
    stages = tuple(tuple(sorted(row)) for row in placement.stages)
    num_mb = data.draw(st.integers(1, 4))
    cells = st.builds(Action, st.sampled_from(Kind), st.integers(0, num_mb - 1), st.integers(0, placement.vpp - 1))
    last = tuple(F(num_mb - 1, chunk) for chunk in range(placement.vpp))
    filled = tuple(tuple(data.draw(st.lists(cells, max_size=6))) + last for _ in stages)
    schedule = Schedule("custom", Placement.table(stages), num_mb, filled)
    assert torch_csv.parse(torch_csv.dump(schedule)) == schedule


def test_digits_are_those_that_are_printed() -> None:
    """Python's int() takes the digits of all scripts."""
    for content in ("0: F1\u0663.0\n", "0F1\u0663\n"):
        with pytest.raises(ParseError):
            parse_any(content)


# torch's CSV: what is written


def test_torch_csv_is_what_torch_writes() -> None:
    assert torch_csv.dump(generate("1f1b", pp=2, microbatches=2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    first = torch_csv.dump(generate("dualpipev", pp=2, microbatches=4)).splitlines()[0]
    assert first.startswith("0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,")


def two_ranks(*rows: Row, num_mb: int = 1, **more: Any) -> Schedule:
    return Schedule("mine", Placement.loop(2), num_mb, rows, **more)


SOUND = ((F(0), B(0)), (F(0), B(0)))

LOSSES = [
    (generate("dualpipe", pp=2, microbatches=4), "the second direction of a bidirectional placement"),
    (generate("dualpipe", pp=2, microbatches=4), "generate dualpipev instead, or use `format='text'`"),
    (
        two_ranks(*SOUND, receives={(1, 0): (B(0),), (0, 1): (F(0),)}),
        "receives given for 0>1, 1>0 would be lost",
    ),
    (two_ranks(*SOUND, num_mb=3), "would make 3 of them 1"),
    (two_ranks((F(0), F(1)), (F(0),)), "would make 1 of them 2"),
    (two_ranks((F(0), B(0, 1)), (F(0),)), "chunk 1 of rank 0 has no stage"),
    (two_ranks((F(0), B(0)), ()), "stage 1 has no cell"),
]


@pytest.mark.parametrize(("schedule", "lost"), LOSSES, ids=[lost for _, lost in LOSSES])
def test_torch_csv_names_what_would_be_lost(schedule: Schedule, lost: str) -> None:
    with pytest.raises(ValueError, match=f"torch's CSV cannot carry {schedule.name}: .*{lost}.*`format="):
        torch_csv.dump(schedule)


def test_torch_csv_numbers_chunks_by_stage() -> None:
    upside_down = Schedule("mine", Placement.table(((1, 0),)), 1, ((F(0, 1), F(0, 0), B(0, 0), B(0, 1)),))
    assert torch_csv.dump(upside_down) == "0F0,1F0,1B0,0B0\n"
    assert torch_csv.parse("0F0,1F0,1B0,0B0\n").rows == ((F(0, 0), F(0, 1), B(0, 1), B(0, 0)),)


# torch's CSV: what is read


def test_compute_only_file() -> None:
    """As torchtitan's users keep them: bubbles as empty entries, Windows line ends, an overlapped pair."""
    content = (
        "0F0,0F1,,2F0,2F1,,2B0,(0F2;2B1)OVERLAP_F_B,2F2,0I0,0W0,0B1,2B2,0B2\r\n"
        ",1F0, 1F1,3F0,3B0,3F1,3B1,1F2,,1B0,3F2,3B2,1B1,1B2,,\r\n"
    )
    schedule = torch_csv.parse(content, "mine.csv")
    assert schedule.name == "custom"
    assert schedule.placement == Placement.loop(2, 2)
    assert schedule.num_microbatches == 3
    assert not schedule.receives
    top = (F(0), F(1), F(0, 1), F(1, 1), B(0, 1), F(2) | B(1, 1), F(2, 1), I(0), W(0), B(1), B(2, 1), B(2))
    assert schedule.rows[0] == top
    assert schedule.rows[1][:4] == (F(0), F(1), F(0, 1), B(0, 1))


COMMS = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
)


def test_file_with_messages_has_an_order_of_issue_besides_its_cells() -> None:
    schedule = torch_csv.parse(COMMS)
    assert replace(schedule, issue=()) == torch_csv.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert [" ".join(map(str, turns)) for turns in schedule.issue] == [
        ". >1 . >1 <1 . <1 .",
        "<0 <0 . . >0 . . >0",
    ]


def test_file_with_messages_is_written_as_it_was_read() -> None:
    for content in (COMMS, COMMS.replace("1RECV_F0,1RECV_F1", "1RECV_F1,1RECV_F0"), WAITS, *map(Path.read_text, KEPT)):
        schedule = torch_csv.parse(content)
        unsharded = re.sub(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD),?", "", content)
        bare = "".join(re.sub(",+", ",", line).strip(",") + "\n" for line in unsharded.splitlines())
        assert torch_csv.dump(schedule) == bare
        for form in ("text", "json"):
            assert FORMATS[form].parse(FORMATS[form].dump(schedule), "a file") == schedule


def test_messages_in_batches_are_refused_by_torch_csv() -> None:
    schedule = torch_csv.parse(COMMS)
    batched = replace(
        schedule, issue=(schedule.issue[0], (Turn("<", 0), Turn("<", 0, joined=True), *schedule.issue[1][2:]))
    )
    with pytest.raises(ValueError, match="it issues messages in batches; use `format='text'`"):
        torch_csv.dump(batched)
    assert text.parse(text.dump(batched)) == batched


def test_receives_of_another_order_are_kept() -> None:
    """Only for the channel they differ on, and named by their reader."""
    schedule = torch_csv.parse(COMMS.replace("1RECV_F0,1RECV_F1", "1RECV_F1,1RECV_F0"))
    assert schedule.receives == {(0, 1): (F(1), F(0))}


def test_receive_that_is_not_there_is_not_made_up() -> None:
    schedule = torch_csv.parse(COMMS.replace("0RECV_B1,", ""))
    assert schedule.receives == {(1, 0): (B(0),)}


def test_labels_name_the_readers_chunk() -> None:
    """Stages 0 and 3 on rank 0: stage 1 sends stage 2 nothing, and both channels carry both kinds."""
    content = (
        "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0\n2RECV_B0,1RECV_F0,1F0,2F0,2SEND_F0,2B0,1B0,1SEND_B0\n"
    )
    schedule = torch_csv.parse(content)
    assert schedule.placement == Placement.v(2)
    assert schedule.receives == {(0, 1): (B(0, 1), F(0, 0))}


WAITS = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,1WAIT_SEND_B1\n"
)


@pytest.mark.parametrize(
    "content",
    [
        WAITS,
        WAITS.replace("0SEND_F0", "0SEND_F0,0WAIT_SEND_F0").replace("0B0,0WAIT_SEND_F0", "0B0"),
        WAITS.replace(",0WAIT_SEND_F0,", ",").replace("0B1,", "0B1,0WAIT_SEND_F0,"),
    ],
    ids=["after the backward", "at once", "at the end"],
)
def test_waits_that_end_say_no_more_than_the_cells(content: str) -> None:
    schedule = torch_csv.parse(content)
    assert replace(schedule, issue=()) == torch_csv.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert treadle.verify(schedule).clean


def test_a_deadlock_of_the_cells_is_left_to_the_verifier_where_there_are_waits() -> None:
    """Rank 0 has B0 before F1, rank 1 has F1 before B0."""
    content = (
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1,0WAIT_SEND_F0,0WAIT_SEND_F1\n"
        "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n"
    )
    codes = {finding.code for finding in treadle.verify(torch_csv.parse(content)).findings}
    assert codes == {"T201"}


ALL_WAIT_AT_ONCE = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F0,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\n"
)
WAITS_FOR_A_DEADLOCK = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0WAIT_SEND_F0,0WAIT_SEND_F1,0WAIT_SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,"
    "0RECV_B2,0B2\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,1WAIT_SEND_F0,1WAIT_SEND_F1,1RECV_B0,1B0,1SEND_B0,1RECV_F2,1F2,1SEND_F2,"
    "1RECV_B1,1B1,1SEND_B1,1RECV_B2,1B2,1SEND_B2,1WAIT_SEND_F2,1WAIT_SEND_B0,1WAIT_SEND_B1,1WAIT_SEND_B2\n"
    "2RECV_F0,2F0,2B0,2SEND_B0,2WAIT_SEND_B0,2RECV_F1,2F1,2B1,2SEND_B1,2RECV_F2,2F2,2B2,2SEND_B2,2WAIT_SEND_B1,"
    "2WAIT_SEND_B2\n"
)
"""Rank 0 stops at a wait too, and for the other two only."""

REFUSED = [
    ("0F0,0WAIT_SEND_F\n", 1, 4, "'0WAIT_SEND_F' is not an entry"),
    ("0F0,0WAIT_REDUCE_GRAD0\n", 1, 21, "is not an entry"),
    (WAITS.replace("0SEND_F0,0F1", "0WAIT_SEND_F0,0SEND_F0,0F1"), 1, 4, "0WAIT_SEND_F0 waits for no send: .*0SEND_F0;"),
    (WAITS.replace("0WAIT_SEND_F0", "0WAIT_SEND_F0,0WAIT_SEND_F0"), 1, 53, "0WAIT_SEND_F0 waits for no send"),
    (
        WAITS.replace(",1WAIT_SEND_B0", ""),
        2,
        26,
        "nothing waits for 1SEND_B0; add 1WAIT_SEND_B0 after it, or leave out",
    ),
    ("0F0,1WAIT_SEND_F0\n1F0\n", 1, 4, "1WAIT_SEND_F0 is of a stage that rank 0 does not compute"),
    ("0F0\n1F0,1WAIT_SEND_F0\n", 2, 4, "1WAIT_SEND_F0 needs a stage 2, and the stages are 0 to 1"),
    (
        ALL_WAIT_AT_ONCE,
        1,
        40,
        "0WAIT_SEND_F1 is part of a deadlock: it lasts until rank 1 does 1RECV_F1, which comes after 1WAIT_SEND_B0, "
        "which needs this rank to go on; move 0WAIT_SEND_F1 to the end of its line",
    ),
    (
        WAITS_FOR_A_DEADLOCK,
        2,
        58,
        "1WAIT_SEND_F1 is part of a deadlock: it lasts until rank 2 does 2RECV_F1, which comes after 2WAIT_SEND_B0",
    ),
    ("0F0,0F1x,0B0\n", 1, 7, "'0F1x' is not an entry of torch's CSV; entries are 0F0"),
    ("0F0,0B0\n1F0,  1Q0\n", 2, 6, "'1Q0' is not an entry"),
    ("0F0,0B0\n1F0,1B\n", 2, 4, "'1B' is not an entry"),
    ("00F0\n", 1, 0, "'00F0' is not an entry"),
    ("0F0,(0F1;0B0)OVERLAP_F_B!\n", 1, 24, "is not an entry"),
    ("0F0,(0B0;0F1)OVERLAP_F_B\n", 1, 4, "is not an entry"),
    ("0F0,0UNSHARD1\n", 1, 12, "is not an entry"),
    ("0F0 0B0\n", 1, 3, "is not an entry"),
    ("0F0,0B0\n1F0,0B0\n", 2, 4, "stage 0 is on rank 0 and on rank 1; this form has one rank for each stage"),
    ("0F0,0B0\n1F0,2F0\n", 2, 0, "rank 1 computes stages 1, 2, rank 0 computes stage 0; a line is a rank"),
    ("0F0,0B0\n1F0,1B0\n\n", 3, 0, "rank 2 computes no stage, rank 0 computes stage 0; a line is a rank"),
    ("0F0,1UNSHARD\n1F0\n", 1, 4, "1UNSHARD is of a stage that rank 0 does not compute; move it"),
    ("0F0,0RECV_F0\n1F0\n", 1, 4, "0RECV_F0 needs a stage -1, and the stages are 0 to 1"),
    ("0F0\n1F0,1SEND_F0\n", 2, 4, "1SEND_F0 needs a stage 2, and the stages are 0 to 1"),
    ("0F0,0SEND_F0,1F0\n", 1, 4, "0SEND_F0 is no message: stages 0 and 1 are both on rank 0"),
    (COMMS.replace("1RECV_F1,1F0", "1F0").replace("1F1", "1F1,1RECV_F1"), 2, 39, "1RECV_F1 stands after"),
    (COMMS.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), 1, 9, "0SEND_F0 stands before the action that makes it"),
    (
        COMMS.replace("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0"),
        1,
        17,
        "0SEND_F1 is out of turn: .* its actions run, and 0SEND_F0 is next from rank 0 to rank 1",
    ),
    (COMMS.replace(",1SEND_B1", ""), 2, 0, "rank 1 never does 1SEND_B1; add it, or leave out all SEND"),
    (COMMS.replace("1SEND_B1", "1SEND_B1,1SEND_B1"), 2, 61, "1SEND_B1 sends again"),
]


@pytest.mark.parametrize(("content", "line", "column", "message"), REFUSED, ids=[case[3] for case in REFUSED])
def test_torch_csv_errors_point_at_the_place(content: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        torch_csv.parse(content, "mine.csv")
    assert (caught.value.line_number, caught.value.column) == (line, column)
    assert str(caught.value).startswith(f"mine.csv:{line}:{column + 1}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "mine.csv: no entries; torch's CSV has a line such as 0F0,0B0 for each rank"),
        (",,\n\n", "mine.csv: no entries"),
        ("0F0,0B0\n2F0,2B0\n", r"mine.csv: a placement holds each stage from 0 to 1 once, got \[0, 2\]"),
    ],
)
def test_torch_csv_errors_of_the_whole_file(content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch_csv.parse(content, "mine.csv")


# torch's CSV: torch itself

LOADED = ["gpipe", "1f1b", "interleaved", "interleaved-overlap", "zb-h1", "zb-v", "v-half", "v-min", "dualpipev"]


@pytest.fixture
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def load_with_torch(torch_schedules: Any, schedule: Schedule, path: Path, **options: bool) -> Any:
    """torch's runtime, its stages stand-ins, after its own loader read our file."""
    path.write_text(torch_csv.dump(schedule))
    stage = {"num_stages": schedule.placement.num_stages, "group_size": schedule.pp, "group_rank": 0}
    stages = [SimpleNamespace(**stage) for _ in range(schedule.vpp)]
    runtime = torch_schedules._PipelineScheduleRuntime(stages, schedule.num_microbatches, **options)
    runtime._load_csv(str(path), format="compute_only")
    return runtime


def meaning(action: Any) -> list[tuple[int, str, int]]:
    return [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in action.sub_actions or [action]]


@pytest.mark.parametrize("size", [(2, 4), (4, 8), (3, 9)], ids=str)
@pytest.mark.parametrize("name", LOADED)
def test_torch_loads_what_we_dump_and_we_read_what_it_dumps(
    torch_schedules: Any, tmp_path: Path, name: str, size: tuple[int, int]
) -> None:
    pp, num_mb = size
    schedule = generate(name, pp=pp, microbatches=num_mb)
    runtime = load_with_torch(torch_schedules, schedule, tmp_path / "ours.csv")
    for rank, row in enumerate(schedule.rows):
        ours = [[(schedule.placement.stage(rank, a.chunk), a.kind.name, a.mb) for a in c.actions] for c in row]
        assert [meaning(action) for action in runtime.pipeline_order[rank]] == ours
    for form in ("compute_only", "compute_comms"):
        theirs = tmp_path / f"{form}.csv"
        runtime._dump_csv(str(theirs), format=form)
        read = parse_any(theirs.read_bytes().decode(), str(theirs))
        assert replace(read, issue=()) == custom(schedule)
        assert bool(read.issue) == (form == "compute_comms")
    assert "SEND_F" in theirs.read_text()


def test_torch_deferred_receives_are_read_as_they_stand(torch_schedules: Any, tmp_path: Path) -> None:
    """torch can post receives late, in the order of use: what a verifier should see."""
    schedule = generate("zb-v", pp=4, microbatches=8)
    runtime = load_with_torch(torch_schedules, schedule, tmp_path / "ours.csv", defer_pp_recv=True)
    runtime._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    read = torch_csv.parse((tmp_path / "theirs.csv").read_text())
    assert read.rows == schedule.rows
    assert read.receives


KEPT = sorted((GOLDEN / "torch").glob("*/*.csv"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_files_of_each_version_of_torch_are_read(path: Path) -> None:
    """With its options too: each changes what stands around the cells."""
    name, _, option = path.stem.partition("_")
    read, schedule = parse_any(path.read_text(), str(path)), custom(generate(name, pp=2, microbatches=4))
    assert replace(read, receives={}, issue=()) == schedule
    assert bool(read.receives) == (option == "defer_pp_recv")
    assert ("WAIT_SEND" in path.read_text()) == (path.parent.name != "2.13")


def test_torch_writes_what_is_kept_of_its_version(torch_schedules: Any) -> None:
    """A newer one that writes something else: read it, and keep it with tests/support/torch_texts.py."""
    from tests.support.torch_texts import kept_for_this_torch, texts

    assert texts() == {path.stem: path.read_text() for path in sorted(kept_for_this_torch().glob("*.csv"))}


def test_torch_takes_junk_that_we_refuse(torch_schedules: Any) -> None:
    assert str(torch_schedules._Action.from_str("0F0x")) == "0F0"


# JSON


def test_json_is_a_line_a_rank() -> None:
    schedule = replace(generate("1f1b", pp=2, microbatches=2), receives={(1, 0): (B(1), B(0)), (0, 1): ()})
    assert json_form.dump(schedule) == (
        "{\n"
        '  "treadle-schedule": 1,\n'
        '  "name": "1f1b",\n'
        '  "placement": "loop",\n'
        '  "pp": 2,\n'
        '  "vpp": 1,\n'
        '  "microbatches": 2,\n'
        '  "rows": [\n'
        '    ["F0.0", "F1.0", "B0.0", "B1.0"],\n'
        '    ["F0.0", "B0.0", "F1.0", "B1.0"]\n'
        "  ],\n"
        '  "receives": {\n'
        '    "0>1": [],\n'
        '    "1>0": ["B1.0", "B0.0"]\n'
        "  }\n"
        "}\n"
    )


GOOD = json.loads(json_form.dump(generate("1f1b", pp=2, microbatches=1)))

BAD_JSON = [
    ({"treadle-schedule": 2}, "treadle-schedule is 1, the version that is read here, got 2"),
    ({"treadle-schedule": True}, "treadle-schedule is 1, .*got true"),
    ({"treadle-schedule": None}, "treadle-schedule is 1, .*got null"),
    ({"microbatch": 3}, "microbatch is not known; did you mean 'microbatches'?"),
    ({"zzz": 3}, "zzz is not known; known are treadle-schedule, name, .*, receives"),
    ({"pp": "2"}, "pp is a whole number from 1, got '2'"),
    ({"pp": 2.0}, "pp is a whole number from 1, got 2.0"),
    ({"vpp": True}, "vpp is a whole number from 1, got true"),
    ({"microbatches": 0}, "microbatches is a whole number from 1, got 0"),
    ({"name": None}, "name is a text, got null"),
    ({"placement": ["loop"]}, r"placement is a text, got \['loop'\]"),
    ({"placement": "ring"}, "placement 'ring' is not known; use loop, v, bidirectional"),
    ({"placement": "bidirectional", "vpp": 2}, "2 pipes share the micro-batches equally, got 1; use 2"),
    ({"rows": {}}, "rows is a list, .*, got an object"),
    ({"rows": [["F0.0"]]}, "rows has a row for each of the pp=2 ranks, got 1"),
    ({"rows": [[], "F0.0"]}, r"rows\[1\] is a list, each item a cell: .*, got 'F0.0'"),
    ({"rows": [["F0.0"], ["F0.0", "B0"]]}, r"rows\[1\]\[1\] is a cell: F0.0, B0.0, .*, got 'B0'"),
    ({"rows": [["F0.0 "], []]}, r"rows\[0\]\[0\] is a cell: .*, got 'F0.0 '"),
    ({"rows": [[0], []]}, r"rows\[0\]\[0\] is a cell: .*, got 0"),
    ({"rows": [["F" * 99], []]}, r"rows\[0\]\[0\] is a cell: .*, got 'F{56}\.\.\."),
    ({"receives": []}, "receives is an object, got a list of 0"),
    ({"receives": {"0-1": []}}, "receives.0-1 is not a channel: two ranks, such as 0>1"),
    ({"receives": {"0>2": []}}, "no channel '0>2'; a channel is two of 2 ranks, such as '0>1'"),
    ({"receives": {"1>1": []}}, "no channel '1>1'"),
    ({"receives": {"0>1": "F0.0"}}, "receives.0>1 is a list, each item a message: .*, got 'F0.0'"),
    (
        {"receives": {"0>1": ["F0.0", "I0.0"]}},
        r"receives.0>1\[1\] is a message: F0.0 or B0.0, got 'I0.0'",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_JSON, ids=[message for _, message in BAD_JSON])
def test_json_errors_name_the_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^mine.json: .*{message}"):
        json_form.parse(json.dumps({**GOOD, **change}), "mine.json")


@pytest.mark.parametrize("key", [key for key in GOOD if key != "receives"])
def test_json_missing_key(key: str) -> None:
    content = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(ValueError, match=f"^mine.json( lacks {key}: |: {key} is 1, .*got null)"):
        json_form.parse(json.dumps(content), "mine.json")


def test_json_key_given_twice() -> None:
    content = json.dumps(GOOD).replace('"pp": 2', '"pp": 2, "pp": 3')
    with pytest.raises(ValueError, match=r"^mine\.json: 'pp' is given twice"):
        json_form.parse(content, "mine.json")


def test_json_that_is_no_object() -> None:
    with pytest.raises(ValueError, match=r"^mine\.json is an object with treadle-schedule, name, .*, got \[1\]"):
        json_form.parse("[1]", "mine.json")


def test_json_that_is_nested_too_deep() -> None:
    with pytest.raises(ValueError, match=r"^mine\.json: nested deeper than any schedule"):
        json_form.parse('{"rows": ' + "[" * 100_000, "mine.json")


def test_invalid_json_points_at_the_place() -> None:
    content = json_form.dump(generate("1f1b", pp=2, microbatches=2)).replace('"pp": 2,', '"pp": 2')
    with pytest.raises(ParseError, match="not JSON: Expecting ',' delimiter") as caught:
        json_form.parse(content.replace("\n", "\r\n"), "mine.json")
    assert (caught.value.line_number, caught.value.column) == (6, 2)
    assert '  "vpp": 1,\n' in str(caught.value)


# Any of them


def test_parse_any_tells_the_form_by_its_content() -> None:
    schedule = generate("zb-v", pp=2, microbatches=4)
    assert parse_any("\n" + json_form.dump(schedule)) == schedule
    assert parse_any(text.dump(schedule)) == schedule
    assert parse_any(text.dump(schedule, header=False), placement="v") == replace(schedule, name="custom")
    assert parse_any(torch_csv.dump(schedule)) == replace(schedule, name="custom")


def test_parse_any_reports_in_the_words_of_the_form() -> None:
    with pytest.raises(ParseError, match=r"mine\.txt:1:1: expected a row"):
        parse_any("junk\n0: F0.0\n", "mine.txt")
    with pytest.raises(ParseError, match=r"mine\.txt:1:1: expected a row"):
        parse_any("rank0 F0 F1\n", "mine.txt")
    with pytest.raises(ParseError, match=r"mine\.csv:1:1: 'junk' is not an entry of torch's CSV"):
        parse_any("junk\n", "mine.csv")


@pytest.mark.parametrize("form", ["json", "torch-csv"])
def test_placement_is_for_rows_in_the_text_form(form: str) -> None:
    content = FORMATS[form].dump(generate("1f1b", pp=2, microbatches=2))
    with pytest.raises(ValueError, match=f"a file: placement 'v' was given for a file in the {form} form"):
        parse_any(content, "a file", placement="v")


def test_torch_csv_has_no_quotes_or_header() -> None:
    """csv's own reader sees the entries as they are written."""
    content = torch_csv.dump(generate("interleaved-overlap", pp=2, microbatches=4))
    assert [",".join(row) for row in csv.reader(content.splitlines())] == content.splitlines()
