"""torch's CSV with messages: held to torch's own passes, and to the judge of shared communicators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.support.command import treadle as typed
from treadle.files import FORMATS, torch_comms, torch_csv
from treadle.files.torch_comms import Receives
from treadle.ir import B, F, Placement, Schedule
from treadle.ir.turn import CELL
from treadle.passes.cells import lower_cells
from treadle.passes.issue_order import IssueOrder
from treadle.passes.late_receives import _move
from treadle.schedules import SCHEDULES, generate
from treadle.verifier.communicator_queues import judge, out_of_turn

CARRIED = sorted(set(SCHEDULES) - {"dualpipe"})
SIZES = [(2, 4), (4, 8), (3, 9)]
STAGES = [(name, vpp) for name in CARRIED for vpp in SCHEDULES[name].vpps or (1, 2, 5)]
MARKS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def made(name: str, size: tuple[int, int], **more: int) -> Schedule:
    return generate(name, pp=size[0], microbatches=size[1], **more)


def entries(text: str) -> list[list[str]]:
    return [line.split(",") for line in text.splitlines()]


@pytest.fixture
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_rows(module: Any, schedule: Schedule) -> dict[int, list[Any]]:
    return {
        rank: [module._Action.from_str(word) for word in row]
        for rank, row in enumerate(entries(torch_csv.dump(schedule)))
    }


# -- held to torch


@pytest.mark.parametrize("size", [*SIZES, (8, 16)], ids=str)
@pytest.mark.parametrize("name", CARRIED)
def test_early_receives_are_those_that_torch_adds(torch_schedules: Any, name: str, size: tuple[int, int]) -> None:
    """Entry for entry, among the cells."""
    schedule = made(name, size)
    placement = schedule.placement
    added = torch_schedules._add_send_recv(
        torch_rows(torch_schedules, schedule),
        stage_to_rank=lambda stage: placement.holder(stage)[0],
        num_stages=placement.num_stages,
    )
    assert list(map(bare, entries(torch_comms.dump(schedule)))) == [
        list(map(str, added[rank])) for rank in sorted(added)
    ]


def bare(words: list[str]) -> list[str]:
    return [word for word in words if not word.endswith(MARKS)]


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
@pytest.mark.parametrize("receives", ["early", "late"])
@pytest.mark.parametrize(("name", "vpp"), STAGES)
def test_entries_of_stages_stand_where_torch_puts_them(
    torch_schedules: Any, name: str, receives: Receives, vpp: int, fsdp: bool
) -> None:
    """Around the same cells; of stages that end together, in any order."""
    schedule = made(name, (4, 8), vpp=vpp)
    ours = entries(torch_comms.dump(schedule, receives=receives, fsdp=fsdp))
    for rank, row in torch_rows(torch_schedules, schedule).items():
        whole = torch_schedules._add_unshard_reshard(row) if fsdp else row
        theirs = list(map(str, torch_schedules._add_reduce_grad(whole, schedule.num_microbatches)))
        mine = [word for word in ours[rank] if "SEND" not in word and "RECV" not in word]
        assert list(blocks(mine)) == list(blocks(theirs))
    assert list(map(bare, ours)) == list(map(bare, entries(torch_comms.dump(schedule, receives=receives))))


def blocks(words: list[str]) -> Iterator[list[str]]:
    """Cells, and what stands between two of them."""
    between: list[str] = []
    for word in words:
        if word.endswith(MARKS):
            between.append(word)
        else:
            yield sorted(between)
            yield [word]
            between = []
    yield sorted(between)


# -- held to the judge


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
@pytest.mark.parametrize("receives", ["early", "late"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CARRIED)
def test_what_is_written_is_read_exactly_and_is_clean(
    name: str, size: tuple[int, int], receives: Receives, fsdp: bool
) -> None:
    schedule = made(name, size)
    text = treadle.dumps(schedule, "torch-comms", receives=receives, fsdp=fsdp)
    read = treadle.loads(text)
    assert read.rows == schedule.rows
    assert read.placement.stages == schedule.placement.stages
    assert not read.receives
    assert read.issue
    assert treadle.verify(read, communicators="pair").clean
    assert treadle.dumps(read, "torch-comms", fsdp=fsdp) == text
    for form in ("text", "json"):
        assert FORMATS[form].parse(FORMATS[form].dump(read), "a file") == read


@pytest.mark.parametrize("size", [(2, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("name", CARRIED)
def test_no_late_receive_could_be_later(name: str, size: tuple[int, int]) -> None:
    """Behind one more cell, it is issued after its reader, crosses, or hangs, by the judge's own graph."""
    schedule = torch_csv.parse(treadle.dumps(made(name, size), "torch-comms", receives="late"))
    program = lower_cells(schedule)
    num_receives = 0
    for rank, turns in enumerate(schedule.issue):
        for at, turn in enumerate(turns):
            if turn.verb != "<" or CELL not in turns[at:]:
                continue
            num_receives += 1
            behind = turns.index(CELL, at) + 1
            moved = (*turns[:at], *turns[at + 1 : behind], turn, *turns[behind:])
            issue = (*schedule.issue[:rank], moved, *schedule.issue[rank + 1 :])
            if turn in turns[at:behind][1:]:
                continue  # the next receive of the channel is the one that would move
            order = IssueOrder.given(replace(schedule, issue=issue), program)
            assert out_of_turn(program, order) or not judge(program, order, "pair").ends, f"rank {rank}, turn {at}"
    assert num_receives == sum(program.op(op).kind.is_recv for op in range(program.num_ops))


