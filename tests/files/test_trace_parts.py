"""Traces in several files, which merge to one; and traces too large for a file."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.example_traces import (
    COSTS,
    LONGEST_NS,
    assert_same_trace,
    content_of,
    trace_of,
)
from treadle.files import chrome
from treadle.files.checked_columns import DTYPES
from treadle.files.chrome import write
from treadle.ir.trace import Clock, Trace
from treadle.schedules import SCHEDULES

# Parts


def parts_of(trace: Trace, path: Path, *ends: int) -> list[Path]:
    """A file for each stretch of ranks between the ends."""
    paths = []
    for first, after in pairwise(ends):
        paths.append(path / f"ranks{first}.json")
        chrome.dump(trace, paths[-1], ranks=range(first, after))
    return paths


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_parts_merge_to_the_whole(name: str, cost: str, tmp_path: Path) -> None:
    trace = trace_of(name, 4, 8, cost)
    paths = parts_of(trace, tmp_path, 0, 1, 3, 4)
    assert_same_trace(chrome.merge(reversed(paths)), trace)


def test_the_whole_is_a_part_too(tmp_path: Path) -> None:
    trace = trace_of()
    paths = parts_of(trace, tmp_path, 0, 4)
    assert "ranks" not in content_of(paths[0])["treadle"]
    assert_same_trace(chrome.merge(paths), trace)
    assert_same_trace(chrome.load(paths[0]), trace)


def test_each_rank_writes_its_own(tmp_path: Path) -> None:
    """As a runtime does: a rank knows its own times only, on a clock that starts where it starts."""
    trace = replace(trace_of(cost="deepseek-v3-h800"), measured=True)
    rank_of = trace.program.lane_rank[trace.program.lane_of]
    epoch = 850_000_000_123_456_789
    for rank in range(4):
        mine = rank_of == rank
        start, end = (np.where(mine, times + epoch, 0) for times in (trace.start, trace.end))
        here = replace(trace, start=start, end=end, about=f"measured on h{rank}")
        chrome.dump(here, tmp_path / f"{rank}.json.gz", ranks=range(rank, rank + 1))
    about = "; ".join(f"rank {rank}: measured on h{rank}" for rank in range(4))
    whole = replace(trace, start=trace.start + epoch, end=trace.end + epoch, about=about)
    assert_same_trace(chrome.merge(tmp_path / f"{rank}.json.gz" for rank in range(4)), whole)


def test_a_part_holds_its_ranks_only(tmp_path: Path) -> None:
    path = parts_of(trace_of(), tmp_path, 1, 3)[0]
    content = content_of(path)
    assert content["treadle"]["ranks"] == [1, 2]
    assert {lane["rank"] for lane in content["treadle"]["lanes"]} == {1, 2}
    assert {event["pid"] for event in content["traceEvents"]} == {2, 3}
    flows = [(event["id"], event["ph"]) for event in content["traceEvents"] if event["ph"] in "sf"]
    assert {name for name, phase in flows if phase == "s"} == {name for name, phase in flows if phase == "f"}


def test_threads_of_a_lane_are_the_same_in_all_parts(tmp_path: Path) -> None:
    trace = trace_of()
    paths = parts_of(trace, tmp_path, 0, 2, 4)
    chrome.dump(trace, tmp_path / "whole.json")
    tids = {lane["lane"]: lane["tid"] for path in paths for lane in content_of(path)["treadle"]["lanes"]}
    assert tids == {lane["lane"]: lane["tid"] for lane in content_of(tmp_path / "whole.json")["treadle"]["lanes"]}


def test_a_part_alone_is_refused(tmp_path: Path) -> None:
    paths = parts_of(trace_of(), tmp_path, 0, 1, 3, 4)
    with pytest.raises(
        ValueError, match=r"ranks0\.json: holds rank 0 of 4 only; merge it with the files of the others"
    ):
        chrome.load(paths[0])
    with pytest.raises(ValueError, match=r"ranks1\.json: holds ranks 1 to 2 of 4 only"):
        chrome.load(paths[1])


def test_merge_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    trace = trace_of()
    one, two, three = parts_of(trace, tmp_path, 0, 1, 3, 4)
    with pytest.raises(ValueError, match="no files to merge"):
        chrome.merge([])
    with pytest.raises(ValueError, match="none of the 2 files holds ranks 1 to 2 of 4; add the one that does"):
        chrome.merge([one, three])
    with pytest.raises(ValueError, match="none of the 2 files holds rank 3 of 4"):
        chrome.merge([one, two])
    with pytest.raises(ValueError, match="none of the 2 files holds rank 0 of 4"):
        chrome.merge([three, two])
    with pytest.raises(ValueError, match=r"rank 1 is in .*ranks1\.json and in .*ranks1\.json; leave one of them out"):
        chrome.merge([one, two, two, three])
    chrome.dump(trace, tmp_path / "whole.json")
    with pytest.raises(ValueError, match=r"rank 3 is in .*whole\.json and in .*ranks3\.json"):
        chrome.merge([three, tmp_path / "whole.json"])


def test_merge_refuses_other_programs_clocks_and_ways_to_know(tmp_path: Path) -> None:
    trace = trace_of("1f1b", 2, 4)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    chrome.dump(trace, one, ranks=range(1))
    for other in (trace_of("gpipe", 2, 4), trace_of("1f1b", 2, 6), trace_of("1f1b", 4, 4)):
        chrome.dump(other, two, ranks=range(1, 2))
        with pytest.raises(
            ValueError, match=r"one\.json and .*two\.json are of different programs \(.*, and .*\); merge"
        ):
            chrome.merge([one, two])
    chrome.dump(replace(trace, clock=Clock("us", 1000)), two, ranks=range(1, 2))
    with pytest.raises(ValueError, match=r"one\.json and .*two\.json differ in clock \(.*unit.*us.*\)"):
        chrome.merge([one, two])
    chrome.dump(replace(trace, measured=True), two, ranks=range(1, 2))
    with pytest.raises(ValueError, match=r"one\.json and .*two\.json differ in measured \(False and True\)"):
        chrome.merge([one, two])


@pytest.mark.parametrize("ranks", [range(5), range(-1, 2), range(2, 2), range(0, 4, 2), range(3, 0, -1)])
def test_ranks_that_there_are_not(ranks: range, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks is a range of the 4 ranks such as range\(0, 4\), got range"):
        chrome.dump(trace_of(), tmp_path / "trace.json", ranks=ranks)
    assert not list(tmp_path.iterdir())


# Sizes


def test_more_ops_than_viewers_open_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chrome.MOST_OPS == 1_000_000
    trace = trace_of()
    monkeypatch.setattr(write, "MOST_OPS", trace.program.num_ops // 2)
    with pytest.raises(ValueError, match=r"170 ops are more than the 85 .*; write .npz, or some ranks .*`ranks`"):
        chrome.dump(trace, tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
    assert_same_trace(chrome.merge(parts_of(trace, tmp_path, 0, 1, 2, 3, 4)), trace)


def test_a_million_ops_and_one_are_refused(tmp_path: Path) -> None:
    num = chrome.MOST_OPS + 1
    program = trace_of("1f1b", 1, 1).program
    per_op = {"kind", "mb", "chunk", "layer", "cell", "launch", "size_bytes", "joined"}
    columns: dict[str, Any] = {name: np.zeros(num, DTYPES[name]) for name in per_op}
    columns |= {"lane_ptr": np.array([0, num]), "dep_ptr": np.zeros(num + 1, np.int64), "dep": np.empty(0, np.int32)}
    times = np.arange(num)
    with pytest.raises(ValueError, match="1,000,001 ops are more than the 1,000,000"):
        chrome.dump(Trace(replace(program, **columns), times, times + 1), tmp_path / "trace.json")


def test_a_span_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    trace = trace_of("1f1b", 1, 1, "deepseek-v3-h800")
    trace = replace(trace, start=np.array([0, 0]), end=np.array([0, LONGEST_NS + 1000]))
    with pytest.raises(ValueError, match=r"JSON holds times of up to 4,398,046,511,104 us exactly, .*; write \.npz"):
        chrome.dump(trace, tmp_path / "trace.json")


@pytest.mark.slow
def test_a_large_trace_is_read_back(tmp_path: Path) -> None:
    """Of three of the pieces that are written."""
    trace = trace_of("1f1b", 8, 2400, "deepseek-v3-h800")
    assert trace.program.num_ops > 2 * write._PIECE
    chrome.dump(trace, tmp_path / "trace.json")
    assert_same_trace(chrome.load(tmp_path / "trace.json"), trace)
