"""Lowering: what a cell does on its lanes, where weight halves, copies and reductions go, and meshes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import treadle
from tests.support.grid import pairs
from tests.support.paths import GOLDEN
from treadle.costs import UNIT_COSTS, Costs, durations, load_costs
from treadle.ir.execute import execute
from treadle.ir.memory import peaks
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import Program
from treadle.lowering import LoweringOptions, lower
from treadle.passes.layer_lanes import lower_layers
from treadle.passes.layers import Shape
from treadle.passes.mesh import OP_BYTES, spread
from treadle.schedules import SCHEDULES
from treadle.simulator import measure, simulate, steady_idle
from treadle.verifier import verify_program
from treadle.view.lane_rows import lanes_text

DEEPSEEK = load_costs("deepseek-v3-h800")
SHORT = replace(DEEPSEEK, layer={**DEEPSEEK.layer, "mlp_w": 3_540_000})
"""The same with the experts' weight half as long as on one of its two streams: too short to hide its exchange."""
SAVED = {OpKind.ATTN_F: 1, OpKind.MLP_F: 1}


def even(schedule: treadle.Schedule, layers: int = 1, **given: Any) -> Shape:
    return Shape(("t" * layers,) * schedule.placement.num_stages, **given)


def figure(rank: int, *, padded: bool = True, hold: bool = False) -> list[str]:
    """The cells of a rank of the published schedule: P = 4, V = 2, M = 8, as text."""
    schedule = treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=8)
    options = LoweringOptions(layers=1, padded=padded, hold=hold, early=False, offload=True, moe=True)
    program = lower(schedule, DEEPSEEK, options)
    text = lanes_text(program, rank, [str(cell) for cell in schedule.rows[rank]])
    return ["cell" + block for block in text.split("cell")[1:]]


@pytest.mark.parametrize(("name", "cell"), [("warm-up", 4), ("steady", 11), ("cool-down", 18)])
def test_the_three_cells_come_out_as_drawn(name: str, cell: int) -> None:
    """The three panels of the Kimi K2 report's Fig. 7, lane by lane."""
    golden = (GOLDEN / "lanes" / f"{name}.txt").read_text()
    assert figure(rank=1)[cell] == "".join(line + "\n" for line in golden.splitlines() if not line.startswith("##"))


def test_token_counts_are_exchanged_before_a_dispatch_unless_it_is_padded() -> None:
    with_counts, padded = figure(rank=1, padded=False)[11], figure(rank=1)[11]
    assert "  ep       comb' 2.1   counts 7.0   disp 7.0   disp' 2.1   comb 7.0\n" in with_counts
    assert "  host     host 7.0\n" in with_counts
    assert "host" not in padded
    schedule = treadle.generate("1f1b", pp=2, microbatches=2)
    program = lower_layers(schedule, even(schedule))
    dispatch = next(i for i in range(program.num_ops) if program.kind[i] == OpKind.DISPATCH_F)
    host = program.op(program.deps(dispatch)[0])
    assert host.kind is OpKind.HOST
    assert [program.op(dep).kind for dep in program.deps(host.index)] == [OpKind.COUNTS]


def test_a_weight_half_held_back_runs_in_the_next_slot() -> None:
    assert (
        "compute  attn 7.0   attnW 1.1   mlp' 2.1   mlpW 2.1   mlp 7.0   attn' 2.1\n" in figure(rank=1, hold=True)[11]
    )


@pytest.mark.parametrize(
    ("name", "moe", "layers", "hold", "offload"),
    pairs(SCHEDULES, (False, True), (1, 3), (False, True), (False, True)),
)
def test_programs_of_all_schedules_verify_clean(name: str, moe: bool, layers: int, hold: bool, offload: bool) -> None:
    schedule = treadle.generate(name, pp=4, microbatches=8)
    options = LoweringOptions(layers=layers, moe=moe, hold=hold, offload=offload, dp=2, every_gpu=True)
    program = lower(schedule, DEEPSEEK, options)
    report = verify_program(program, durations(program, DEEPSEEK))
    assert report.clean, report


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_op_is_on_its_lane_and_compute_is_all_there(name: str) -> None:
    schedule = treadle.generate(name, pp=4, microbatches=8)
    program = lower_layers(schedule, even(schedule, 2, offload=True))
    kinds = program.lane_kind[program.lane_of]
    assert all(OpKind(int(k)).lane == lane for k, lane in zip(program.kind, kinds, strict=True))
    num = schedule.pp * schedule.vpp * schedule.microbatches_per_pipe * 2
    for part in (OpKind.ATTN_F, OpKind.MLP_F, OpKind.MLP_B, OpKind.ATTN_B, OpKind.MLP_W, OpKind.ATTN_W):
        assert (program.kind == part).sum() == num


