"""One model under every schedule: stages take as long as their layers, hold what their layers save, and add up."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

import treadle
from treadle.costs import UNIT_COSTS, Costs, durations, parse
from treadle.ir.execute import execute
from treadle.ir.memory import peaks
from treadle.ir.ops import OpKind
from treadle.ir.placement import Placement
from treadle.ir.program import Program
from treadle.ir.trace import Clock
from treadle.lowering import LoweringOptions, lower
from treadle.passes.cells import lower_cells
from treadle.passes.cut import common_layers, cut_layers
from treadle.schedules import SCHEDULES
from treadle.simulator import compare, fit, measure, simulate
from treadle.verifier import verify_program

TICKS = Clock("tick", 1)
UNIT = UNIT_COSTS.clock.ticks
COSTS = Costs(
    "layered",
    TICKS,
    cells={"layers": 1, "f": 100, "i": 90, "w": 60, "fb": 170},
    ends={"embed_f": 7, "embed_b": 11, "head_f": 13, "head_b": 17, "head_w": 19},
    message={"send": 5},
    saved_bytes={"attn": 3, "mlp": 4, "embed": 50, "head": 1000},
)


def held(name: str, num_layers: int, costs: Costs = UNIT_COSTS, pp: int = 4, num_mb: int = 16) -> Program:
    schedule = treadle.generate(name, pp=pp, microbatches=num_mb)
    return lower(schedule, costs, LoweringOptions(model_layers=num_layers))


# Cutting


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7, 8, 16])
@pytest.mark.parametrize("more", [0, 1, 3, 6, 57])
def test_stages_are_even_and_earlier_ones_have_one_more(num_stages: int, more: int) -> None:
    layers = cut_layers(num_stages + more, num_stages)
    assert len(layers) == num_stages
    assert sum(layers) == num_stages + more
    assert max(layers) - min(layers) <= 1
    assert list(layers) == sorted(layers, reverse=True)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_layers", range(8, 25))
def test_ranks_of_every_placement_have_even_shares(name: str, num_layers: int) -> None:
    program = held(name, num_layers, num_mb=8)
    shares = [sum(program.layout.layers[stage] for stage in row) for row in program.layout.placement.stages]
    assert max(shares) - min(shares) <= (
        2 if name == "dualpipe" else 1
    )  # both copies of a stage may be on a rank's side


def test_too_few_layers_are_refused_with_what_works() -> None:
    with pytest.raises(ValueError, match="a model of 6 layers cannot be cut into 8 stages; it needs at least 8 layers"):
        held("interleaved", 6)
    with pytest.raises(ValueError, match="at least 1 layer, got 0"):
        held("1f1b", 0)
    with pytest.raises(ValueError, match="got layers 2 and model_layers 8; leave out all but one"):
        LoweringOptions(layers=2, model_layers=8, moe=True)


# Times


def times_by_stage(program: Program, costs: Costs, kind: OpKind) -> dict[int, set[int]]:
    """What an op of this kind takes, by stage, outside of overlapped pairs."""
    dur = durations(program, costs)
    paired = program.joined | np.r_[program.joined[1:], False]
    found: dict[int, set[int]] = {}
    for op in np.flatnonzero((program.kind == kind) & ~paired):
        rank, chunk = int(program.lane_rank[program.lane_of[op]]), int(program.chunk[op])
        found.setdefault(program.layout.placement.stages[rank][chunk], set()).add(int(dur[op]))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_layers", [8, 11, 16, 61])
def test_stages_add_up_to_the_model(name: str, num_layers: int) -> None:
    """Over the stages, a micro-batch's forward and backward take what the model takes, however it is cut."""
    program = held(name, num_layers, COSTS)
    ends = COSTS.ends
    whole = {
        OpKind.F: 100 * num_layers + ends["embed_f"] + ends["head_f"],
        OpKind.B: 150 * num_layers + ends["embed_b"] + ends["head_b"] + ends["head_w"],
        OpKind.I: 90 * num_layers + ends["embed_b"] + ends["head_b"],
        OpKind.W: 60 * num_layers + ends["head_w"],
    }
    seen = 0
    for kind, total in whole.items():
        by_stage = times_by_stage(program, COSTS, kind)
        if len(by_stage) < program.layout.placement.num_stages:
            continue  # the schedule has no such cells, or not of every stage
        assert all(len(times) == 1 for times in by_stage.values())
        assert sum(min(times) for times in by_stage.values()) == total
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_layers", [8, 24])
def test_it_is_what_costs_scaled_by_hand_give(name: str, num_layers: int) -> None:
    """Stages of n layers each, without ends: as chunks that take n times as long."""
    schedule = treadle.generate(name, pp=4, microbatches=16)
    n = num_layers // schedule.placement.num_stages
    by_hand = Costs("", TICKS, cells={"f": 100 * n, "i": 90 * n, "w": 60 * n, "fb": 170 * n}, message=COSTS.message)
    costs = Costs("", TICKS, cells=COSTS.cells, message=COSTS.message)
    chunks, layered = simulate(lower_cells(schedule), by_hand), simulate(held(name, num_layers, costs), costs)
    assert np.array_equal(layered.start, chunks.start)
    assert np.array_equal(layered.end, chunks.end)


