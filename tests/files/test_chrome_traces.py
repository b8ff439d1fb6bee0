"""The .json files of Traces: what viewers need, and what damage does to them."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.example_traces import (
    assert_same_program,
    assert_same_trace,
    by_layers,
    content_of,
    events_of,
    trace_of,
)
from treadle.files import chrome
from treadle.files.checked_columns import fingerprint
from treadle.files.chrome import write
from treadle.ir.ops import OpKind

VIEWED = {
    "dualpipe": lambda: trace_of("dualpipe"),
    "zb-v real": lambda: trace_of("zb-v", 4, 8, "deepseek-v3-h800"),
    "slow": lambda: trace_of("1f1b", 4, 8, "deepseek-v3-h800", 0.3),
    "layers": by_layers,
}


@pytest.mark.parametrize("name", VIEWED)
def test_every_event_has_what_the_format_asks_for(name: str, tmp_path: Path) -> None:
    trace = VIEWED[name]()
    chrome.dump(trace, tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    assert content["displayTimeUnit"] in ("ms", "ns")
    keys = {
        "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
        "s": {"ph", "id", "name", "cat", "pid", "tid", "ts"},
        "f": {"ph", "bp", "id", "name", "cat", "pid", "tid", "ts"},
    }
    for event in content["traceEvents"]:
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert list(event["args"]) == ["name" if event["name"].endswith("_name") else "sort_index"]
        else:
            assert set(event) == keys[event["ph"]]
            assert event["ts"] >= 0
        assert type(event["pid"]) is int
        assert event["pid"] >= 1, "viewers take process 0 for the kernel's"
    assert sum(event["ph"] == "X" for event in content["traceEvents"]) == trace.program.num_ops


@pytest.mark.parametrize("name", VIEWED)
def test_processes_are_ranks_and_threads_are_lanes(name: str, tmp_path: Path) -> None:
    trace = VIEWED[name]()
    chrome.dump(trace, tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {rank + 1: f"rank {rank}" for rank in range(trace.program.num_ranks)}
    threads = {e["tid"]: (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    lanes = [trace.program.lane(lane) for lane in range(trace.program.num_lanes)]
    assert sorted(threads.values()) == sorted((lane.rank + 1, lane.name) for lane in lanes)
    assert not threads.keys() & processes.keys(), "a thread whose tid is its pid is a main thread to viewers"
    for event in events:
        if event["ph"] == "X":
            op = trace.program.op(event["args"]["index"])
            assert threads[event["tid"]] == (op.lane.rank + 1, op.lane.name)
            assert event["cat"] == op.lane.kind.name.lower()
            assert event["name"] == str(op).partition(" to rank")[0].partition(" from rank")[0]
            assert event["args"]["deps"] == trace.program.deps(op.index)


def test_threads_stand_in_the_order_a_person_reads(tmp_path: Path) -> None:
    chrome.dump(by_layers(), tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    places = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = [names[tid] for tid in sorted(names, key=lambda tid: places[tid])]
    assert order[:7] == ["compute", "ep", "send to rank 1", "out", "in", "dp", "host"]
    assert order[7:] == ["compute", "ep", "recv from rank 0"]
    assert sorted(places, key=lambda tid: places[tid]) == sorted(places), "viewers without sort_index go by tid"


@pytest.mark.parametrize("name", ["dualpipe", "zb-v real", "slow"])
def test_events_of_a_thread_do_not_overlap(name: str, tmp_path: Path) -> None:
    """But for the halves of an overlapped cell, which are drawn one under the other."""
    chrome.dump(VIEWED[name](), tmp_path / "trace.json")
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events_of(tmp_path / "trace.json"):
        if event["ph"] == "X" and not event["args"].get("joined"):
            start = round(event["ts"] * 1000)
            threads[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for spans in threads.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start


@pytest.mark.parametrize("name", VIEWED)
def test_arrows_join_sends_to_their_receives(name: str, tmp_path: Path) -> None:
    trace = VIEWED[name]()
    chrome.dump(trace, tmp_path / "trace.json")
    arrows: dict[int, dict[str, int]] = defaultdict(dict)
    last: dict[int, dict[str, Any]] = {}
    for event in events_of(tmp_path / "trace.json"):
        if event["ph"] == "X":
            last[event["tid"]] = event
        elif event["ph"] in "sf":
            span = last[event["tid"]]  # Perfetto binds an arrow to the event before it on its thread
            assert span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
            assert event["ph"] == "s" or "s" in arrows[event["id"]], "an arrow starts before it ends"
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = span["args"]["index"]
    assert all(set(ends) == {"s", "f"} for ends in arrows.values())
    kinds = trace.program.kind
    assert len(arrows) == np.isin(kinds, (OpKind.SEND_F, OpKind.SEND_B)).sum()
    for ends in arrows.values():
        send, receive = trace.program.op(ends["s"]), trace.program.op(ends["f"])
        assert send.kind.is_send
        assert receive.kind.is_recv
        assert (send.lane.rank, send.lane.peer) == (receive.lane.peer, receive.lane.rank)
        assert send.label == receive.label or name == "layers"


def test_units_are_whole_microseconds(tmp_path: Path) -> None:
    """What a person reads on the time axis of a schedule in units."""
    chrome.dump(trace_of("1f1b", 2, 2), tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    assert content["otherData"]["time"] == "1 unit is 1 us here"
    durations = {event["name"][0]: event["dur"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert durations["F"] == 1
    assert durations["B"] == 2
    assert content["treadle"]["clock"] == {"unit": "unit", "ticks": 720_720}


def test_nanoseconds_are_three_decimals(tmp_path: Path) -> None:
    trace = trace_of("1f1b", 1, 1, "deepseek-v3-h800")
    chrome.dump(replace(trace, start=np.array([5, 1005]), end=np.array([1005, 3_000_006])), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"ts":0.000,"dur":1.000,' in text
    assert '"ts":1.000,"dur":2999.001,' in text


def test_receives_that_start_before_their_sends_have_their_arrow_where_both_run(tmp_path: Path) -> None:
    """Measured, a receive is posted early."""
    trace = trace_of("1f1b", 2, 2, "deepseek-v3-h800")
    recv = np.isin(trace.program.kind, (OpKind.RECV_F, OpKind.RECV_B))
    chrome.dump(replace(trace, start=np.where(recv, 0, trace.start)), tmp_path / "trace.json")
    ends = {(e["ph"], e["id"]): e["ts"] for e in events_of(tmp_path / "trace.json") if e["ph"] in "sf"}
    assert ends
    assert all(ends["s", name] == ends["f", name] > 0 for _, name in ends)


def test_gzip_and_streams(tmp_path: Path) -> None:
    trace, stream = trace_of(), io.StringIO()
    chrome.dump(trace, tmp_path / "trace.json")
    chrome.dump(trace, str(tmp_path / "trace.json.gz"))
    chrome.dump(trace, stream)
    text = (tmp_path / "trace.json").read_text()
    assert stream.getvalue() == text
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode() == text
    (tmp_path / "no_suffix").write_bytes((tmp_path / "trace.json.gz").read_bytes())
    assert_same_trace(chrome.load(tmp_path / "no_suffix"), trace)


def test_pieces_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of()
    chrome.dump(trace, tmp_path / "one.json")
    monkeypatch.setattr(write, "_PIECE", 7)
    chrome.dump(trace, tmp_path / "many.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "many.json").read_bytes()


# Chrome traces: reading


def save(content: object, path: Path) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_file_from_before_a_key_of_the_layout_was_added_is_read(tmp_path: Path) -> None:
    trace, path = trace_of(), tmp_path / "trace.json"
    chrome.dump(trace, path)
    content = content_of(path)
    layout = content["treadle"]["layout"]
    layout["layers"] = [0 for _ in layout.pop("blocks")]
    content["treadle"]["program"] = fingerprint(trace.program, layout)
    assert chrome.load(save(content, path)).makespan == trace.makespan
    layout["kept"] = 0.5
    with pytest.raises(ValueError, match="something was changed"):
        chrome.load(save(content, path))


def test_events_may_come_in_any_order(tmp_path: Path) -> None:
    """As other tools leave them, which also write 5.000 as 5."""
    trace = trace_of(cost="deepseek-v3-h800")
    chrome.dump(trace, tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    random.Random(0).shuffle(content["traceEvents"])
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["dur"] == int(event["dur"]):
            event["dur"] = int(event["dur"])
    content = dict(reversed(content.items()))
    assert_same_trace(chrome.load(save(content, tmp_path / "other.json")), trace)


def event_with(place: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the fields of the n-th op's event; `args__` reaches inside, None takes a field out."""

    def change(content: dict[str, Any]) -> None:
        event = [event for event in content["traceEvents"] if event["ph"] == "X"][place]
        for key, value in changes.items():
            target = event["args"] if key.startswith("args__") else event
            name = key.removeprefix("args__")
            target[name] = value
            if value is None:
                del target[name]

    return change


