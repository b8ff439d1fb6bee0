"""The cut is the best of all cuts."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.planner.balance import Number, balance


def stage_times(times: list[Number], factors: list[Number], cut: tuple[range, ...]) -> list[Fraction]:
    return [
        sum((Fraction(times[block]) for block in stage), Fraction(0)) * Fraction(factor)
        for stage, factor in zip(cut, factors, strict=True)
    ]


def quality(times: list[Number], factors: list[Number], cut: tuple[range, ...]) -> tuple[Fraction, Fraction]:
    taken = stage_times(times, factors, cut)
    return max(taken), sum((time * time for time in taken), Fraction(0))


def all_cuts(blocks: str, num_stages: int, *, layer_in_each: bool) -> list[tuple[range, ...]]:
    cuts = []
    for inner in combinations(range(1, len(blocks)), num_stages - 1):
        edges = (0, *inner, len(blocks))
        cut = tuple(range(start, stop) for start, stop in pairwise(edges))
        if not layer_in_each or all(set("td") & set(blocks[s.start : s.stop]) for s in cut):
            cuts.append(cut)
    return cuts


NUMBER = st.integers(0, 9) | st.fractions(0, 9, max_denominator=7) | st.floats(0, 9, allow_subnormal=False)
MODEL = st.tuples(st.text("td", max_size=7), st.sampled_from(("L", "mL", "mmL"))).map(
    lambda parts: "E" + "".join(parts)
)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data(), MODEL, st.booleans())
def test_no_cut_is_better(data: st.DataObject, blocks: str, layer_in_each: bool) -> None:
    layers = blocks.count("t") + blocks.count("d")
    most = layers if layer_in_each else len(blocks)
    if most == 0:
        return
    num_stages = data.draw(st.integers(1, most))
    times = data.draw(st.lists(NUMBER, min_size=len(blocks), max_size=len(blocks)))
    factors = data.draw(st.none() | st.lists(NUMBER, min_size=num_stages, max_size=num_stages))
    cut = balance(blocks, times, num_stages, factors=factors, layer_in_each=layer_in_each)
    possible = all_cuts(blocks, num_stages, layer_in_each=layer_in_each)
    assert cut in possible
    taken: list[Number] = [*factors] if factors is not None else [1] * num_stages
    assert quality(times, taken, cut) == min(quality(times, taken, other) for other in possible)


def test_sixty_one_layers_on_thirty_two_stages() -> None:
    """DeepSeek-V3's blocks: nothing is shorter than the longest block, and the head takes as long as three layers."""
    blocks = "E" + "d" * 3 + "t" * 58 + "mL"
    time = {"E": 1, "d": 6, "t": 10, "m": 14, "L": 30}
    times = [time[block] for block in blocks]
    cut = balance(blocks, times, 32, layer_in_each=False)
    written = [blocks[stage.start : stage.stop] for stage in cut]
    assert "".join(written) == blocks
    assert max(stage_times(list(times), [1] * 32, cut)) == 30
    assert written[-1] == "L"
    # 30 is reached by many cuts; the even one has two layers, or what takes about as long, in all other stages
    assert set(written[3:-2]) == {"tt"}


def test_a_slow_stage_gets_less() -> None:
    blocks = "E" + "t" * 12 + "L"
    times = [0, *[2] * 12, 0]
    assert [len(stage) for stage in balance(blocks, times, 4)] == [4, 3, 3, 4]
    assert [len(stage) for stage in balance(blocks, times, 4, factors=[1, 2, 1, 1])] == [4, 1, 4, 5]


@pytest.mark.parametrize(
    ("blocks", "times", "num_stages", "factors", "message"),
    [
        ("EtL", [1, 2], 1, None, "each of the 3 blocks has a time, got 2 times"),
        ("EtL", [1, 2, 3], 0, None, "3 blocks make 1 to 3 stages, got 0"),
        ("EtL", [1, 2, 3], 4, None, "3 blocks make 1 to 3 stages, got 4"),
        ("EtL", [1, 2, 3], 2, None, "2 stages with a layer each need as many layers, got 1 in 'EtL'; take fewer"),
        ("EttL", [1, 2, 3, 4], 2, [1], "each of the 2 stages has a factor, got 1 factors"),
        ("EtL", [1, -2, 3], 1, None, "a time is a number from 0, got -2 as number 1"),
        ("EtL", [1, 2, 3], 1, [float("nan")], "a factor is a number from 0, got nan as number 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    blocks: str, times: list[Number], num_stages: int, factors: list[Number] | None, message: str
) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the whole message is looked at
        balance(blocks, times, num_stages, factors=factors)
    assert message in str(raised.value)
