"""What costs by block, stage and micro-batch mean, to the tick; by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import treadle
from treadle.costs import Costs, durations, parse
from treadle.costs.unequal import mb_saved
from treadle.ir.blocks import parse_layout
from treadle.ir.ops import STEP_END, LaneKind, OpKind
from treadle.ir.program import Program
from treadle.lowering import LoweringOptions, lower
from treadle.simulator import measure, simulate

TEXT = """
unit = "us"
[layer]
attn_f = 10
counts = 1
host = 2
dispatch_f = 100
mlp_f = 20
combine_f = 200
combine_b = 300
mlp_b = 30
dispatch_b = 400
attn_b = 40
mlp_w = 5
attn_w = 6
[dense]
mlp_f = 7
mlp_b = 8
mlp_w = 9
[ends]
embed_f = 1000
embed_b = 1100
mtp_f = 2000
mtp_b = 2100
mtp_w = 2200
head_f = 3000
head_b = 3100
head_w = 3200
[message]
send = 50
reduce_grad = 60
reduce_tied = 70
[saved_bytes]
attn = 100
mlp = 300
attn_input = 10
mlp_input = 30
dense_mlp = 70
embed = 1
mtp = 2000
head = 5000
"""
COSTS = parse(TEXT)
US = COSTS.clock.ticks
BLOCKS = ("Edt", "tmL")


def with_lines(lines: str) -> Costs:
    return parse(f"{TEXT}\n{lines}")


def make(name: str = "1f1b", costs: Costs = COSTS, m: int = 2, **options: Any) -> Program:
    lanes = {"moe": True, "hold": False, "early": False} if options.get("by_layer") else {}
    whole: dict[str, Any] = {"blocks": BLOCKS, **lanes, **options}
    return lower(treadle.generate(name, pp=2, microbatches=m), costs, LoweringOptions(**whole))


def times(program: Program, costs: Costs) -> dict[tuple[int, str, int], set[float]]:
    """By stage, kind of op and layer: all durations of these ops, in microseconds."""
    found: dict[tuple[int, str, int], set[float]] = {}
    for op, ticks in enumerate(durations(program, costs)):
        key = (_stage(program, op), OpKind(program.kind[op]).name, int(program.layer[op]))
        found.setdefault(key, set()).add(int(ticks) / US)
    return found


def _stage(program: Program, op: int) -> int:
    return program.layout.placement.stage(int(program.lane_rank[program.lane_of[op]]), int(program.chunk[op]))


def changed(program: Program, costs: Costs) -> dict[tuple[int, str, int], set[float]]:
    """By stage, kind and micro-batch: what costs multiply the times of COSTS by."""
    found: dict[tuple[int, str, int], set[float]] = {}
    for op, (after, before) in enumerate(zip(durations(program, costs), durations(program, COSTS), strict=True)):
        key = (_stage(program, op), OpKind(program.kind[op]).name, int(program.mb[op]))
        if before:
            found.setdefault(key, set()).add(after / before)
    return found


def test_cells_take_what_their_blocks_take() -> None:
    moe = {"F": 10 + 1 + 2 + 100 + 20 + 200, "I": 300 + 30 + 400 + 40, "W": 5 + 6}
    dense = {"F": 10 + 7, "I": 8 + 40, "W": 9 + 6}
    first = {"F": 1000, "I": 1100, "W": 0}
    last = {"F": 2000 + 3000, "I": 2100 + 3100, "W": 2200 + 3200}
    seen = times(make("zb-h1"), COSTS)
    for kind in moe:
        assert seen[0, kind, 0] == {first[kind] + dense[kind] + moe[kind]}
        assert seen[1, kind, 0] == {moe[kind] + last[kind]}
    whole = times(make("1f1b"), COSTS)
    assert whole[1, "B", 0] == {moe["I"] + moe["W"] + last["I"] + last["W"]}


def test_parts_take_what_their_block_says() -> None:
    seen = times(make(by_layer=True, moe=True), COSTS)
    dense = {key[1]: took for key, took in seen.items() if key[::2] == (0, 0)}
    layer = {key[1]: took for key, took in seen.items() if key[::2] == (0, 1)}
    both = {"ATTN_F": 10, "ATTN_B": 40, "ATTN_W": 6}
    assert {kind: dense[kind] for kind in both} == {kind: {took} for kind, took in both.items()}
    assert {kind: dense[kind] for kind in ("MLP_F", "MLP_B", "MLP_W")} == {"MLP_F": {7}, "MLP_B": {8}, "MLP_W": {9}}
    assert not {"COUNTS", "HOST", "DISPATCH_F", "COMBINE_F", "COMBINE_B", "DISPATCH_B"} & dense.keys()
    assert layer.items() >= {kind: {took} for kind, took in both.items()}.items()
    assert (layer["MLP_F"], layer["COUNTS"], layer["DISPATCH_B"]) == ({20}, {1}, {400})
    assert (seen[0, "EMBED_F", 0], seen[0, "EMBED_B", 0]) == ({1000}, {1100})
    for place, name in (("MTP", 2000), ("HEAD", 3000)):
        assert [seen[1, f"{place}_{half}", 0] for half in "FBW"] == [{name}, {name + 100}, {name + 200}]
    assert not any(stage == 0 and kind.startswith(("MTP", "HEAD")) for stage, kind, _ in seen)


def test_weight_halves_that_are_not_split_are_in_the_backward() -> None:
    seen = times(make(by_layer=True, split=()), COSTS)
    assert (seen[0, "MLP_B", 0], seen[0, "MLP_B", 1]) == ({8 + 9}, {30 + 5})
    assert (seen[1, "MTP_B", 0], seen[1, "HEAD_B", 0]) == ({2100 + 2200}, {3100 + 3200})


def test_whole_actions_of_a_dense_layer() -> None:
    costs = parse("[model]\nlayers = 3\nf = 300\ni = 600\nw = 900\n[dense]\nf = 7\ni = 8\nw = 9\n")
    cells = times(make("zb-h1", costs, blocks=("Ed", "ttL")), costs)
    assert [cells[0, kind, 0] for kind in "FIW"] == [{7}, {8}, {9}]
    assert [cells[1, kind, 0] for kind in "FIW"] == [{200}, {400}, {600}]
    parts = times(make(costs=costs, blocks=("Ed", "ttL"), by_layer=True), costs)
    assert (parts[0, "ATTN_F", 0], parts[0, "MLP_F", 0]) == ({3.5}, {3.5})
    assert parts[1, "MLP_W", 1] == {150}


def test_recomputed_parts_take_their_forward_or_what_is_given() -> None:
    again: dict[str, Any] = {"by_layer": True, "recompute": ("attn", "mlp"), "early_recompute": False}
    seen = times(make(**again), COSTS)
    assert (seen[0, "ATTN_R", 0], seen[0, "MLP_R", 0], seen[0, "MLP_R", 1]) == ({10}, {7}, {20})
    costs = replace(COSTS, layer={**COSTS.layer, "attn_r": 3 * US, "mlp_r": 4 * US})
    seen = times(make(costs=costs, **again), costs)
    assert (seen[0, "ATTN_R", 0], seen[0, "MLP_R", 0], seen[0, "MLP_R", 1]) == ({3}, {7}, {4})


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_stage_factor_is_about_all_that_it_computes_and_nothing_else(by_layer: bool) -> None:
    costs = with_lines("[stage.1]\nfactor = 1.5\n[step]\noptimizer = 10\n")
    lanes: dict[str, Any] = (
        {"by_layer": True, "moe": True, "tied": ((0, -1),), "dp": 2, "recompute": ("mlp",)} if by_layer else {}
    )
    program = make("zb-h1", costs, **lanes)
    plain = replace(costs, stage={})
    computes = {"EMBED", "ATTN", "MLP", "MTP", "HEAD", "F", "I", "W"}
    seen = set()
    for op, (after, before) in enumerate(zip(durations(program, costs), durations(program, plain), strict=True)):
        kind, stage = OpKind(program.kind[op]).name, _stage(program, op)
        is_slow = stage == 1 and kind.split("_")[0] in computes
        assert after == (before * 3 // 2 if is_slow else before), kind
        seen.add(kind)
    expected = {"ATTN_F", "MLP_R", "MTP_W", "HEAD_B", "DISPATCH_F", "HOST", "SEND_F", "REDUCE_GRAD", "REDUCE_TIED"}
    assert seen >= ({*expected, "OPTIMIZER"} if by_layer else {"F", "I", "W", "SEND_F"})


def test_factors_multiply_all_times_of_a_micro_batch() -> None:
    costs = with_lines("[microbatch]\nfactors = [0.5, 3]\n")
    for lanes in ({}, {"by_layer": True, "moe": True, "dp": 2}):
        seen = changed(make("zb-h1", costs, **lanes), costs)
        for (_, kind, mb), factors in seen.items():
            assert factors == ({1.0} if kind == "REDUCE_GRAD" else {(0.5, 3.0)[mb]}), kind


def test_lengths_grow_attention_with_their_square() -> None:
    """Lengths 1 and 3 with a mean of 2: x is 0.5 and 1.5. Of attention 0.4 grows with x squared."""
    costs = with_lines("[microbatch]\nlengths = [1, 3]\nquadratic = 0.4\n")
    law = (0.5 * 0.6 + 0.25 * 0.4, 1.5 * 0.6 + 2.25 * 0.4)
    seen = changed(make("zb-h1", costs, by_layer=True, moe=True, recompute=("attn",), early_recompute=False), costs)
    for (_, kind, mb), factors in seen.items():
        assert [*factors] == pytest.approx([law[mb] if kind.startswith("ATTN") else (0.5, 1.5)[mb]]), kind
    assert {kind for _, kind, _ in seen} >= {"ATTN_R", "ATTN_W", "MLP_F", "DISPATCH_B", "HEAD_F", "SEND_F"}


def test_lengths_have_a_reference() -> None:
    costs = with_lines("[microbatch]\nlengths = [1, 3]\nreference = 4\n")
    seen = changed(make(costs=costs, by_layer=True), costs)
    assert {next(iter(factors)) for (_, _, mb), factors in seen.items() if mb == 1} == {0.75}
    assert mb_saved(2, costs) == (0.25, 0.75)


def test_cells_grow_by_the_share_of_attention() -> None:
    """Of what a stage takes, only the attention of its layers grows with the square: 10, 40 and 6 of each of them."""
    costs = with_lines("[microbatch]\nlengths = [1, 3]\nquadratic = 1\n")
    program = make("zb-h1", costs)
    plain, seen = times(program, COSTS), changed(program, costs)
    for kind, attention in (("F", 10), ("I", 40), ("W", 6)):
        for stage, layers in ((0, 2), (1, 1)):
            (whole,) = plain[stage, kind, 0]
            share = layers * attention / whole
            assert [*seen[stage, kind, 1]] == pytest.approx([1.5 * (1 - share) + 2.25 * share], rel=1e-6), kind


def test_cells_and_parts_grow_alike() -> None:
    """Without overlap a stage's cell takes what its parts take together, whatever the micro-batch's length."""
    costs = replace(with_lines("[microbatch]\nlengths = [1, 5]\nquadratic = 0.7\n"), message={})
    cells, parts = make("1f1b", costs), make("1f1b", costs, by_layer=True, moe=True)
    for mb in (0, 1):
        for stage in (0, 1):
            whole, pieces = (
                sum(int(t) for op, t in enumerate(durations(p, costs)) if (_stage(p, op), p.mb[op]) == (stage, mb))
                for p in (cells, parts)
            )
            assert abs(whole - pieces) <= len(OpKind)  # each is rounded to a tick


def test_micro_batches_of_two_pipes_are_numbered_pipe_after_pipe() -> None:
    """Rank 0 of DualPipe holds stage 0 of the pipe that enters there, and the last stage of the other."""
    costs = with_lines("[microbatch]\nfactors = [1, 2, 3, 4]\n")
    program = make("dualpipe", costs, m=4, by_layer=True)
    pipes = program.layout.placement.pipes
    assert pipes == (0, 1)
    ticks = durations(program, costs)
    seen: dict[tuple[int, int], set[float]] = {}
    for op in range(program.num_ops):
        if program.kind[op] == OpKind.ATTN_F:
            key = (pipes[program.chunk[op]], int(program.mb[op]))
            seen.setdefault(key, set()).add(ticks[op] / US / 10)
    assert seen == {(0, 0): {1}, (0, 1): {2}, (1, 0): {3}, (1, 1): {4}}


def test_an_overlapped_pair_grows_with_both_its_micro_batches() -> None:
    """A pair takes f + b; with factors 1 and 3 it takes each half so many times."""
    text = "[cells]\nlayers = 1\nf = 10\nb = 20\nfb = 30\n[microbatch]\nfactors = [1, 3, 1, 3, 1, 3, 1, 3]\n"
    costs = parse(text)
    program = lower(treadle.generate("dualpipev", pp=2, microbatches=8), costs, LoweringOptions(model_layers=4))
    ticks = durations(program, costs)
    pairs = [op for op in range(program.num_ops) if program.joined[op]]
    assert pairs
    for op in pairs:
        parts = {OpKind(program.kind[each]): (1, 3)[program.mb[each] % 2] for each in (op - 1, op)}
        assert ticks[op] == ticks[op - 1] == (10 * parts[OpKind.F] + 20 * parts[OpKind.B]) * US


def peaks(costs: Costs, name: str = "gpipe", m: int = 3, **options: Any) -> tuple[float, ...]:
    metrics = measure(simulate(make(name, costs, m, **options), costs))
    assert metrics.peak_unit == "bytes"
    return metrics.peaks


DENSE, MOE = 100 + 70, 100 + 300


@pytest.mark.parametrize("by_layer", [True, False])
def test_peaks_by_block(by_layer: bool) -> None:
    """GPipe holds all micro-batches at once."""
    assert peaks(COSTS, by_layer=by_layer) == (3 * (1 + DENSE + MOE), 3 * (MOE + 2000 + 5000))


@pytest.mark.parametrize("by_layer", [True, False])
def test_peaks_by_stage_and_micro_batch(by_layer: bool) -> None:
    first, last = 1 + DENSE + MOE, MOE + 2000 + 5000
    stage = with_lines("[stage.1]\nsaved_factor = 2\nfactor = 3\n")
    assert peaks(stage, by_layer=by_layer) == (3 * first, 2 * 3 * last)
    factors = with_lines("[microbatch]\nfactors = [1, 2, 3]\n")
    assert peaks(factors, by_layer=by_layer) == (6 * first, 6 * last)
    saved = with_lines("[microbatch]\nfactors = [1, 2, 3]\nsaved_factors = [4, 1, 2]\n")
    assert peaks(saved, by_layer=by_layer) == (7 * first, 7 * last)
    lengths = with_lines("[microbatch]\nlengths = [1, 2, 3]\nreference = 0.5\nquadratic = 1\n")
    assert peaks(lengths, by_layer=by_layer) == (12 * first, 12 * last)


@pytest.mark.parametrize(
    ("parts", "kept", "again"),
    [
        (("attn",), 10 + 300, 90),
        (("mlp",), 100 + 30, 270),
        (("attn", "mlp"), 10 + 30, 90 + 270),
    ],
)
def test_peaks_where_parts_are_computed_again(parts: tuple[str, ...], kept: int, again: int) -> None:
    """Each keeps its inputs; the first backward holds the rest of one layer besides, until the weight halves."""
    found = peaks(COSTS, by_layer=True, blocks=("t", "t"), embedding=False, recompute=parts, early_recompute=False)
    assert found == (3 * kept + again,) * 2


def test_a_dense_layer_keeps_its_own_inputs() -> None:
    costs = replace(COSTS, saved_bytes={**COSTS.saved_bytes, "dense_mlp_input": 3})
    found = peaks(costs, by_layer=True, blocks=("d", "d"), recompute=("mlp",), early_recompute=False)
    assert found == (3 * (100 + 3) + 67,) * 2
    of_all = peaks(COSTS, by_layer=True, blocks=("d", "d"), recompute=("mlp",), early_recompute=False)
    assert of_all == (3 * (100 + 30) + 40,) * 2


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_the_step_ends_behind_everything(name: str) -> None:
    costs = with_lines("[step]\nclip = 11\noptimizer = 22\ngather_params = 33\n")
    program = make(name, costs, 4, by_layer=True, dp=2, blocks=("Ett", "ttL") if name != "zb-v" else tuple("tttt"))
    trace = simulate(program, costs)
    ends = {kind: [op for op in range(program.num_ops) if program.kind[op] == kind] for kind in STEP_END}
    assert [len(ops) for ops in ends.values()] == [2, 2, 2]
    rank = program.lane_rank[program.lane_of]
    rest = [op for op in range(program.num_ops) if program.kind[op] not in STEP_END]
    for kind, took in zip(STEP_END, (11, 22, 33), strict=True):
        assert {int(trace.end[op] - trace.start[op]) for op in ends[kind]} == {took * US}
    assert min(trace.start[op] for op in ends[OpKind.CLIP]) >= max(trace.end[op] for op in rest)
    for one, two in ((OpKind.CLIP, OpKind.OPTIMIZER), (OpKind.OPTIMIZER, OpKind.GATHER_PARAMS)):
        for op in ends[two]:
            assert trace.start[op] == next(trace.end[other] for other in ends[one] if rank[other] == rank[op])
    assert trace.makespan == max(trace.end[op] for op in rest) + (11 + 22 + 33) * US
    assert program.lane_kind[program.lane_of[ends[OpKind.OPTIMIZER][0]]] == LaneKind.COMPUTE


def test_the_optimizer_is_there_where_any_of_the_end_is() -> None:
    assert with_lines("[step]\nclip = 1").step_end == (OpKind.CLIP, OpKind.OPTIMIZER)
    assert with_lines("[step]\ngather_params = 1").step_end == (OpKind.OPTIMIZER, OpKind.GATHER_PARAMS)
    assert COSTS.step_end == ()


@pytest.mark.parametrize(("parts", "early"), [(("attn",), False), (("mlp",), True)])
def test_the_better_place_to_compute_again_is_chosen(parts: tuple[str, ...], early: bool) -> None:
    costs = treadle.load_costs("deepseek-v3-h800")

    def span(chosen: bool | None) -> int:
        options: dict[str, Any] = {
            "by_layer": True,
            "moe": True,
            "recompute": parts,
            "blocks": ("Et", "tt", "tt", "tL"),
        }
        return simulate(make("interleaved-overlap", costs, 4, early_recompute=chosen, **options), costs).makespan

    assert span(None) == span(early) < span(not early)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda: make(costs=with_lines("[microbatch]\nfactors = [1, 2, 3]")), "have 3 micro-batches in .*has 2; give"),
        (lambda: make(costs=with_lines("[microbatch]\nlengths = [1]"), by_layer=True), "have 1 micro-batches in .*2"),
        (lambda: make(costs=with_lines("[stage.2]\nfactor = 2")), r"have \[stage.2\], .* stages 0 to 1; leave that"),
        (lambda: make(blocks=None, model_layers=4, dense=5), "at most as many dense ones, got 5"),
        (lambda: make(blocks=parse_layout("Et|t|tL")), r"layout has 3 stages \(Et\|t\|tL\), the schedule 2; give as"),
        (lambda: make(costs=with_lines("[model]\nlayers = 4")), "of a model of 4 layers, and the layout has 3"),
        (lambda: make(dense=1), "blocks say which layers are dense .*, got dense 1"),
        (lambda: make(by_layer=True, recompute=("experts",)), "are attn and mlp, got experts"),
        (lambda: make(blocks=None, recompute=("attn",)), "`recompute` works layer by layer, .* add `model_layers=N`"),
    ],
)
def test_mistakes_are_told(mistake: Callable[[], Program], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        mistake()