def treadle_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["treadle"].update(changes)

    return change


def lane_with(place: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["treadle"]["lanes"][place].update(changes)

    return change


def without_event(content: dict[str, Any]) -> None:
    content["traceEvents"].remove(next(e for e in content["traceEvents"] if e.get("args", {}).get("index") == 5))


def event_again(content: dict[str, Any]) -> None:
    content["traceEvents"].append(next(e for e in content["traceEvents"] if e.get("args", {}).get("index") == 5))


def without_lane(content: dict[str, Any]) -> None:
    content["treadle"]["lanes"].pop()


BAD_JSON: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c.pop("treadle"), "a JSON file, but no trace of treadle"),
    (lambda c: c.pop("traceEvents"), "traceEvents is missing"),
    (lambda c: c.update(more=1), "more is not known; known are displayTimeUnit, "),
    (lambda c: c.update(traceEvents={}), "traceEvents is a list, got an object"),
    (lambda c: c.update(treadle=[]), "treadle is an object, got a list of 0"),
    (treadle_with(version=2), "treadle.version is 1, the one that this treadle reads, got 2"),
    (treadle_with(origin=0.5), "treadle.origin is a whole number"),
    (treadle_with(ticks_per_us=0), "treadle.ticks_per_us is a whole number from 1"),
    (treadle_with(ticks_per_us=5), "ts is a number from 0 without decimals, got 0.0"),
    (treadle_with(num_ops=3), r"each op from 0 to 2 has an event, and one only, but op 3 has 1"),
    (treadle_with(num_ops=10**15), "each op from 0 to 999999999999999 has an event, and one only, but op 40 has 0"),
    (treadle_with(num_lanes=3), "each lane from 0 to 2 has an entry in treadle.lanes, and one only, but lane 3 has 1"),
    (
        treadle_with(program="0" * 32),
        "the events and lanes are not those of program 0{32}, which treadle.program names",
    ),
    (treadle_with(ranks=[1, 0]), r"treadle.ranks is the first and the last rank of the file, got \[1, 0\]"),
    (treadle_with(ranks=[0, 9]), r"treadle.ranks\[1\] is a whole number from 0 to 1, got 9"),
    (treadle_with(lanes=[3]), r"treadle.lanes\[0\] is an object, got 3"),
    (
        lane_with(0, kind="compute"),
        r"treadle.lanes\[0\].kind is a kind of lane: COMPUTE, .*, got 'compute'; did you mean 'COMPUTE'?",
    ),
    (lane_with(0, kind=[]), r"treadle.lanes\[0\].kind is a kind of lane: .*, got a list of 0"),
    (lane_with(1, rank=5), r"treadle.lanes\[1\].rank is a whole number from 0 to 1, got 5"),
    (lane_with(1, tid=3), "treadle.lanes gives the tid 3 to two lanes"),
    (lane_with(1, peer=7), "column 'lane_peer' has values from -1 to 1, got 7"),
    (lane_with(1, group=1), "not those of program"),
    (lane_with(0, num_ops=99), "the num_ops of lane 0 do not end where the next lane begins"),
    (lane_with(0, first=99), "traceEvents.*op 0 is of no lane with pid 1 and tid 3 in treadle.lanes"),
    (without_lane, "is of no lane with"),
    (without_event, "each op from 0 to 39 has an event, and one only, but op 5 has 0"),
    (event_again, "each op from 0 to 39 has an event, and one only, but op 5 has 2"),
    (lambda c: c["traceEvents"].append(7), r"traceEvents\[\d+\] is an event of ph X, M, s or f, got 7"),
    (lambda c: c["traceEvents"].append({"ph": "C"}), r"traceEvents\[\d+\] is an event of ph .*, got ph 'C'"),
    (event_with(0, name=None), r"traceEvents\[\d+\]: an op has .*, got one without 'name'"),
    (event_with(0, more=1), r"traceEvents\[\d+\]: an op has .*, got one with 'more' too"),
    (event_with(0, args=[]), r"traceEvents\[\d+\]: args is an object, got a list of 0"),
    (event_with(0, args__mb=None), r"traceEvents\[\d+\]: args has .*, got one without 'mb'"),
    (event_with(0, args__more=1), r"traceEvents\[\d+\]: args has .*, got one with .* too"),
    (event_with(3, args__mb="3"), r"traceEvents\[\d+\]: args.mb is a whole number .*, got '3'"),
    (event_with(3, args__mb=3.0), r"traceEvents\[\d+\]: args.mb is a whole number .*, got 3.0"),
    (event_with(3, args__mb=True), r"traceEvents\[\d+\]: args.mb is a whole number .*, got true"),
    (event_with(3, args__chunk=2**15), r"args.chunk is a whole number from -32768 to 32767, got 32768"),
    (event_with(3, args__index=10**30), r"args.index is a whole number"),
    (event_with(3, args__index=-1), "op -1 is of no lane with pid 1"),
    (event_with(3, args__index=39), "op 39 is of no lane with pid 1"),
    (event_with(3, args__kind="G"), r"args.kind is a kind of op \(F, .*\), got 'G'"),
    (event_with(3, args__kind=["F"]), r"args.kind is a kind of op .*, got \['F'\]"),
    (event_with(3, args__joined=1), "args.joined is true or false, got 1"),
    (event_with(3, args__deps=3), "args.deps is a list, got 3"),
    (event_with(3, args__deps=[1, "2"]), "args.deps is a whole number .*, got '2'"),
    (event_with(3, args__deps=[99]), "column 'dep' has values from -1 to 39, got 99"),
    (event_with(3, args__mb=1, args__deps=[]), "not those of program"),
    (event_with(3, pid=2), "op 3 is of no lane with pid 2 and tid 3"),
    (event_with(3, tid=99), "op 3 is of no lane with pid 1 and tid 99"),
    (event_with(3, ts="0"), "ts is a number from 0 with at most three decimals, got '0'"),
    (event_with(3, ts=-1.0), "ts is a number from 0 with at most three decimals, got -1.0"),
    (event_with(3, ts=0.0005), "ts is a number from 0 with at most three decimals, got 0.0005"),
    (event_with(3, ts=1e300), "ts is a number from 0 with at most three decimals, got 1e"),
    (event_with(3, dur=True), "dur is a number from 0 with at most three decimals, got true"),
]


