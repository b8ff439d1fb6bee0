"""Files as NDTimeline writes them: what is read, what is left out and told, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.support.straggler import timeline
from treadle.ir.ops import OpKind
from treadle.profiles.reader import Opening
from treadle.profiles.readers.ndtimeline import NDTimelineReader
from treadle.profiles.recording import UNKNOWN, Recording


def names(tp: int = 0) -> list[dict[str, Any]]:
    return [
        {"name": "process_name", "pid": 0, "ph": "M", "args": {"name": "DP rank [3]"}},
        {"name": "thread_name", "pid": 0, "tid": 7, "ph": "M", "args": {"name": f"PP rank 1, TP rank {tp}, compute"}},
    ]


def event(name: str, ts: float, dur: float, mb: int = -1, **more: Any) -> dict[str, Any]:
    args = {"step": 5, "model_chunk": 0, "mb_id": mb}
    return {"name": name, "pid": 0, "tid": 7, "ph": "X", "ts": ts, "dur": dur, "args": args, **more}


def read(path: Path, events: object) -> Recording:
    path.write_text(json.dumps(events))
    return NDTimelineReader().read([path], lambda _: None)


def test_marks_and_their_times(tmp_path: Path) -> None:
    events = [
        event("forward-send-backward-recv", 3.25, 1.5),
        event("forward-compute", 1.0004, 2.0, 4),
        event("gc", 9, 0, 0),
    ]
    for content in ([*names(), *events], {"traceEvents": [*events, *names()]}):
        recording = read(tmp_path / "run.json", content)
        (rank,) = recording.ranks
        assert (rank.pp, rank.dp, rank.rank) == (1, 3, 1 * 4 + 3)
        assert [OpKind(kind).name for kind in rank.kind] == ["F", "SEND_F", "RECV_B", "GC"]
        assert rank.start.tolist() == [1000, 3250, 3250, 9000]
        assert rank.end.tolist() == [3000, 4750, 4750, 9000]
        assert rank.mb.tolist() == [4, UNKNOWN, UNKNOWN, UNKNOWN]
        assert set(rank.step.tolist()) == {5}
        assert (recording.pp, recording.dp, recording.num_mb, recording.vpp) == (2, 4, 5, 1)
        assert recording.remarks == ()


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    events = [event("forward-compute", 1, 2, 0), event("data-loading", 0, 1), event("gc", 3, 1, tid=99)]
    told = [str(remark) for remark in read(tmp_path / "run.json", [*names(), *events]).remarks]
    assert told == [
        f"{tmp_path}/run.json: events named 'data-loading' are not known, and left out",
        f"{tmp_path}/run.json: an event is of a thread or process without a name, and left out",
    ]
    second = {"name": "thread_name", "pid": 0, "tid": 8, "ph": "M", "args": {"name": "PP rank 1, TP rank 1, compute"}}
    other = [event("forward-compute", 1, 2, 0, tid=8)] * 3
    (remark,) = read(tmp_path / "run.json", [*names(), second, *events[:1], *other]).remarks
    assert str(remark).endswith("events of tensor-parallel ranks but the first are left out (3 times)")


def test_recognised_by_content(tmp_path: Path) -> None:
    reader, path = NDTimelineReader(), tmp_path / "file"
    path.write_bytes(gzip.compress(json.dumps(timeline("ST")).encode()))
    assert reader.recognises(Opening.of(path))
    for text in (
        '[{"name": "forward-compute"}]',
        '[{"name": "PP:0F0", "args": {"mb_id": 0}}]',
        "forward-compute mb_id",
    ):
        path.write_text(text)
        assert not reader.recognises(Opening.of(path))


def test_a_large_mesh_is_recognised_by_the_names_that_come_first(tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    marks = [event("forward-compute", 10, 5, mb=0), event("backward-compute", 20, 5, mb=0)]
    path.write_text(json.dumps([*names() * 8192, *marks]))
    assert path.stat().st_size > 2**20
    assert NDTimelineReader().recognises(Opening.of(path))
    assert len(NDTimelineReader().read([path], lambda _: None).ranks) == 1


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    path, reader = tmp_path / "run.json.gz", NDTimelineReader()
    packed = gzip.compress(json.dumps(timeline("ST")).encode())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"run.json.gz: cannot be decompressed: .*; the file is cut off or damaged"):
        reader.read([path], lambda _: None)
    path.write_text(json.dumps(names())[:-3])
    with pytest.raises(ValueError, match=r"run.json.gz: is no Chrome trace: .*; the file is cut off or damaged"):
        reader.read([path], lambda _: None)
    with pytest.raises(ValueError, match="a Chrome trace is a list of events, or an object with them as traceEvents"):
        read(path, {"traceEvents": [7]})
    with pytest.raises(ValueError, match="no event of a rank whose place is named"):
        read(path, [event("forward-compute", 0, 1, 0)])


def test_a_run_with_ops_around_its_cells_is_not_verified(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(timeline("ST")))
    imported = treadle.import_profile([path])
    with pytest.raises(ValueError, match="a measured run with gc and reduce_layernorm around its cells"):
        treadle.verify(imported.steps.trace())
    assert treadle.verify(imported.schedule).clean
