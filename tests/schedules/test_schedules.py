"""The conformance suite: what must hold for every schedule there is, at any size it says it can do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from treadle.schedules import SCHEDULES, Family, Size

ANY_SIZE = st.tuples(st.integers(1, 16), st.integers(1, 4), st.integers(1, 64))


def generated(family: Family, pp: int, vpp: int, num_mb: int) -> treadle.Schedule | None:
    try:
        return family.generate(family.size(pp, None if family.vpps else vpp, num_mb))
    except ValueError:
        return None


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60)
@given(size=ANY_SIZE)
def test_any_valid_size_is_clean(name: str, size: tuple[int, int, int]) -> None:
    schedule = generated(SCHEDULES[name], *size)
    if schedule is not None:
        report = treadle.verify(schedule)
        assert report.clean, report


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=150)
@given(size=ANY_SIZE)
def test_a_refusal_gives_a_reason_and_a_size_that_works(name: str, size: tuple[int, int, int]) -> None:
    family = SCHEDULES[name]
    try:
        family.size(*size)
    except ValueError as error:
        message = str(error)
        asked = f"got pp={size[0]} vpp={size[1]} microbatches={size[2]}"
        assert message.startswith(name)
        assert asked in message
        nearest = re.search(r"nearest size it can do is pp=(\d+) vpp=(\d+) microbatches=(\d+)", message)
        assert nearest is not None, message
        family.size(*map(int, nearest.groups()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_many_sizes_are_done(name: str) -> None:
    """So that the tests above do not pass by refusing everything."""
    sizes = [(pp, vpp, m) for pp in (1, 2, 3, 4, 8) for vpp in (1, 2, 3) for m in (1, 2, 7, 8, 16, 32)]
    done = [size for size in sizes if generated(SCHEDULES[name], *size) is not None]
    assert len(done) >= len(sizes) // 4


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "num_mb", "nearest"),
    [
        ("1f1b", 4, 2, 8, Size(4, 1, 8)),
        ("dualpipe", 7, 2, 20, Size(8, 2, 20)),
        ("dualpipe", 8, 2, 19, Size(8, 2, 20)),
        ("dualpipe", 8, 2, 10, Size(8, 2, 16)),
        ("dualpipe", 7, 2, 8, Size(4, 2, 8)),
        ("zb-v", 4, 2, 6, Size(4, 2, 7)),
        ("interleaved", 4, 2, 9, Size(4, 2, 10)),
        ("gpipe", 0, 1, 4, Size(1, 1, 4)),
    ],
)
def test_nearest_size(name: str, pp: int, vpp: int, num_mb: int, nearest: Size) -> None:
    with pytest.raises(ValueError, match=str(nearest)):
        SCHEDULES[name].size(pp, vpp, num_mb)


def test_peak_activations_of_the_published_figures() -> None:
    def peak(name: str, pp: int, num_mb: int) -> tuple[int, ...]:
        return treadle.verify(treadle.generate(name, pp=pp, microbatches=num_mb)).peak_activations

    assert max(peak("1f1b", 4, 8)) == 4
    assert peak("zb-h1", 4, 8) == (4, 4, 4, 4)
    assert max(peak("interleaved", 4, 8)) == 11
    assert max(peak("interleaved-overlap", 4, 8)) == 12
    assert max(peak("dualpipe", 8, 20)) == 9


def test_dualpipe_is_dualpipev_unfolded() -> None:
    """DualPipe's first half of ranks does what DualPipeV does with half of the micro-batches."""
    for pp, num_mb in ((4, 8), (8, 20), (8, 32)):
        dual = treadle.generate("dualpipe", pp=pp, microbatches=num_mb)
        folded = treadle.generate("dualpipev", pp=pp // 2, microbatches=num_mb // 2)
        assert dual.rows[: pp // 2] == folded.rows


def test_names_not_known_get_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean 'dualpipe'"):
        treadle.generate("dualpip", pp=2, microbatches=4)
    with pytest.raises(ValueError, match="treadle schedules"):
        treadle.generate("qqq", pp=2, microbatches=4)