def test_late_receives_are_later_than_early_ones() -> None:
    schedule = generate("interleaved", pp=4, microbatches=8)
    ahead = {receives: cells_ahead(schedule, receives) for receives in ("early", "late")}
    assert max(ahead["early"]) == 3
    assert set(ahead["late"]) == {0}


def cells_ahead(schedule: Schedule, receives: Any) -> list[int]:
    """For each receive, how many cells its rank issues between it and its reader."""
    found = []
    for row in entries(treadle.dumps(schedule, "torch-comms", receives=receives)):
        for at, word in enumerate(row):
            if "RECV" in word:
                stage, _, label = word.partition("RECV_")
                readers = {f"{stage}{kind}{label[1:]}" for kind in ("F" if label[0] == "F" else "BI")}
                cells = [word for word in bare(row[at:]) if "RECV" not in word and "SEND" not in word]
                found.append(next(n for n, cell in enumerate(cells) if readers & words_of(cell)))
    return found


def words_of(cell: str) -> set[str]:
    return set(cell.removesuffix("OVERLAP_F_B").strip("()").split(";"))


def test_a_receive_is_not_late_where_that_hangs() -> None:
    """1F1B as pytorch#172668 has it: a rank's receive of a gradient would wait behind a send that waits for it."""
    schedule = generate("1f1b", pp=2, microbatches=4)
    program = lower_cells(schedule)
    assert judge(program, IssueOrder.at_use(program), "pair").word == "hangs when large"
    first = entries(treadle.dumps(schedule, "torch-comms", receives="late"))[1]
    assert first[:6] == ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1SEND_B0", "1F1"]


@pytest.mark.slow
def test_the_compiled_search_finds_what_plain_python_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = [generate(name, pp=4, microbatches=12) for name in CARRIED]
    plain = [treadle.dumps(schedule, "torch-comms", receives="late") for schedule in schedules]
    monkeypatch.setattr("treadle.passes.late_receives._move", _move.compiled)
    assert [treadle.dumps(schedule, "torch-comms", receives="late") for schedule in schedules] == plain


# -- what is given, and what is refused


def test_an_order_that_is_given_is_kept_unless_another_is_asked_for() -> None:
    schedule = generate("zb-v", pp=2, microbatches=4)
    late = treadle.loads(treadle.dumps(schedule, "torch-comms", receives="late"))
    early = treadle.dumps(schedule, "torch-comms", receives="early")
    assert treadle.dumps(late, "torch-comms") != early
    assert treadle.dumps(late, "torch-comms", receives="early") == early


def test_a_schedule_that_does_not_finish_has_no_order() -> None:
    rows = ((B(0), F(0)), (F(0), B(0)))
    with pytest.raises(ValueError, match="mine does not finish, so its messages have no order; `treadle verify`"):
        treadle.dumps(Schedule("mine", Placement.loop(2), 1, rows), "torch-comms")


def test_dualpipe_cannot_be_carried() -> None:
    with pytest.raises(ValueError, match="torch's CSV cannot carry dualpipe: it has one rank for each stage"):
        treadle.dumps(generate("dualpipe", pp=2, microbatches=4), "torch-comms")


def test_options_are_for_this_form() -> None:
    schedule = generate("1f1b", pp=2, microbatches=4)
    with pytest.raises(ValueError, match="`fsdp` is for `format='torch-comms'`, got 'text'"):
        treadle.dumps(schedule, fsdp=True)
    with pytest.raises(ValueError, match="`receives` is for `format='torch-comms'`, got 'torch-csv'"):
        treadle.dumps(schedule, "torch-csv", receives="late")
    for words in (["--fsdp"], ["--receives", "late", "--lower"], ["--receives", "early", "--format", "json"]):
        done = typed("show", "1f1b", "--pp", "2", "-m", "4", *words)
        assert done.returncode == 2
        assert "--receives and --fsdp are for --format torch-comms" in done.stderr


def test_command_writes_what_python_writes(tmp_path: Path) -> None:
    words = ["show", "zb-v", "--pp", "2", "-m", "4", "--format", "torch-comms", "--receives", "late", "--fsdp"]
    schedule = generate("zb-v", pp=2, microbatches=4)
    text = treadle.dumps(schedule, "torch-comms", receives="late", fsdp=True)
    assert typed(*words).stdout == text
    typed(*words, "-o", str(tmp_path / "late.csv"))
    assert (tmp_path / "late.csv").read_text() == text
    assert typed("verify", str(tmp_path / "late.csv")).stdout.startswith("clean: 2 ranks, 48 cells")
