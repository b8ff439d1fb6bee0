"""The front against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treadle.planner.front import Front

PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40)


@given(PAIRS, st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_front_is_what_no_other_pair_beats(pairs: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    front = Front()
    for pair in pairs:
        front.add(*pair)

    def beaten(pair: tuple[int, int]) -> bool:
        return any(other != pair and other[0] <= pair[0] and other[1] <= pair[1] for other in pairs)

    assert front.pairs == sorted({pair for pair in pairs if not beaten(pair)})
    assert front.beats(*asked) == beaten(asked)