def test_an_overlapped_cell_of_uneven_stages() -> None:
    """Layers overlap one by one; what one side has more of, and the model's ends, run alone."""
    program = held("dualpipe", 7, COSTS, num_mb=16)  # stages of 2, 2, 2 and 1 layers
    dur, seen = durations(program, COSTS), set()
    for op in np.flatnonzero(program.joined):
        rank = int(program.lane_rank[program.lane_of[op]])
        stages = [program.layout.placement.stages[rank][int(program.chunk[half])] for half in (op - 1, op)]
        forward, backward = stages if program.kind[op - 1] == OpKind.F else stages[::-1]
        seen.add((forward, backward))
        ends = {0: 7, 3: 13}.get(forward, 0) + {0: 11, 3: 17 + 19}.get(backward, 0)
        layers = {(0, 3): 170 + 100, (3, 0): 170 + 150, (1, 2): 340, (2, 1): 340}[forward, backward]
        assert dur[op] == dur[op - 1] == layers + ends
    assert seen == {(0, 3), (3, 0), (1, 2), (2, 1)}


def published_idle(name: str, placement: Placement, rank: int) -> tuple[Fraction, bool]:
    """What `bubble` of a schedule's FAMILY says that a rank idles, and whether it may be less.

    In times of a rank's whole share of the model: F = I = W = 1, a pair as long as its halves.
    """
    text = SCHEDULES[name].bubble
    at_most, chunk = text.startswith("at most "), "in times of one chunk" in text
    written = re.split(r" where | in times |;", text.removeprefix("at most "))[0]
    product = re.sub(r"(?<=[\w)])\s*(?=\()|(?<=\))(?=\w)|(?<=\d)(?=[A-Za-z])", "*", written)
    times = {"F": 1, "I": 1, "W": 1, "B": 2, "FB": 3}
    sizes = {"P": placement.pp, "V": placement.vpp, "M": 4 * placement.pp, "r": rank}
    values = {letter: Fraction(value) for letter, value in {**times, **sizes}.items()}
    found = Fraction(eval(product, {"__builtins__": {}}, values))
    return found * (Fraction(placement.pp, placement.num_stages) if chunk else 1), at_most


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "num_layers"), [(2, 4), (4, 8), (4, 24), (8, 48)])
def test_idle_time_is_the_published_formula_for_one_model(name: str, pp: int, num_layers: int) -> None:
    """A rank's share of the model takes num_layers / pp units forward, whatever the schedule cuts it into."""
    program = held(name, num_layers, pp=pp, num_mb=4 * pp)
    metrics = measure(simulate(program, UNIT_COSTS))
    share, placement = Fraction(num_layers, pp) * UNIT, program.layout.placement
    idle, at_most = min(published_idle(name, placement, rank) for rank in range(pp))
    least = min(rank.idle for rank in metrics.ranks)
    assert least <= idle * share
    assert least >= (idle - Fraction(1, placement.vpp) if at_most else idle) * share
    assert {rank.busy for rank in metrics.ranks} == {3 * share * 4 * pp}


def test_interleaving_beats_1f1b_where_the_model_is_held() -> None:
    names = ["1f1b", "interleaved", "zb-v", "dualpipev"]
    layers = common_layers(treadle.generate(name, pp=4, microbatches=16).placement.num_stages for name in names)
    compared = compare([(name, simulate(held(name, layers), UNIT_COSTS)) for name in names])
    assert compared.held == "same for all: 8 layers, 4 ranks, 16 micro-batches"
    first, *others = compared.rows
    assert [row.makespan.ratio for row in others] == [105 / 114, 99 / 114, 102 / 114]
    assert all(row.metrics.bubble < first.metrics.bubble for row in others)
    assert [(row.metrics.peak, row.metrics.peak_unit) for row in compared.rows] == [
        (8, "layers"),
        (11, "layers"),
        (8, "layers"),
        (9, "layers"),
    ]