def test_stages_of_different_depth() -> None:
    """A surplus of backward layers runs first, one of forward layers last."""
    schedule = treadle.generate("interleaved-overlap", pp=2, vpp=2, microbatches=4)
    program = lower_layers(schedule, Shape(("ttt", "t", "t", "tt"), counts=False))
    text = lanes_text(program, 0, [str(cell) for cell in schedule.rows[0]])
    deep_forward = next(block for block in text.split("cell") if "(F3.0|B0.1)" in block)
    deep_backward = next(block for block in text.split("cell") if "(F3.1|B0.0)" in block)
    tokens = "compute  attn 3.0 L0   mlp' 0.1 L0   mlpW 0.1 L0   mlp 3.0 L0   attn' 0.1 L0   attnW 0.1 L0"
    assert f"{tokens}   attn 3.0 L1   mlp 3.0 L1   attn 3.0 L2   mlp 3.0 L2\n" in deep_forward
    assert "compute  mlp' 0.0 L2   attn' 0.0 L2   mlpW 0.0 L2   attnW 0.0 L2   mlp' 0.0 L1" in deep_backward
    assert verify_program(program, durations(program, UNIT_COSTS)).clean


def test_pipeline_sends_hide_behind_weight_halves_in_cool_down_too() -> None:
    """A lone backward's send starts when its attention's input gradient is there, before its weight halves."""
    schedule = treadle.generate("1f1b", pp=2, microbatches=4)
    program = lower_layers(schedule, even(schedule, 2, moe=False))
    trace = simulate(program, DEEPSEEK)
    for op in range(program.num_ops):
        if program.kind[op] == OpKind.SEND_B:
            made = program.deps(op)[0]
            assert program.op(made).kind is OpKind.ATTN_B
            after = program.op(made + 1)
            assert after.kind in (OpKind.MLP_W, OpKind.ATTN_W)
            assert trace.start[op] < trace.end[after.index]


@pytest.mark.parametrize(("pp_us", "better"), [(300, True), (2000, False)])
def test_where_a_weight_half_is_held_back_is_decided_by_simulation(pp_us: int, better: bool) -> None:
    """With a short weight half holding back gains with 0.3 ms a pipeline message and loses with 2 ms."""
    costs = replace(SHORT, message={**SHORT.message, "send": pp_us * 1000})
    schedule = treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=16)

    def makespan(hold: bool | None) -> int:
        return simulate(
            lower(schedule, costs, LoweringOptions(layers=1, padded=True, hold=hold, moe=True)), costs
        ).makespan

    assert (makespan(True) < makespan(False)) == better
    assert makespan(None) == min(makespan(True), makespan(False))


def test_interior_steady_cells_hardly_idle() -> None:
    """DeepSeek-V3's sub-layer times, 0.3 ms a pipeline message, P = 4, V = 2, M = 16."""
    schedule = treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=16)
    trace = simulate(lower(schedule, DEEPSEEK, LoweringOptions(layers=1, moe=True)), DEEPSEEK)
    assert max(steady_idle(trace)) <= 0.01
    assert max(steady_idle(simulate(lower(schedule, SHORT, LoweringOptions(layers=1, moe=True)), SHORT))) <= 0.01
    held_in = simulate(lower(schedule, SHORT, LoweringOptions(layers=1, hold=False, moe=True)), SHORT)
    assert min(steady_idle(held_in)) > 0.02


def saved_peak(schedule: treadle.Schedule, layers: int, offload: bool) -> float:
    """The largest peak over ranks, in chunks."""
    program = lower_layers(schedule, even(schedule, layers, offload=offload, saved=SAVED, hold_attn_w=True))
    return float(peaks(program, execute(program, durations(program, DEEPSEEK))).size.max()) / (2 * layers)


