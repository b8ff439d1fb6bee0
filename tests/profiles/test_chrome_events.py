"""Events of Chrome traces, read in pieces: as a parser of the whole file finds them, wherever the pieces end."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from treadle.profiles import chrome_events
from treadle.profiles.chrome_events import ChromeEvents, to_ns

WANTED = ("kernel", "user_annotation")

EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "ts": 1, "args": {"name": 'a "cat": "kernel" in a text'}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 2.5, "dur": 1, "args": {"Input Dims": [[4, 4], [4]]}},
    {"ph": "X", "cat": "kernel", "name": "gemm<{lambda()#1}>", "ts": 3.125, "dur": 7, "args": {"grid": [1, 1, 1]}},
    {"ph": "X", "cat": "user_annotation", "name": 'PP:0F3 "quoted" \\ é', "ts": 1740461679471346.5, "dur": 0.001},
    {"ph": "X", "cat": "kernel", "name": "k" * 5000, "ts": 9, "dur": 1, "args": {"deep": {"deeper": {"x": [{}]}}}},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "ts": 4},
    {"ph": "X", "cat": "kernel", "name": "last", "ts": 11, "dur": 1, "args": {}},
]
ABOUT = {"schemaVersion": 1, "distributedInfo": {"rank": 3, "pg_config": [{"ranks": [0, 3]}]}}


def written(path: Path, indent: int | None = None) -> Path:
    """A file as a profiler writes it: facts, events, one fact behind them."""
    text = json.dumps({**ABOUT, "traceEvents": EVENTS, "traceName": "x"}, indent=indent, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(path: Path) -> tuple[list[dict[str, Any]], ChromeEvents, int]:
    """The events, their reader, and how many bytes it said it had read."""
    told: list[int] = []
    events = ChromeEvents(path, WANTED, told.append)
    return list(events), events, sum(told)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("piece_bytes", [7, 64, 1000, 2**22])
def test_events_are_those_of_a_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, indent: int | None, piece_bytes: int
) -> None:
    monkeypatch.setattr(chrome_events, "PIECE_BYTES", piece_bytes)
    path = written(tmp_path / name, indent)
    found, events, told = read(path)
    wanted = [event for event in EVENTS if event.get("cat") in WANTED]
    assert [event["name"] for event in found] == [event["name"] for event in wanted]
    assert [to_ns(event["ts"]) for event in found] == [3125, 1740461679471346500, 9000, 11000]
    assert [event.get("args") for event in found] == [event.get("args") for event in wanted]
    assert events.about == {**ABOUT, "traceName": "x"}
    assert events.trouble is None
    assert told == path.stat().st_size


@pytest.mark.parametrize("piece_bytes", [7, 2**22])
def test_of_some_categories_one_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(chrome_events, "PIECE_BYTES", piece_bytes)
    path = written(tmp_path / "trace.json")
    for name, num in (("aten::mm", 1), ("aten::m", 0)):
        events = ChromeEvents(path, ("ac2g",), lambda _: None, named={"cpu_op": name})
        assert [event["cat"] for event in events] == ["cpu_op"] * num + ["ac2g"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_cut_file_is_read_up_to_the_cut_and_says_so(tmp_path: Path, name: str) -> None:
    whole = written(tmp_path / name).read_bytes()
    cut = tmp_path / f"cut_{name}"
    seen = set()
    for size in range(len(whole) * 2 // 3, len(whole), 3 if name.endswith("json") else 1):
        cut.write_bytes(whole[:size])
        found, events, told = read(cut)
        assert events.trouble is not None, size
        assert events.trouble.startswith("cut off"), size
        assert told == size
        seen.add(len(found))
    assert max(seen) >= 2


def test_a_damaged_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "trace.json.gz")
    data = bytearray(path.read_bytes())
    data[-8:-4] = b"\0\0\0\0"  # the checksum
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"trace\.json\.gz: damaged: it cannot be decompressed"):
        read(path)
    monkeypatch.setattr(chrome_events, "PIECE_BYTES", 64)
    found, events, _ = read(path)
    assert len(found) >= 3
    assert events.trouble is not None
    assert events.trouble.startswith("damaged")


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '{"schemaVersion": 1, "traceEv'])
def test_a_file_without_events_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json: it has no traceEvents; a Chrome trace is"):
        list(ChromeEvents(path, WANTED, lambda _: None))


@pytest.mark.parametrize(
    ("us", "ns"),
    [
        ("1740461679471346.123", 1740461679471346123),
        (52, 52000),
        ("0.5", 500),
        ("1e3", 1000000),
        (2.0, 2000),
        ("7.1239", 7123),
    ],
)
def test_times_are_exact(us: Any, ns: int) -> None:
    assert to_ns(us) == ns