# Memory


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_layers", [8, 11, 13])
def test_peaks_are_those_of_a_replay(name: str, num_layers: int) -> None:
    """Add and subtract what each cell's layers, and the ends, save, in order of time, giving back first."""
    program = held(name, num_layers, COSTS)
    times = execute(program, durations(program, COSTS))
    layout = program.layout
    events: dict[int, Counter[int]] = {rank: Counter() for rank in range(program.num_ranks)}
    halved = {(op.lane.rank, op.mb, op.chunk) for op in map(program.op, range(program.num_ops)) if op.kind is OpKind.W}
    for op in map(program.op, range(program.num_ops)):
        if op.kind > OpKind.W:
            continue
        stage = layout.placement.stages[op.lane.rank][op.chunk]
        size = 7 * layout.layers[stage] + (50 if stage == 0 else 0) + (1000 if stage == len(layout.layers) - 1 else 0)
        if op.kind is OpKind.F:
            events[op.lane.rank][int(times.start[op.index])] += size
        elif op.kind is not OpKind.I or (op.lane.rank, op.mb, op.chunk) not in halved:
            events[op.lane.rank][int(times.end[op.index])] -= size
    most = []
    for changes in events.values():
        totals = np.cumsum([changes[time] for time in sorted(changes)])
        most.append(int(totals.max()))
    assert list(peaks(program, times).size) == most
    assert layout.saved_unit == "bytes"
    metrics = measure(treadle.Trace(program, times.start, times.end, TICKS))
    assert (metrics.peaks, metrics.peak_unit) == (tuple(most), "bytes")


def test_what_peaks_count() -> None:
    schedule = treadle.generate("1f1b", pp=4, microbatches=8)
    silent = Costs("silent", TICKS, cells=COSTS.cells)
    for costs, options, want in (
        (silent, LoweringOptions(), ((4, 3, 2, 1), "activations")),
        (silent, LoweringOptions(model_layers=8), ((8, 6, 4, 2), "layers")),
        (silent, LoweringOptions(model_layers=8, by_layer=True, moe=False), ((8, 6, 4, 2), "layers")),
        (COSTS, LoweringOptions(), ((4, 3, 2, 1), "activations")),
        (COSTS, LoweringOptions(layers=2, moe=False, embedding=False, head=False), ((56, 42, 28, 14), "bytes")),
        (COSTS, LoweringOptions(model_layers=8, embedding=False, head=False), ((56, 42, 28, 14), "bytes")),
    ):
        metrics = measure(simulate(lower(schedule, costs, options), costs))
        assert (metrics.peaks, metrics.peak_unit) == want


def test_a_limit_needs_bytes() -> None:
    schedule, silent = treadle.generate("1f1b", pp=2, microbatches=4), Costs("silent", TICKS, cells=COSTS.cells)
    program = lower(schedule, silent, LoweringOptions(model_layers=4))
    with pytest.raises(ValueError, match=r"counts layers; lower it with costs that have \[saved_bytes\]"):
        verify_program(program, durations(program, silent), memory_limit=10**9)
    known = lower(schedule, COSTS, LoweringOptions(model_layers=4))
    report = verify_program(known, durations(known, COSTS), memory_limit=200)
    assert [str(finding) for finding in report.findings] == [
        "T302 rank 1: holds 1.014 kB of activations at once, over the limit of 200 bytes"
    ]
    close = verify_program(known, durations(known, COSTS), memory_limit=1_014 - 1)
    assert "holds 1.014 kB of activations at once, over the limit of 1.013 kB" in str(close.findings[0])


# The grain of layers, and costs of a whole model


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe"])
def test_both_grains_have_the_same_model(name: str) -> None:
    schedule = treadle.generate(name, pp=4, microbatches=8)
    cells = lower(schedule, UNIT_COSTS, LoweringOptions(model_layers=11))
    layers = lower(schedule, UNIT_COSTS, LoweringOptions(model_layers=11, by_layer=True, moe=False))
    assert cells.layout.layers == layers.layout.layers
    busy = [[rank.busy for rank in measure(simulate(p, UNIT_COSTS)).ranks] for p in (cells, layers)]
    assert busy[0] == busy[1]