def test_offload_cuts_the_peak_and_costs_no_time() -> None:
    schedule = treadle.generate("interleaved-overlap", pp=4, vpp=2, microbatches=16)
    assert saved_peak(schedule, 4, offload=False) > 11
    assert saved_peak(schedule, 4, offload=True) < 0.25 * saved_peak(schedule, 4, offload=False)
    with_it, without = (
        simulate(lower(schedule, DEEPSEEK, LoweringOptions(layers=4, offload=offload, moe=True)), DEEPSEEK).makespan
        for offload in (True, False)
    )
    assert with_it <= 1.001 * without


def test_what_is_needed_within_two_cells_stays() -> None:
    schedule = treadle.generate("1f1b", pp=4, microbatches=8)
    program = lower_layers(schedule, even(schedule, 2, offload=True))
    leaves = {(op.lane.rank, op.mb) for i in range(program.num_ops) if (op := program.op(i)).kind is OpKind.OFFLOAD}
    for rank, row in enumerate(schedule.rows):
        for mb in range(8):
            distance = row.index(treadle.ir.B(mb)) - row.index(treadle.ir.F(mb))
            assert ((rank, mb) in leaves) == (distance > 2)
    assert not any(rank == 3 for rank, _ in leaves)


def test_copies_overlap_the_cells_around_them() -> None:
    """The forward of the cell before goes out while the backward of the cell after comes in."""
    steady = figure(rank=1)[11].splitlines()
    assert steady[0] == "cell 11 (F7.0|B2.1)"
    assert steady[-2:] == ["  out      offload 6.0", "  in       onload 3.1"]


def test_gradients_reduce_after_a_chunks_last_weight_half() -> None:
    schedule = treadle.generate("zb-v", pp=2, microbatches=4)
    program = lower_layers(schedule, even(schedule, 2), reduce=True)
    for op in range(program.num_ops):
        if program.kind[op] != OpKind.REDUCE_GRAD:
            continue
        last = program.op(program.deps(op)[0])
        lane = program.lane_of[last.index]
        later = range(last.index + 1, program.lane_ptr[lane + 1])
        assert last.kind in (OpKind.ATTN_W, OpKind.MLP_W)
        assert last.chunk == program.chunk[op]
        assert all(program.chunk[i] != last.chunk or not program.op(i).kind.name.endswith("_W") for i in later)


def test_dualpipes_copies_of_a_stage_reduce_together() -> None:
    program = lower_layers(treadle.generate("dualpipe", pp=4, microbatches=8), Shape(("t",) * 4), reduce=True)
    lanes = np.flatnonzero(program.lane_kind == LaneKind.DP)
    groups = {int(program.lane_rank[lane]): int(program.lane_group[lane]) for lane in lanes}
    assert groups[0] == groups[3] != groups[1] == groups[2]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_mesh_where_all_are_alike_takes_as_long_as_one_pipeline(name: str) -> None:
    schedule = treadle.generate(name, pp=4, microbatches=8)
    folded = lower(schedule, DEEPSEEK, LoweringOptions(layers=2, ep=2, dp=3, moe=True))
    whole = lower(schedule, DEEPSEEK, LoweringOptions(layers=2, ep=2, dp=3, every_gpu=True, moe=True))
    assert whole.num_ranks == 6 * folded.num_ranks
    assert simulate(whole, DEEPSEEK).makespan == simulate(folded, DEEPSEEK).makespan
    assert simulate(whole, DEEPSEEK, slowness=0.05).makespan > simulate(folded, DEEPSEEK).makespan


def test_a_mesh_joins_expert_groups_and_reductions() -> None:
    one = lower_layers(treadle.generate("1f1b", pp=2, microbatches=2), Shape(("t", "t")), reduce=True)
    program = spread(one, ep=2, dp=2)
    ptr, lanes = program.groups
    by_kind: dict[LaneKind, list[set[int]]] = {}
    for start, stop in pairwise(ptr):
        members = lanes[start:stop]
        kind = LaneKind(int(program.lane_kind[members[0]]))
        by_kind.setdefault(kind, []).append({int(rank) for rank in program.lane_rank[members]})
    assert by_kind[LaneKind.EP] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert by_kind[LaneKind.DP] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert {0, 4} in by_kind[LaneKind.SEND]
    assert {3, 7} in by_kind[LaneKind.SEND]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", [1, 3, 7])
