"""What traces say: hand-made ones with the answers worked out, published numbers, and perturbations given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.costs import Costs, dump, durations, load_costs
from treadle.ir import Placement
from treadle.ir.execute import execute
from treadle.ir.ops import BACKWARD, FORWARD, LaneKind, OpKind
from treadle.ir.program import NEVER, Layout, Longs, Program
from treadle.ir.trace import MICROSECONDS, Clock, Trace
from treadle.passes.cells import lower_cells
from treadle.schedules import SCHEDULES, generate
from treadle.simulator import simulate
from treadle.simulator.compare import compare
from treadle.simulator.difference import OpGroup
from treadle.simulator.fitting import fit
from treadle.simulator.metrics import Cover, measure
from treadle.simulator.path import critical_path, summarize_path
from treadle.simulator.waiting import without_waiting

TICKS = Clock("tick", 1)
UNIT = load_costs("unit")

Lane = tuple[int, LaneKind, int, list[OpKind]]
"""rank, kind, group, ops"""


def build(lanes: Sequence[Lane], deps: dict[int, list[int]] | None = None, joined: Sequence[int] = ()) -> Program:
    """A program by hand; ops are numbered through the lanes."""
    deps = deps or {}
    kind = np.array([k for lane in lanes for k in lane[3]], np.uint8)
    num = len(kind)
    pairs = np.zeros(num, bool)
    pairs[list(joined)] = True
    by_layer = bool((kind >= OpKind.ATTN_F).any())
    forward, backward = (FORWARD, BACKWARD) if by_layer else ((OpKind.F,), (OpKind.B,))
    layout = Layout(Placement.loop(2), 8, ("t", "t") if by_layer else ("", ""), forward, backward, (OpKind.W,))
    return Program(
        layout=layout,
        kind=kind,
        mb=np.arange(num, dtype=np.int32),
        chunk=np.zeros(num, np.int16),
        layer=np.zeros(num, np.int16),
        cell=np.full(num, NEVER, np.int32),
        launch=np.full(num, NEVER, np.int32),
        size_bytes=np.zeros(num, np.int64),
        joined=pairs,
        lane_ptr=np.cumsum([0, *(len(lane[3]) for lane in lanes)]).astype(np.int64),
        lane_rank=np.array([lane[0] for lane in lanes], np.int32),
        lane_kind=np.array([lane[1] for lane in lanes], np.uint8),
        lane_peer=np.full(len(lanes), NEVER, np.int32),
        lane_group=np.array([lane[2] for lane in lanes], np.int32),
        dep_ptr=np.cumsum([0, *(len(deps.get(op, ())) for op in range(num))]).astype(np.int64),
        dep=np.array([d for op in range(num) for d in deps.get(op, ())], np.int32),
    )


def timed(program: Program, times: Sequence[tuple[int, int]], *, measured: bool = False) -> Trace:
    start, end = np.array(times, np.int64).reshape(-1, 2).T.copy()
    return Trace(program, start, end, TICKS, measured=measured)


def run(program: Program, dur: Sequence[int] | Longs, clock: Clock = TICKS) -> Trace:
    times = execute(program, np.array(dur, np.int64))
    assert times.finished
    return Trace(program, times.start, times.end, clock)


# Busy, hidden, exposed


def test_a_hand_made_trace() -> None:
    """Rank 0 computes in [0 6] and [10 12], communicates in [4 8] and [9 11], copies in [1 3] and [5 9]."""
    lanes: list[Lane] = [
        (0, LaneKind.COMPUTE, -1, [OpKind.F, OpKind.F, OpKind.B]),
        (1, LaneKind.COMPUTE, -1, [OpKind.F, OpKind.B, OpKind.B]),
        (0, LaneKind.SEND, 0, [OpKind.SEND_F, OpKind.SEND_F]),
        (1, LaneKind.RECV, 0, [OpKind.RECV_F, OpKind.RECV_F]),
        (0, LaneKind.RECV, -1, [OpKind.RECV_B]),
        (0, LaneKind.EP, -1, [OpKind.DISPATCH_F]),
        (0, LaneKind.DP, -1, [OpKind.REDUCE_GRAD]),
        (0, LaneKind.OUT, -1, [OpKind.OFFLOAD]),
        (0, LaneKind.IN, -1, [OpKind.ONLOAD]),
        (0, LaneKind.HOST, -1, [OpKind.HOST]),
    ]
    compute = [(0, 4), (4, 6), (10, 12), (3, 5), (3, 5), (6, 14)]
    messages = [(4, 7), (12, 12), (4, 7), (12, 12), (9, 11)]
    trace = timed(build(lanes, joined=[4]), [*compute, *messages, (6, 8), (9, 10), (1, 3), (5, 9), (6, 13)])
    metrics = measure(trace)
    assert (metrics.makespan, metrics.num_ops, metrics.clock) == (14, 16, TICKS)
    first, second = metrics.ranks
    assert (first.busy, first.span, first.idle, first.idle_share) == (8, 12, 6, 6 / 14)
    assert first.communication == Cover(hidden=3, exposed=3)
    assert first.copies == Cover(hidden=3, exposed=3)
    assert first.copies.total == 6
    assert (second.busy, second.span, second.idle) == (10, 11, 4)
    assert second.communication == Cover(hidden=2, exposed=1)
    assert metrics.bubble == 4 / 12
    assert metrics.exposed == 2
    assert metrics.peaks == (0, 0)
    assert metrics.as_dict()["ranks"][0]["communication"] == {"hidden": 3, "exposed": 3}


def test_a_rank_without_compute_and_a_program_without_ops() -> None:
    alone = measure(timed(build([(1, LaneKind.SEND, -1, [OpKind.SEND_F])]), [(0, 5)]))
    assert [(rank.busy, rank.span, rank.communication.exposed) for rank in alone.ranks] == [(0, 0, 0), (0, 0, 5)]
    assert alone.bubble == 0
    empty = timed(build([]), [])
    assert measure(empty).ranks == ()
    assert measure(empty).makespan == 0
    assert summarize_path(empty, critical_path(empty)).length == 0


LANE = st.tuples(
    st.sampled_from([LaneKind.COMPUTE, LaneKind.SEND, LaneKind.RECV, LaneKind.EP, LaneKind.DP, LaneKind.OUT]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8),
)


@pytest.mark.slow
@settings(max_examples=200)
@given(ranks=st.lists(st.lists(LANE, min_size=1, max_size=6), min_size=1, max_size=3))
def test_covers_are_what_counting_tick_by_tick_gives(ranks: list[list[tuple[LaneKind, list[tuple[int, int]]]]]) -> None:
    lanes: list[Lane] = []
    times: list[tuple[int, int]] = []
    on = np.zeros((len(ranks), len(LaneKind), 64), bool)
    for rank, mine in enumerate(ranks):
        for kind, ops in mine:
            clock = 0
            for gap, dur in ops:
                times.append((clock + gap, clock + gap + dur))
                on[rank, kind, clock + gap : clock + gap + dur] = True
                clock += gap + dur
            lanes.append((rank, kind, -1, [OpKind.F] * len(ops)))
    metrics = measure(timed(build(lanes), times))
    for rank, got in enumerate(metrics.ranks):
        compute = on[rank, LaneKind.COMPUTE]
        moving = on[rank, [LaneKind.SEND, LaneKind.RECV, LaneKind.EP, LaneKind.DP]].any(axis=0)
        copying = on[rank, LaneKind.OUT]
        assert got.busy == compute.sum()
        assert got.communication == Cover(int((moving & compute).sum()), int((moving & ~compute).sum()))
        assert got.copies == Cover(int((copying & compute).sum()), int((copying & ~compute).sum()))


def test_a_lane_out_of_order_is_refused() -> None:
    program = build([(0, LaneKind.COMPUTE, -1, [OpKind.F, OpKind.F])])
    with pytest.raises(ValueError, match=r"rank 0 compute: F1\.0 starts at 0 .*, but F0\.0 before it at 1"):
        measure(timed(program, [(1, 3), (0, 2)]))
    with pytest.raises(ValueError, match=r"F1\.0 .* ends at 3 tick; a lane's ops start in their order"):
        measure(timed(program, [(1, 3), (4, 3)]))


def test_waiting_for_a_late_sender_is_no_communication() -> None:
    """The receive is recorded from 0, the send that it matches takes [6 8]: the message took 2."""
    lanes: list[Lane] = [
        (0, LaneKind.COMPUTE, -1, [OpKind.F]),
        (1, LaneKind.COMPUTE, -1, [OpKind.F]),
        (0, LaneKind.SEND, 0, [OpKind.SEND_F]),
        (1, LaneKind.RECV, 0, [OpKind.RECV_F]),
    ]
    program = build(lanes, {1: [3], 2: [0]})
    trace = timed(program, [(1, 6), (9, 12), (6, 8), (0, 8)], measured=True)
    assert without_waiting(trace).start.tolist() == [1, 9, 6, 6]
    assert measure(trace).makespan == 12
    assert [rank.communication.exposed for rank in measure(trace).ranks] == [2, 2]
    assert measure(replace(trace, measured=False)).ranks[1].communication.exposed == 8
    assert fit(trace).message == {"send": 2}
    path = critical_path(trace)
    assert path == [0, 3, 1]
    summary = summarize_path(trace, path)
    assert (summary.gaps, summary.num_gaps) == (2, 2)  # before the first op, and between the receive and its reader
    assert summary.by_kind == {"f": 8, "recv_f": 2}
    assert summary.length == 12


def test_early_posted_receives_stay_in_order_without_their_waiting() -> None:
    """The second message took 6 by its send, of which the lane was busy with the first one until 10."""
    lanes: list[Lane] = [
        (0, LaneKind.SEND, 0, [OpKind.SEND_F, OpKind.SEND_F]),
        (1, LaneKind.RECV, 0, [OpKind.RECV_F, OpKind.RECV_F]),
    ]
    trace = timed(build(lanes), [(9, 10), (10, 16), (0, 10), (0, 11)], measured=True)
    assert without_waiting(trace).start[2:].tolist() == [9, 10]


# The critical path


def test_the_path_of_one_micro_batch() -> None:
    program = lower_cells(generate("1f1b", pp=2, microbatches=1))
    costs = Costs("", TICKS, cells={"f": 3, "b": 5}, message={"send": 2})
    trace = simulate(program, costs)
    path = critical_path(trace)
    assert [str(program.op(op)) for op in path] == [
        "F0.0",
        "receive F0.0 from rank 0",
        "F0.0",
        "B0.0",
        "receive B0.0 from rank 1",
        "B0.0",
    ]
    summary = summarize_path(trace, path)
    assert summary.length == trace.makespan == 20
    assert summary.by_kind == {"f": 6, "b": 10, "recv_f": 2, "recv_b": 2}
    assert summary.by_lane == {"compute": 16, "recv": 4}
    assert summary.by_rank == {0: 3 + 2 + 5, 1: 2 + 3 + 5}
    assert (summary.num_ops, summary.num_hops, summary.gaps, summary.num_gaps) == (6, 2, 0, 0)


def test_the_path_through_a_pair_takes_the_need_of_either_half() -> None:
    """Op 3 needs the pair's forward half; the pair started when what its backward half needs had ended."""
    lanes: list[Lane] = [
        (0, LaneKind.COMPUTE, -1, [OpKind.F, OpKind.F, OpKind.B, OpKind.W]),
        (0, LaneKind.EP, -1, [OpKind.DISPATCH_F]),
        (0, LaneKind.DP, -1, [OpKind.REDUCE_GRAD]),
    ]
    trace = run(build(lanes, {2: [4], 5: [1]}, joined=[2]), [1, 4, 4, 1, 7, 2])
    path = critical_path(trace)
    assert path == [4, 1, 5]
    assert summarize_path(trace, path).by_kind == {"dispatch_f": 7, "fb": 4, "reduce_grad": 2}


