"""What-if analysis of steps that tests make: one thing slow at a time, in programs of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import treadle
from treadle.cli.app import app
from treadle.diagnosis import WhyReport, analyse
from treadle.diagnosis.whatif import transfers
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.ir.show import show_time
from treadle.ir.steps import Steps
from treadle.ir.trace import MICROSECONDS
from treadle.passes.measured import TAIL, measured_program
from treadle.schedules import SCHEDULES
from treadle.simulator import Durations

PP, DP, NUM_STEPS = 4, 4, 5


def made_program() -> Program:
    return measured_program(treadle.generate("1f1b", pp=PP, microbatches=8), dp=DP, tail=TAIL)


def usual(program: Program) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Milliseconds of each op: backward twice a forward, and a millisecond for all else."""
    each = np.select([program.kind == OpKind.F, program.kind == OpKind.B], [10.0, 20.0], 1.0)
    return np.tile(each, (NUM_STEPS, 1))


def ran(program: Program, dur: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Steps:
    """The steps that such durations give."""
    traces = [treadle.simulate(program, Durations(np.rint(row * 1e6).astype(np.int64))) for row in dur]
    start, end = (np.stack([getattr(trace, name) for trace in traces]) for name in ("start", "end"))
    return Steps(program, tuple(range(NUM_STEPS)), start, end, about="made")


def test_nothing_slow() -> None:
    program = made_program()
    report = analyse(ran(program, usual(program)))
    assert report.slowdown == pytest.approx(1)
    assert report.gaps == pytest.approx(0, abs=1e-9)
    assert (report.cause.what, report.last_stage.removed) == ("none", 0)


def rank_of(program: Program) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return program.lane_rank[program.lane_of]


def slow(what: str) -> WhyReport:
    program = made_program()
    dur, rank, random = usual(program), rank_of(program), np.random.default_rng(0)
    computes = np.isin(program.kind, (OpKind.F, OpKind.B))
    if what == "worker":
        dur[:, computes & (rank == 2 * DP + 1)] *= 1.5
    elif what == "stage":
        dur[:, computes & (rank // DP == 1)] *= 1.5
    elif what == "replica":
        dur[:, computes & (rank % DP == 3)] *= 1.5
    elif what == "microbatches":
        dur[:, computes] *= random.uniform(0.4, 1.6, (NUM_STEPS, int(computes.sum())))
    else:
        late = np.flatnonzero(program.kind == OpKind.REDUCE_GRAD)[0]
        dur[:, late] *= 100
    return analyse(ran(program, dur))


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("worker", (None, 2, 1)),
        ("stage", (1, None, None)),
        ("replica", (None, None, 3)),
        ("microbatches", (None, None, None)),
        ("communication", (None, None, None)),
    ],
)
def test_cause_is_what_was_made_slow(what: str, where: tuple[int | None, ...]) -> None:
    report = slow(what)
    cause = report.cause
    assert (cause.what, (cause.stage, cause.pp, cause.dp)) == (what, where), report.recovered
    assert report.cause.recovers > 0.5
    if what == "communication":
        assert "reduce_grad" in report.cause.sentence
        assert max(report.by_kind, key=lambda kind: report.by_kind[kind]) == "reduce_grad"


def with_gaps(steps: Steps, stretched: list[float]) -> Steps:
    """The same ops, each step so many times as long: what is between them grows."""
    start = np.rint(steps.start * np.array(stretched)[:, None]).astype(np.int64)
    return replace(steps, start=start, end=start + (steps.end - steps.start))


def varying_messages() -> Steps:
    program = made_program()
    dur, random = usual(program), np.random.default_rng(0)
    messages = np.isin(program.kind, (OpKind.SEND_F, OpKind.RECV_F))
    dur[:, messages] *= np.where(random.uniform(size=(NUM_STEPS, int(messages.sum()))) < 0.1, 60, 1)
    return ran(program, dur)


def test_the_ranks_of_a_slow_link_are_named() -> None:
    program = made_program()
    dur, random = usual(program), np.random.default_rng(0)
    rank, peer = program.lane_rank[program.lane_of] // DP, program.lane_peer[program.lane_of] // DP
    link = (
        np.isin(program.kind, (OpKind.SEND_F, OpKind.RECV_F))
        & (np.minimum(rank, peer) == 1)
        & (np.maximum(rank, peer) == 2)
    )
    link &= program.lane_rank[program.lane_of] % DP == 3
    dur[:, link] *= np.where(random.uniform(size=(NUM_STEPS, int(link.sum()))) < 0.4, 200, 1)
    cause = analyse(ran(program, dur)).cause
    assert cause.what == "communication"
    assert cause.dp == 3
    assert "messages between ranks 1 and 2 of dp 3 take " in cause.sentence


def test_gaps_that_cost_more_than_stragglers_are_the_cause() -> None:
    steps = varying_messages()
    assert analyse(steps).cause.what == "communication"
    report = analyse(with_gaps(steps, [1.2, 1.5, 2.0, 2.5, 3.0]))
    assert next(iter(report.shares)) == report.cause.what == "gaps"
    assert report.cause.recovers == report.shares["gaps"] == pytest.approx(report.gaps, abs=0.02)
    assert report.shares["gaps"] > report.shares["communication"] > 0
    assert "host-bound" in report.cause.sentence
    assert "oversubscribed" in report.cause.sentence
    shortest, longest = (show_time(report.clock, each) for each in (report.shortest, report.longest))
    assert f"steps take from {shortest} to {longest}:" in report.cause.sentence
    assert f"({shortest} to {longest})" in report.in_words


def test_a_few_slow_steps_are_the_cause() -> None:
    program = made_program()
    dur = usual(program)
    dur[3] *= 4
    report = analyse(ran(program, dur))
    assert report.cause.what == "steps", report.shares
    assert "step 3 takes" in report.cause.sentence


def test_gaps_that_cost_less_are_ranked_and_not_the_cause() -> None:
    program = made_program()
    dur, rank = usual(program), rank_of(program)
    dur[:, np.isin(program.kind, (OpKind.F, OpKind.B)) & (rank // DP == 1)] *= 1.5
    report = analyse(with_gaps(ran(program, dur), [1.06] * NUM_STEPS))
    assert list(report.shares)[:2] == ["stage", "gaps"]
    assert report.cause.what == "stage"


def test_layers_to_move_are_told_where_they_are_known() -> None:
    costs = treadle.load_costs("unit")
    options = treadle.LoweringOptions(blocks=("tttt", "tttt", "tttt", "tttttttt"))
    trace = treadle.simulate(treadle.generate("1f1b", pp=4, microbatches=8), costs, options)
    cause = analyse(Steps.of(trace)).cause
    assert (cause.what, cause.stage) == ("stage", 3)
    assert "takes 100% longer than the others" in cause.sentence
    assert "moving 3.0 layers' worth of work elsewhere" in cause.sentence


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_a_slow_stage_is_told_from_the_other_of_its_rank(name: str) -> None:
    costs = treadle.load_costs("unit")
    blocks = ("tttt", "tttt", "tttt", "tttt", "tttt", "tttttttttttt", "tttt", "tttt")
    options = treadle.LoweringOptions(blocks=blocks)
    trace = treadle.simulate(treadle.generate(name, pp=4, microbatches=8), costs, options)
    report = analyse(Steps.of(trace))
    assert (report.cause.what, report.cause.stage) == ("stage", 5)
    assert "would cut the step time by" in report.cause.sentence


def test_transfer_is_the_own_end_less_the_last_start() -> None:
    program = treadle.lower(treadle.generate("1f1b", pp=2, microbatches=1))
    start, end = np.zeros((1, program.num_ops), np.int64), np.full((1, program.num_ops), 50_000_000, np.int64)
    send, receive = (int(np.flatnonzero(program.kind == kind)[0]) for kind in (OpKind.SEND_F, OpKind.RECV_F))
    start[0, send], end[0, send] = 20_000_000, 25_000_000
    end[0, receive] = 26_000_000
    found = transfers(Steps(program, (0,), start, end))
    assert (found[0, send], found[0, receive]) == (5_000_000, 6_000_000)
    start[0, receive] = 30_000_000  # the send ends 5 ms before it starts: a clock that is a little off
    assert transfers(Steps(program, (0,), start, end))[0, send] == -5_000_000
    end[0, send] = 20_000_000  # 10 ms: it says nothing
    assert transfers(Steps(program, (0,), start, end))[0, send] == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_traces_of_our_own_at_both_grains(name: str) -> None:
    """One replica, no tail; chunks, weight halves, overlapped pairs, layers."""
    costs = treadle.load_costs("deepseek-v3-h800")
    schedule = treadle.generate(name, pp=4, microbatches=8)
    for options in (None, treadle.LoweringOptions(layers=2, moe=True)):
        program = treadle.lower(schedule, costs, options)
        trace = treadle.simulate(program, costs, slowness=0.2)
        report = analyse(Steps.of(trace))
        assert report.slowdown == pytest.approx(trace.makespan / report.ideal)
        assert report.gaps == pytest.approx(0, abs=1e-9)
        assert (len(report.by_stage), len(report.by_dp)) == (program.layout.placement.num_stages, 1)


def test_one_rank_and_no_time_at_all() -> None:
    program = treadle.lower(treadle.generate("1f1b", pp=1, microbatches=2))
    report = analyse(Steps.of(treadle.simulate(program, Durations(np.zeros(program.num_ops, np.int64)))))
    assert (report.slowdown, report.cause.what, report.gaps) == (1.0, "none", 0.0)


def test_an_update_has_no_stages(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["simulate-update", "--devices", "2", "--rounds", "2", "-o", str(tmp_path / "update.npz")]
    )
    assert done.exit_code == 0
    with pytest.raises(ValueError, match="this is a weight update, which has no stages; 'treadle simulate' shows"):
        CliRunner().invoke(app, ["why", str(tmp_path / "update.npz")], catch_exceptions=False)


def test_steps_are_chosen_by_number(tmp_path: Path) -> None:
    program = made_program()
    trace = ran(program, usual(program)).trace()
    treadle.save_trace(trace, tmp_path / "trace.npz")
    for text, told in (("7", "names none of the measured ones, 0 to 0"), ("3-x", "are numbers and ranges")):
        with pytest.raises(ValueError, match=told):
            CliRunner().invoke(app, ["why", str(tmp_path / "trace.npz"), "--steps", text], catch_exceptions=False)
    with pytest.raises(ValueError, match=r"a page's name ends in .html, got 'why.pdf'"):
        CliRunner().invoke(app, ["why", str(tmp_path / "trace.npz"), "-o", "why.pdf"], catch_exceptions=False)


def test_waiting_in_a_group_is_on_the_late_lane_only() -> None:
    """A late rank makes the others' receives long; their transfers stay short."""
    program = made_program()
    dur = usual(program)
    dur[:, rank_of(program) == 0] *= 3
    steps = ran(program, dur)
    messages = program.lane_kind[program.lane_of] == LaneKind.RECV
    assert transfers(steps)[:, messages].max() <= 3_000_000
    assert steps.clock == MICROSECONDS