def test_unit_costs_give_every_layer_a_unit(name: str, layers: int) -> None:
    """A chunk's F, I and W take as many units as it has layers."""
    schedule = treadle.generate(name, pp=4, microbatches=8)
    program = lower(schedule, UNIT_COSTS, LoweringOptions(layers=layers, moe=False))
    busy = {rank.busy for rank in measure(simulate(program, UNIT_COSTS)).ranks}
    assert busy == {3 * layers * UNIT_COSTS.clock.ticks * schedule.vpp * schedule.microbatches_per_pipe}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", [1, 3, 7])
def test_costs_of_a_chunk_are_shared_over_its_layers(name: str, layers: int) -> None:
    """Where costs do not say how many layers a chunk has, what it takes does not depend on that."""
    schedule = treadle.generate(name, pp=4, microbatches=8)
    costs = Costs("chunk", UNIT_COSTS.clock, cells={"f": 1001, "i": 2002, "w": 3003})
    program = lower(schedule, costs, LoweringOptions(layers=layers, moe=False))
    busy = {rank.busy for rank in measure(simulate(program, costs)).ranks}
    assert busy == {6006 * schedule.vpp * schedule.microbatches_per_pipe}


def test_layers_that_cannot_split_do_their_weight_half_in_the_backward() -> None:
    schedule = treadle.generate("zb-h1", pp=2, microbatches=4)
    program = lower(schedule, DEEPSEEK, LoweringOptions(layers=1, split=(), moe=True))
    assert not np.isin(program.kind, (OpKind.MLP_W, OpKind.ATTN_W)).any()
    dur = durations(program, DEEPSEEK)
    backward = dur[program.kind == OpKind.MLP_B]
    assert set(backward) == {DEEPSEEK.layer["mlp_b"] + DEEPSEEK.layer["mlp_w"]}
    assert verify_program(program, dur).clean


def test_peaks_of_the_published_figures() -> None:
    """Activations from F's start to the end of B, or of W, under unit costs."""

    def peak(name: str, pp: int, num_mb: int) -> tuple[float, ...]:
        program = lower(treadle.generate(name, pp=pp, microbatches=num_mb), UNIT_COSTS, LoweringOptions())
        return measure(simulate(program, UNIT_COSTS)).peaks

    assert max(peak("1f1b", 4, 8)) == 4
    assert peak("zb-h1", 4, 8) == (4, 4, 4, 4)
    assert max(peak("interleaved", 4, 8)) == 11
    assert max(peak("interleaved-overlap", 4, 8)) == 12
    assert max(peak("dualpipe", 8, 20)) == 9


def test_a_fraction_kept_after_the_input_half() -> None:
    def peak(kept: float) -> int:
        schedule = treadle.generate("zb-h1", pp=4, microbatches=8)
        program = lower_layers(schedule, even(schedule, saved={OpKind.ATTN_F: 8, OpKind.MLP_F: 8}, kept=kept))
        return int(peaks(program, execute(program, durations(program, UNIT_COSTS))).size[3])

    assert peak(1.0) == 64
    assert peak(0.25) < 40


def test_makespans_of_the_published_figures() -> None:
    """DualPipe P8 M20 takes 66 units, the Kimi K2 report's figure (P4 V2 M8) 57."""

    def makespan(name: str, pp: int, num_mb: int) -> float:
        program: Program = lower(treadle.generate(name, pp=pp, microbatches=num_mb), UNIT_COSTS, LoweringOptions())
        return UNIT_COSTS.clock.show(simulate(program, UNIT_COSTS).makespan)

    assert makespan("dualpipe", 8, 20) == 66
    assert makespan("interleaved-overlap", 4, 8) == 57


def test_a_mesh_is_built_only_if_memory_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = lower(treadle.generate("1f1b", pp=2, microbatches=4), treadle.load_costs("unit"))
    needed = OP_BYTES * 4 * one.num_ops
    monkeypatch.setattr("treadle.passes.mesh.available_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match=rf"8 GPUs as a rank makes {4 * one.num_ops} ops, about .* GiB left; leave"):
        spread(one, ep=1, dp=4)
    assert spread(one, ep=1, dp=1) is one
    for available in (needed, None):
        monkeypatch.setattr("treadle.passes.mesh.available_bytes", lambda told=available: told)
        assert spread(one, ep=1, dp=4).num_ops == 4 * one.num_ops
