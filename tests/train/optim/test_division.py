"""Tensors divided among ranks: each element is one rank's, and ranks have the same number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.train.optim.division import Shares, divide_elements, divide_whole

Divide = Callable[[list[int], int, int], list[Shares]]


@pytest.mark.parametrize("divide", [divide_elements, divide_whole])
@given(sizes=st.lists(st.integers(0, 40), max_size=12), num_ranks=st.integers(1, 6), bucket=st.integers(1, 60))
def test_each_element_is_one_ranks(divide: Divide, sizes: list[int], num_ranks: int, bucket: int) -> None:
    owners: dict[tuple[int, int], int] = {}
    for shares in divide(sizes, num_ranks, bucket):
        assert len(shares) == num_ranks
        for rank, runs in enumerate(shares):
            for run in runs:
                assert len(run) > 0
                for element in range(run.first, run.last):
                    assert (run.tensor, element) not in owners
                    owners[run.tensor, element] = rank
    assert sorted(owners) == [(tensor, element) for tensor, size in enumerate(sizes) for element in range(size)]


@given(sizes=st.lists(st.integers(0, 40), max_size=12), num_ranks=st.integers(1, 6), bucket=st.integers(1, 60))
def test_ranks_have_equal_shares_of_elements(sizes: list[int], num_ranks: int, bucket: int) -> None:
    for shares in divide_elements(sizes, num_ranks, bucket):
        nums = [sum(map(len, runs)) for runs in shares]
        assert max(nums) == -(-sum(nums) // num_ranks)
        assert all(len({run.tensor for run in runs}) == len(runs) for runs in shares), "one run a tensor and rank"


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), num_ranks=st.integers(1, 6))
def test_whole_tensors_are_spread_as_evenly_as_the_largest_allows(sizes: list[int], num_ranks: int) -> None:
    nums = [0] * num_ranks
    for shares in divide_whole(sizes, num_ranks, bucket=50):
        for rank, runs in enumerate(shares):
            nums[rank] += sum(map(len, runs))
            assert all((run.first, run.last) == (0, sizes[run.tensor]) for run in runs)
    assert max(nums) - min(nums) <= max(sizes)