def test_the_path_through_a_collective_takes_the_need_of_its_last_member() -> None:
    compute: list[Lane] = [(rank, LaneKind.COMPUTE, -1, [OpKind.ATTN_F, OpKind.MLP_F]) for rank in range(3)]
    experts: list[Lane] = [(rank, LaneKind.EP, 0, [OpKind.DISPATCH_F]) for rank in range(3)]
    program = build([*compute, *experts], {6: [0], 7: [2], 8: [4], 1: [6], 3: [7], 5: [8]})
    trace = run(program, [1, 9, 2, 1, 5, 1, 2, 3, 1])
    path = critical_path(trace)
    assert path == [4, 6, 1]  # attention of rank 2 holds up the dispatch of all, and rank 0's experts take longest
    assert summarize_path(trace, path).by_rank == {2: 5, 0: 3 + 9}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_predicted_path_has_no_gaps(name: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        program = lower_cells(generate(name, pp=4, microbatches=8))
        f, i, w, send = (int(x) for x in rng.integers(1, 50, 4))
        trace = simulate(program, Costs("", TICKS, cells={"f": f, "i": i, "w": w}, message={"send": send}))
        path = critical_path(trace)
        assert trace.start[path[0]] == 0
        assert (trace.end[path[:-1]] == trace.start[path[1:]]).all()
        summary = summarize_path(trace, path)
        assert summary.gaps == 0
        assert summary.length == trace.makespan
        assert all(sum(t.values()) == trace.makespan for t in (summary.by_kind, summary.by_lane, summary.by_rank))


# Formulas and published numbers


@pytest.mark.parametrize(("pp", "num_mb"), [(1, 4), (2, 1), (4, 3), (4, 8), (8, 24), (16, 48)])
def test_idle_of_1f1b(pp: int, num_mb: int) -> None:
    metrics = measure(simulate(lower_cells(generate("1f1b", pp=pp, microbatches=num_mb)), UNIT))
    assert [rank.idle for rank in metrics.ranks] == [(pp - 1) * 3 * UNIT.clock.ticks] * pp
    assert metrics.bubble == pytest.approx((pp - 1) / (num_mb + pp - 1))


@pytest.mark.parametrize(("pp", "vpp", "num_mb"), [(2, 2, 2), (4, 2, 8), (4, 3, 16), (8, 2, 16), (8, 4, 32)])
def test_idle_of_interleaved(pp: int, vpp: int, num_mb: int) -> None:
    """Each chunk takes a V-th of the rank's F and B, so the bubble is a V-th of 1F1B's."""
    cells = {name: ticks // vpp for name, ticks in UNIT.cells.items() if name != "layers"}
    program = lower_cells(generate("interleaved", pp=pp, vpp=vpp, microbatches=num_mb))
    metrics = measure(simulate(program, replace(UNIT, cells=cells)))
    assert [rank.idle for rank in metrics.ranks] == [(pp - 1) * 3 * UNIT.clock.ticks // vpp] * pp


ZERO_BUBBLE = [
    (8, 24, 18522, 18086, 9337, 601, 0.2431),
    (8, 32, 18513, 18086, 9331, 626, 0.1985),
    (8, 64, 18546, 18097, 9321, 762, 0.1240),
    (8, 24, 29718, 29444, 19927, 527, 0.2347),
    (8, 32, 29802, 29428, 19530, 577, 0.1898),
    (8, 64, 29935, 29621, 19388, 535, 0.1091),
    (16, 48, 11347, 11248, 8132, 377, 0.2552),
    (16, 64, 11307, 11254, 8101, 379, 0.2082),
    (16, 128, 11325, 11308, 8109, 378, 0.1251),
    (32, 96, 10419, 10207, 7715, 408, 0.2646),
    (32, 128, 10408, 10204, 7703, 408, 0.2168),
    (32, 256, 10402, 10248, 7698, 460, 0.1352),
]
"""P, M, the measured T_F, T_B, T_W and T_comm in us, and the bubble rate of 1F1B.

Zero Bubble Pipeline Parallelism (arXiv 2401.10241), its tables of profiled times and of bubble rates.
"""


@pytest.mark.parametrize(("pp", "num_mb", "f", "i", "w", "send", "bubble"), ZERO_BUBBLE)
def test_published_bubble_rates(pp: int, num_mb: int, f: int, i: int, w: int, send: int, bubble: float) -> None:
    ticks = MICROSECONDS.ticks
    cells = {"f": f * ticks, "i": i * ticks, "w": w * ticks}
    costs = Costs("", MICROSECONDS, cells=cells, message={"send": send * ticks})
    metrics = measure(simulate(lower_cells(generate("1f1b", pp=pp, microbatches=num_mb)), costs))
    assert round(metrics.bubble, 4) == bubble


def test_makespan_of_interleaved_overlap() -> None:
    """T = vP(f+b) + (vM-(v-1)P-1)fb, and each rank's idle time, with max(f, b) <= fb <= f+b and P a divisor of M."""
    rng = np.random.default_rng(20)
    for _ in range(200):
        pp, vpp, rounds = int(rng.integers(1, 7)), int(rng.integers(1, 5)), int(rng.integers(1, 5))
        f, b = (int(x) for x in rng.integers(1, 100, 2))
        fb = int(rng.integers(max(f, b), f + b + 1))
        num_mb = rounds * pp
        program = lower_cells(generate("interleaved-overlap", pp=pp, vpp=vpp, microbatches=num_mb))
        metrics = measure(simulate(program, Costs("", TICKS, cells={"f": f, "b": b, "fb": fb})))
        assert metrics.makespan == vpp * pp * (f + b) + (vpp * num_mb - (vpp - 1) * pp - 1) * fb
        if rounds >= 2:
            idle = [(pp - 1) * (f + b) - 2 * (pp - 1 - rank) * (f + b - fb) for rank in range(pp)]
            assert [rank.idle for rank in metrics.ranks] == idle


# Comparing


COSTS = Costs("base", MICROSECONDS, cells={"f": 90_000, "i": 80_000, "w": 50_000}, message={"send": 7_000})
KIND = {"f": 1.5, "b": 0.8, "send": 3.0}
RANK = np.array([1.0, 1.25, 0.9, 2.0])


def one_f_one_b() -> Program:
    return lower_cells(generate("1f1b", pp=4, microbatches=32))


def changed(factor: dict[str, float]) -> Costs:
    cells = {name: round(COSTS.cell(name) * factor[name]) for name in ("f", "b")}
    return replace(COSTS, cells=cells, message={"send": round(COSTS.message["send"] * factor["send"])})


def as_measured(program: Program, dur: Longs) -> Trace:
    """As a runtime records it: ranks start at some time of day, and receives from when they are posted."""
    times = execute(program, dur)
    start, opens = times.start.copy(), np.zeros(program.num_ops, bool)
    receives = np.isin(program.lane_kind, [LaneKind.RECV])[program.lane_of]
    opens[program.lane_ptr[:-1]] = True
    start[receives & opens] = 0
    behind = np.flatnonzero(receives & ~opens)
    start[behind] = times.end[behind - 1]
    return Trace(program, start + 10**15, times.end + 10**15, measured=True)


def ratios(groups: Sequence[OpGroup]) -> dict[str, float]:
    return {group.name: group.ratio for group in groups if group.ratio is not None}


def test_rows_are_against_the_first() -> None:
    names = ("1f1b", "interleaved", "zb-h1")
    traces = [(name, simulate(lower_cells(generate(name, pp=4, microbatches=8)), UNIT)) for name in names]
    table = compare(traces)
    assert [row.name for row in table.rows] == list(names)
    assert table.ops is None
    assert table.why_not == "op by op takes two traces, got 3"
    first, other, _ = table.rows
    assert (first.makespan.ratio, first.makespan.difference, first.bubble.difference) == (1, 0, 0)
    assert other.makespan.value == other.metrics.makespan == traces[1][1].makespan
    assert other.makespan.ratio == traces[1][1].makespan / traces[0][1].makespan
    assert other.bubble.difference == other.metrics.bubble - first.metrics.bubble
    assert other.exposed.ratio is None  # communication is free, and the ratio to nothing is nothing
    assert table.as_dict()["rows"][0]["makespan"] == {"value": 33, "difference": 0, "ratio": 1}


def test_clocks_and_nothing_are_refused() -> None:
    program = one_f_one_b()
    with pytest.raises(ValueError, match=r"'plan' is in unit .* and 'run' in us .*; .* costs of one unit"):
        compare([("plan", simulate(program, UNIT)), ("run", simulate(program, COSTS))])
    with pytest.raises(ValueError, match="at least one trace"):
        compare([])


def test_other_programs_are_compared_as_a_whole_only() -> None:
    one, more = (lower_cells(generate("1f1b", pp=4, microbatches=m)) for m in (8, 16))
    assert "ops" in compare([("a", simulate(one, UNIT)), ("b", simulate(more, UNIT))]).why_not
    mb = one.mb.copy()
    mb[3] += 1
    renamed = compare([("a", simulate(one, UNIT)), ("b", simulate(replace(one, mb=mb), UNIT))])
    assert renamed.ops is None
    assert renamed.why_not == "the programs differ: mb of op 3, and of 1 in all"
    again = lower_cells(generate("1f1b", pp=4, microbatches=8))
    assert compare([("a", simulate(one, UNIT)), ("b", simulate(again, UNIT))]).ops is not None


def test_factors_by_kind_are_given_back() -> None:
    program = one_f_one_b()
    ops = compare([("a", simulate(program, COSTS)), ("b", simulate(program, changed(KIND)))]).ops
    assert ops is not None
    assert ratios(ops.by_kind) == {
        "f": 1.5, "b": 0.8, "send_f": 3.0, "send_b": 3.0, "recv_f": 3.0, "recv_b": 3.0,
    }  # fmt: skip
    forward = next(group for group in ops.by_kind if group.name == "f")
    assert (forward.num_ops, forward.duration.median, forward.duration.mean) == (128, 45_000, 45_000)
    assert forward.duration.total == 128 * 45_000
    assert ratios(ops.by_lane)["send"] == 3.0
    assert ops.outliers == ()
    assert {cause.group.kind for cause in ops.causes[:4]} == {"f"}
    assert sum(cause.share for cause in ops.causes) >= 0.9


def test_factors_by_rank_are_given_back() -> None:
    program = one_f_one_b()
    free = replace(COSTS, message={})
    slow = run(program, durations(program, free, slowness=RANK), MICROSECONDS)
    ops = compare([("a", simulate(program, free)), ("b", slow)]).ops
    assert ops is not None
    assert ratios(ops.by_rank) == {f"rank {rank}": factor for rank, factor in enumerate(RANK)}
    assert [cause.group.name for cause in ops.causes[:2]] == ["b on rank 3", "f on rank 3"]


def test_factors_by_kind_and_rank_are_given_back() -> None:
    program = one_f_one_b()
    slow = run(program, durations(program, changed(KIND), slowness=RANK), MICROSECONDS)
    ops = compare([("a", simulate(program, COSTS)), ("b", slow)]).ops
    assert ops is not None
    found = ratios(ops.by_kind_and_rank)
    for rank, factor in enumerate(RANK):
        for kind in ("f", "b"):
            assert found[f"{kind} on rank {rank}"] == pytest.approx(KIND[kind] * factor)


def test_factors_are_given_back_through_jitter_and_waiting() -> None:
    program = one_f_one_b()
    rng = np.random.default_rng(3)
    slow = durations(program, changed(KIND), slowness=RANK)
    messages = program.lane_group[program.lane_of] >= 0
    slow[messages] = changed(KIND).message["send"]  # a slow rank computes slowly; its messages are as fast as others'
    dur = (slow * rng.lognormal(0, 0.01, len(slow))).astype(np.int64)
    measured = as_measured(program, dur)
    table = compare([("predicted", simulate(program, COSTS)), ("measured", measured)])
    ops = table.ops
    assert ops is not None
    found = {(group.kind, group.rank): group for group in ops.by_kind_and_rank}
    for rank, factor in enumerate(RANK):
        for kind in ("f", "b"):
            group = found[kind, rank]
            median = 1 + group.duration.median / COSTS.cell(kind)
            assert median == pytest.approx(KIND[kind] * factor, rel=0.01)
    assert all(ratio == pytest.approx(3, rel=0.02) for name, ratio in ratios(ops.by_kind).items() if "_" in name)
    assert table.rows[1].metrics.ranks == measure(run(program, dur)).ranks  # as if nothing had been posted early
    assert ops.by_rank[0].start.median < measured.makespan  # starts count from each trace's own first
    path = summarize_path(measured, critical_path(measured))
    assert sum(path.by_kind.values()) + path.gaps == path.length == measured.makespan
    assert path.gaps == 0


def test_an_op_that_stands_out_is_named() -> None:
    program = one_f_one_b()
    dur = durations(program, COSTS)
    rng = np.random.default_rng(4)
    second = (dur * rng.normal(1.2, 0.01, len(dur))).astype(np.int64)
    second[17], second[40] = 3 * dur[17], dur[40] // 4
    ops = compare([("a", run(program, dur)), ("b", run(program, second))]).ops
    assert ops is not None
    assert [outlier.op for outlier in ops.outliers[:2]] == [17, 40]
    worst = ops.outliers[0]
    assert worst.label == str(program.op(17))
    assert (worst.rank, worst.first, worst.second, worst.ratio) == (0, dur[17], 3 * dur[17], 3.0)
    assert worst.usual == pytest.approx(1.2, abs=0.01)
    assert len(ops.outliers) <= 20


# Fitting


def reloaded(costs: Costs, tmp_path: Path) -> Costs:
    path = tmp_path / "fitted.toml"
    path.write_text(dump(costs))
    return load_costs(str(path))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-overlap", "zb-h1", "dualpipe"])
def test_fitted_costs_predict_the_same_trace(name: str, tmp_path: Path) -> None:
    program = lower_cells(generate(name, pp=4, microbatches=8))
    cells = {"f": 90_001, "i": 80_017, "w": 50_003, "fb": 170_011}
    trace = simulate(program, replace(COSTS, cells=cells))
    costs = fit(trace)
    assert reloaded(costs, tmp_path) == costs
    assert costs.message == COSTS.message
    again = simulate(program, costs)
    assert (again.start == trace.start).all()
    assert (again.end == trace.end).all()
    if name == "interleaved-overlap":
        assert costs.cells == {"f": 90_001, "b": 80_017 + 50_003, "fb": 170_011}


def test_fitting_through_jitter_and_waiting() -> None:
    program = lower_cells(generate("interleaved-overlap", pp=4, microbatches=32))
    costs = Costs("", MICROSECONDS, cells={"f": 90_000, "b": 130_000, "fb": 180_000}, message={"send": 7_000})
    dur = durations(program, costs)
    jitter = np.random.default_rng(5).lognormal(0, 0.05, len(dur))
    fitted = fit(as_measured(program, (dur * jitter).astype(np.int64)))
    for name, ticks in costs.cells.items():
        wider = 0.05 if name == "fb" else 0.02  # a pair takes the longer of its halves' jitter
        assert fitted.cells[name] == pytest.approx(ticks, rel=wider)
    assert fitted.message["send"] == pytest.approx(7_000, rel=0.05)


def test_fitting_at_the_grain_of_layers_keeps_sizes(tmp_path: Path) -> None:
    lanes: list[Lane] = [
        (0, LaneKind.COMPUTE, -1, [OpKind.ATTN_F, OpKind.MLP_F, OpKind.ATTN_F]),
        (0, LaneKind.EP, -1, [OpKind.DISPATCH_F, OpKind.COMBINE_F, OpKind.COMBINE_B]),
        (0, LaneKind.OUT, -1, [OpKind.OFFLOAD]),
    ]
    program = build(lanes)
    saved = {OpKind.ATTN_F: 100, OpKind.MLP_F: 50}
    sizes = np.array([0, 0, 0, 64, 32, 32, 150])
    program = replace(program, layout=replace(program.layout, saved=saved), size_bytes=sizes)
    costs = fit(replace(run(program, [4, 6, 8, 3, 2, 5, 9], MICROSECONDS), about="by hand"))
    assert costs.cells == {}
    assert costs.layer == {"attn_f": 6, "dispatch_f": 3, "mlp_f": 6, "combine_f": 2, "combine_b": 5}
    assert costs.message == {"offload": 9}
    assert costs.saved_bytes == {"attn": 100, "mlp": 50}
    assert costs.moved_bytes == {"dispatch": 64, "combine": 32}
    assert costs.about == "medians of the durations of: by hand"
    assert reloaded(costs, tmp_path) == costs