@cache
def good_json() -> str:
    stream = io.StringIO()
    chrome.dump(trace_of("1f1b", 2, 5, "deepseek-v3-h800"), stream)
    return stream.getvalue()


@pytest.mark.parametrize(("change", "message"), BAD_JSON, ids=[message for _, message in BAD_JSON])
def test_json_errors_name_the_place(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    content = json.loads(good_json())
    change(content)
    with pytest.raises(ValueError, match=f"mine.json: .*({message})"):
        chrome.load(save(content, tmp_path / "mine.json"))


def test_decimals_of_a_clock_that_has_none(tmp_path: Path) -> None:
    chrome.dump(trace_of("1f1b", 2, 5), tmp_path / "trace.json")
    content = content_of(tmp_path / "trace.json")
    event_with(3, ts=1.5)(content)
    with pytest.raises(ValueError, match=r"ts is a number from 0 without decimals, got 1\.5"):
        chrome.load(save(content, tmp_path / "mine.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value"),
        ("{", "not JSON: "),
        ("[]", "the trace is an object, got a list of 0"),
        ("\xff", "not JSON: "),
        ("[" * 100_000, "nested deeper than any trace"),
        ('{"treadle": NaN}', "not JSON: NaN is no number of JSON"),
        ('{"treadle": 1, "treadle": 2}', "not JSON: 'treadle' is given twice in one object"),
        ('{"treadle": ' + "9" * 5000 + "}", "not JSON: "),
        ("\x1f\x8b\x08junk", "cannot be decompressed: "),
    ],
)
def test_files_that_are_no_traces(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"mine\.json: {message}"):
        chrome.load(tmp_path / "mine.json")