def test_costs_of_a_model_are_cut_by_every_schedule() -> None:
    costs = parse(
        "[model]\nlayers = 8\nf = 800\ni = 720\nw = 480\nfb = 1360\nsaved_bytes = 4000\n[message]\nsend = 5\n"
    )
    ticks = {name: value * 1000 for name, value in COSTS.cells.items() if name != "layers"}
    layered = Costs("", costs.clock, {"layers": 1, **ticks}, message={"send": 5000})
    for name in SCHEDULES:
        schedule = treadle.generate(name, pp=4, microbatches=16)
        program = lower(schedule, costs)
        assert program.layout.model_layers == 8
        assert simulate(program, costs).makespan == simulate(held(name, 8, layered), layered).makespan
        assert measure(simulate(program, costs)).peak_unit == "bytes"
    assert measure(simulate(lower(treadle.generate("1f1b", pp=2, microbatches=4), costs), costs)).peaks == (4000, 2000)


def test_costs_of_a_model_refuse_another() -> None:
    costs = parse("[model]\nlayers = 8\nf = 800\ni = 720\nw = 480\n", "mine.toml")
    schedule = treadle.generate("1f1b", pp=4, microbatches=8)
    with pytest.raises(ValueError, match=r"'mine\.toml' are of a model of 8 layers, got 12; leave `model_layers` out"):
        lower(schedule, costs, LoweringOptions(model_layers=12))
    with pytest.raises(ValueError, match="a model of 8 layers, and layers 3 on 4 stages make 12"):
        lower(schedule, costs, LoweringOptions(layers=3, moe=True))
    with pytest.raises(ValueError, match="does not know the layers of its stages; lower its schedule"):
        simulate(lower_cells(schedule), costs)
    assert lower(schedule, costs, LoweringOptions(layers=(1, 2, 2, 3), moe=True)).layout.model_layers == 8


def test_costs_of_a_chunk_refuse_a_model() -> None:
    costs = Costs("chunky", TICKS, cells={"f": 3, "b": 5})
    program = held("1f1b", 8, costs)
    with pytest.raises(ValueError, match=r"'chunky' say what a chunk takes, .* add layers = N to their \[cells\]"):
        simulate(program, costs)


def test_fitted_costs_know_the_layers_of_a_chunk() -> None:
    trace = simulate(held("1f1b", 8, COSTS), Costs("", TICKS, cells=COSTS.cells, message=COSTS.message))
    fitted = treadle.fit(trace)
    assert fitted.cells == {"layers": 2, "f": 200, "b": 300}
    assert fitted.of_layer("b") == 150
    assert "layers" not in treadle.fit(simulate(held("1f1b", 9), UNIT_COSTS)).cells


def test_held_sizes_that_differ_or_are_not_known_are_named() -> None:
    program = held("1f1b", 8)
    other = lower(treadle.generate("1f1b", pp=4, microbatches=8), UNIT_COSTS, LoweringOptions())
    traces = [("a", simulate(program, UNIT_COSTS)), ("b", simulate(other, UNIT_COSTS))]
    assert (
        compare(traces).held == "same for all: 4 ranks; differs: layers (a 8, b ?); differs: micro-batches (a 16, b 8)"
    )
    assert compare(traces[1:]).held.endswith("model layers: unknown")


MIXED = """
[layer]
attn_f = 16
dispatch_f = 6
mlp_f = 18
combine_f = 7
combine_b = 7
mlp_b = 17
dispatch_b = 6
attn_b = 19
mlp_w = 13
attn_w = 11
mlp_r = 20
[dense]
mlp_f = 12
mlp_b = 11
mlp_w = 9
[ends]
embed_f = 6
embed_b = 9
mtp_f = 40
mtp_b = 38
mtp_w = 21
head_f = 20
head_b = 18
head_w = 17
[message]
send = 4
reduce_tied = 10
reduce_grad = 10
[step]
clip = 10
optimizer = 30
gather_params = 20
[saved_bytes]
attn = 10
mlp = 12
attn_input = 3
mlp_input = 4
dense_mlp = 7
embed = 1
mtp = 2
head = 5
"""


def test_a_fit_of_mixed_layers_predicts_the_same_step() -> None:
    costs, schedule = parse(MIXED), treadle.generate("interleaved-overlap", pp=2, microbatches=6)
    options = LoweringOptions(
        blocks=("Ed", "dt", "tt", "tmL"), by_layer=True, recompute=("attn", "mlp"), tied=((0, 3),), dp=2, moe=True
    )
    trace = treadle.simulate(schedule, costs, options)
    fitted = fit(trace)
    assert (fitted.dense["mlp_f"], fitted.layer["mlp_f"], fitted.layer["mlp_r"]) == (12_000, 18_000, 20_000)
    again = treadle.simulate(schedule, fitted, options)
    assert again.makespan == trace.makespan
    assert measure(again).peaks == measure(trace).peaks
