"""The embedding and the head in Programs: where they are put, what they cost, what a file and a fit say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treadle
from treadle.costs import durations, load_costs
from treadle.costs.costs import dump, parse
from treadle.files.npz import load_program, save_program
from treadle.ir.execute import execute
from treadle.ir.memory import peaks
from treadle.ir.ops import LaneKind, OpKind
from treadle.lowering import LoweringOptions, lower
from treadle.schedules import SCHEDULES
from treadle.simulator import fit, simulate
from treadle.verifier import verify_program
from treadle.view.lane_rows import lanes_text

DEEPSEEK = load_costs("deepseek-v3-h800")
ENDS = {"embed_f": 500, "embed_b": 900, "head_f": 8_000, "head_b": 7_000, "head_w": 6_000}
COSTS = replace(
    DEEPSEEK,
    ends={name: time * DEEPSEEK.clock.ticks for name, time in ENDS.items()},
    saved_bytes={**DEEPSEEK.saved_bytes, "embed": 1_000_000, "head": 4_000_000_000},
)
HALVES = (OpKind.MLP_W, OpKind.ATTN_W, OpKind.HEAD_W)


def schedule_of(name: str) -> treadle.Schedule:
    return treadle.generate(name, pp=4, microbatches=8)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("split", [(), HALVES[:2], HALVES])
def test_every_schedule_has_sound_ends(name: str, moe: bool, split: tuple[OpKind, ...]) -> None:
    schedule = schedule_of(name)
    program = lower(schedule, COSTS, LoweringOptions(layers=2, moe=moe, split=split, offload=True))
    report = verify_program(program, durations(program, COSTS))
    assert report.clean, report.findings[:3]
    stages = np.array(schedule.placement.stages)[program.lane_rank[program.lane_of], program.chunk]
    lane = program.lane_kind[program.lane_of]
    wanted = [(OpKind.EMBED_F, 0), (OpKind.EMBED_B, 0), (OpKind.HEAD_F, -1), (OpKind.HEAD_B, -1)]
    for kind, stage in [*wanted, *([(OpKind.HEAD_W, -1)] if OpKind.HEAD_W in split else [])]:
        ops = program.kind == kind
        assert ops.sum() == schedule.num_microbatches
        assert (lane[ops] == LaneKind.COMPUTE).all()
        assert (stages[ops] == stage % schedule.placement.num_stages).all()


def test_they_are_there_where_costs_give_them_a_time() -> None:
    schedule = schedule_of("1f1b")
    assert not lower(schedule, DEEPSEEK, LoweringOptions(layers=1, moe=True)).layout.head
    only_head = replace(DEEPSEEK, ends={"head_f": 5})
    layout = lower(schedule, only_head, LoweringOptions(layers=1, moe=True)).layout
    assert layout.head
    assert not layout.embedding
    assert not lower(schedule, COSTS, LoweringOptions(layers=1, head=False, moe=True)).layout.head


def test_the_head_hides_the_first_exchange_of_a_lone_backward() -> None:
    schedule = schedule_of("1f1b")
    program = lower(schedule, COSTS, LoweringOptions(layers=1, padded=True, hold=False, early=True, moe=True))
    text = lanes_text(program, 3, [str(cell) for cell in schedule.rows[3]])
    assert "compute  head' 0.0   headW 0.0   mlp' 0.0   mlpW 0.0   attn' 0.0   attnW 0.0\n" in text
    assert "compute  attn 0.0   mlp 0.0   head 0.0\n" in text


def test_their_time_is_in_the_step() -> None:
    schedule = schedule_of("1f1b")
    without = simulate(lower(schedule, COSTS, LoweringOptions(layers=1, embedding=False, head=False, moe=True)), COSTS)
    with_head = simulate(lower(schedule, COSTS, LoweringOptions(layers=1, moe=True)), COSTS)
    head_s = schedule.num_microbatches * (ENDS["head_f"] + ENDS["head_b"] + ENDS["head_w"])
    longer = (with_head.makespan - without.makespan) / COSTS.clock.ticks
    assert 0.5 * head_s < longer <= head_s + ENDS["embed_f"] + ENDS["embed_b"]


def test_what_the_head_saves_is_held_and_not_offloaded() -> None:
    schedule = schedule_of("gpipe")
    sizes = {}
    for head in (True, False):
        program = lower(schedule, COSTS, LoweringOptions(layers=1, offload=True, head=head, moe=True))
        sizes[head] = peaks(program, execute(program, durations(program, COSTS))).size[-1]
    assert sizes[True] - sizes[False] > 0.9 * schedule.num_microbatches * COSTS.saved_bytes["head"]


def test_a_whole_backward_of_the_head_takes_both_halves() -> None:
    program = lower(schedule_of("1f1b"), COSTS, LoweringOptions(layers=1, split=(), moe=True))
    dur = durations(program, COSTS)
    assert set(dur[program.kind == OpKind.HEAD_B]) == {(ENDS["head_b"] + ENDS["head_w"]) * COSTS.clock.ticks}


def test_costs_with_ends_are_written_and_read() -> None:
    assert parse(dump(COSTS)).ends == COSTS.ends
    with pytest.raises(ValueError, match=r"<text>:2: \[ends\] haed_f is not known; did you mean 'head_f'"):
        parse("[ends]\nhaed_f = 3\n")


def test_a_fit_finds_them() -> None:
    program = lower(schedule_of("interleaved-overlap"), COSTS, LoweringOptions(layers=1, moe=True))
    assert fit(simulate(program, COSTS)).ends == COSTS.ends


def test_files_carry_them(tmp_path: Path) -> None:
    program = lower(schedule_of("dualpipev"), COSTS, LoweringOptions(layers=1, moe=True))
    path = tmp_path / "program.npz"
    save_program(program, path)
    read = load_program(path)
    assert read.layout == program.layout
    assert (read.kind == program.kind).all()