@given(st.integers(0, 5000), st.one_of(st.none(), st.integers(1, 255)))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_gzip_files_do_not_get_through(tmp_path: Path, place: int, mask: int | None) -> None:
    content = bytearray(gzip.compress(good_json().encode(), mtime=0))
    place %= len(content)
    if mask is None:
        del content[place:]
    else:
        content[place] ^= mask
    (tmp_path / "mine.json.gz").write_bytes(content)
    try:
        read = chrome.load(tmp_path / "mine.json.gz")
    except ValueError as error:
        assert "mine.json.gz: " in str(error)  # noqa: PT017 - either way is right
    else:
        assert_same_trace(read, trace_of("1f1b", 2, 5, "deepseek-v3-h800"))


@pytest.mark.slow
@given(st.integers(0, 30_000), st.sampled_from(["9", "-", '"', "0", "}", "]", ",", "", ".5", "null", "e9", "x"]))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_edited_json_is_a_trace_or_a_value_error(tmp_path: Path, place: int, text: str) -> None:
    """Names and arrows are not read back, and times are whatever they say; the program is the one that was written."""
    whole = good_json()
    place %= len(whole)
    (tmp_path / "mine.json").write_text(whole[:place] + text + whole[place + 1 :])
    try:
        read = chrome.load(tmp_path / "mine.json")
    except ValueError as error:
        assert "mine.json: " in str(error)  # noqa: PT017 - either way is right
    else:
        assert_same_program(read.program, trace_of("1f1b", 2, 5, "deepseek-v3-h800").program)
