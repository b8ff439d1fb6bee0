"""Files of torch.profiler: DeepSeek's published profile, and files that are made here, of a GPU too."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import GOLDEN, ROOT
from treadle.costs import costs_text, read
from treadle.ir.ops import OpKind
from treadle.profiles.attribution import NOBODY, attribute, busy_ns, table
from treadle.profiles.importing import import_profile
from treadle.profiles.kineto_file import read_file
from treadle.profiles.reader import Opening
from treadle.profiles.readers.kineto import KinetoReader
from treadle.profiles.recording import RankRecording, Recording
from treadle.profiles.work_names import op_of

DEEPSEEK = ROOT / "tests/data/deepseek/train.json.gz"
"""An extract; make.py beside it names the source."""

KERNELS_US = {
    "attn_f": 4363,
    "dispatch_f": 6690,
    "mlp_f": 4604,
    "combine_f": 8684,
    "combine_b": 5769,
    "mlp_b": 5306,
    "dispatch_b": 7487,
    "attn_b": 9341,
    "attn_w": 2388,
    "mlp_w": 3540,
}
"""Means of a layer over the profile: kernels on the stream that computes, or on the one that communicates."""


def quiet(_: int) -> None:
    """No progress."""


def recording_of(*paths: Path) -> Recording:
    """What the reader makes of files, which it recognises."""
    assert all(KinetoReader().recognises(Opening.of(path)) for path in paths)
    return KinetoReader().read(paths, quiet)


def rows(rank: RankRecording) -> list[tuple[str, int, int, int, int]]:
    """Kind, micro-batch, stage, layer, step of each mark, in order."""
    columns = (rank.mb, rank.stage, rank.layer, rank.step)
    return [
        (OpKind(kind).name, *numbers)
        for kind, *numbers in zip(rank.kind.tolist(), *(column.tolist() for column in columns), strict=True)
    ]


def times(rank: RankRecording) -> list[tuple[str, int, int]]:
    """Kind, start and end of each mark, in microseconds after the base of a file that is made here."""
    columns = (rank.kind, (rank.start - 10**9) // 1000, (rank.end - 10**9) // 1000)
    return [
        (OpKind(kind).name, start, end)
        for kind, start, end in zip(*(column.tolist() for column in columns), strict=True)
    ]


# -- DeepSeek ----------------------------------------------------------------------------------------------------------


def test_every_event_of_deepseeks_device_belongs_to_an_op() -> None:
    file = read_file(DEEPSEEK, quiet)
    owner = attribute(file)
    assert len(owner) == 983
    assert (owner != NOBODY).all()
    assert all(op_of(file.annotations[at].name) for at in np.unique(owner).tolist())
    assert sum(row.num_events for row in table(file)) == 983


def test_deepseeks_sums_are_the_published_ones() -> None:
    file = read_file(DEEPSEEK, quiet)
    compared = set()
    for row in table(file):
        op = op_of(row.name)
        assert op is not None
        name = op[0].name.lower()
        main = max(row.kernel_ns, key=row.kernel_ns.__getitem__)
        assert row.kernel_ns[main] / 4e3 == pytest.approx(KERNELS_US[name], abs=0.51), name
        assert row.num_annotations == 4
        assert row.lane == ("communication" if name.startswith(("dispatch", "combine")) else "compute")
        assert (len(row.kernel_ns) == 2) == (name == "mlp_w")
        compared.add(name)
    assert compared == set(KERNELS_US)


def test_the_preset_has_the_times_of_deepseeks_profile() -> None:
    preset = read(costs_text("deepseek-v3-h800"))[0]
    busy = {row.name: (row.busy_ns - row.copy_ns) / 4e3 for row in table(read_file(DEEPSEEK, quiet))}
    for name, us in busy.items():
        op = op_of(name)
        assert op is not None
        assert preset["layer"][op[0].name.lower()] == pytest.approx(us, abs=0.51), name
    for action, parts in (("f", "(F)"), ("i", "(B)"), ("w", "(W)")):
        assert preset["cells"][action] == pytest.approx(sum(us for name, us in busy.items() if parts in name), abs=2)


def test_deepseeks_compute_is_busy_as_published() -> None:
    device = read_file(DEEPSEEK, quiet).device
    span = int(device.end.max() - device.start.min())
    compute = np.isin(device.stream, (7, 23))
    assert span / 1e6 == pytest.approx(129.0, abs=0.05)
    assert busy_ns(device.start[compute], device.end[compute]) / span == pytest.approx(0.963, abs=0.0005)


def test_deepseeks_marks_are_parts_of_four_layers() -> None:
    recording = recording_of(DEEPSEEK)
    (rank,) = recording.ranks
    assert (rank.rank, len(rank), recording.remarks) == (0, 40, ())
    for kind in (OpKind.ATTN_F, OpKind.DISPATCH_F, OpKind.MLP_F, OpKind.COMBINE_F):
        here = rank.kind == kind
        assert rank.layer[here].tolist() == [0, 1, 2, 3]
        assert set(rank.mb[here].tolist()) == {1}
        assert not rank.joined[here].any()
    for kind in (OpKind.COMBINE_B, OpKind.MLP_B, OpKind.MLP_W, OpKind.DISPATCH_B, OpKind.ATTN_B, OpKind.ATTN_W):
        here = rank.kind == kind
        assert rank.layer[here].tolist() == [3, 2, 1, 0]
        assert set(rank.mb[here].tolist()) == {0}
        assert rank.joined[here].all()
    extent = (rank.end - rank.start)[rank.kind == OpKind.MLP_W]
    assert (extent // 1000).tolist() == [5333, 5059, 5260, 4639]  # over both streams


# -- files that are made here ------------------------------------------------------------------------------------------


def span(name: str, start: float, end: float, tid: int = 1, cat: str = "user_annotation") -> dict[str, Any]:
    """A range of the host, in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": end - start}


_NUMBERS = count(1)


def kernel(
    start: float, end: float, launched: float, tid: int = 1, name: str = "gemm", stream: int = 7
) -> list[dict[str, Any]]:
    """A kernel and the call that launched it."""
    ids = {"correlation": next(_NUMBERS)}
    call = span("cudaLaunchKernel", launched, launched + 1, tid, "cuda_runtime") | {"args": ids}
    return [call, span(name, start, end, stream, "kernel") | {"args": {**ids, "stream": stream}}]


def kineto(path: Path, events: Iterable[dict[str, Any]], rank: int | None = 0, **about: Any) -> Path:
    """A file of a rank, with a base of a second."""
    info = {"distributedInfo": {"rank": rank, "world_size": 4, **about.pop("info", {})}} if rank is not None else {}
    head = {"schemaVersion": 1, "deviceProperties": [], **info, "baseTimeNanoseconds": 1_000_000_000, **about}
    path.write_text(json.dumps({**head, "traceEvents": list(events)}))
    return path


def test_an_op_on_a_device_lasts_as_long_as_its_kernels(tmp_path: Path) -> None:
    backward_thread = 2
    events = [
        span("PP:0F0", 0, 10),
        *kernel(100, 110, launched=2),
        *kernel(115, 130, launched=8),
        *kernel(90, 99, launched=3, name="ncclDevKernel_AllGather", stream=20),
        span("PP:0B0", 20, 30),
        *kernel(140, 160, launched=25, tid=backward_thread),
        span("nccl:send", 31, 32),
        span("PP:0SEND_F0", 30.5, 33),
        *kernel(131, 170, launched=31.5, name="ncclDevKernel_SendRecv", stream=30),
        span("PP:0W0", 40, 41),
        *kernel(50, 51, launched=35),
    ]
    recording = recording_of(kineto(tmp_path / "trace.json", events))
    (rank,) = recording.ranks
    assert rows(rank) == [("W", 0, 0, 0, 0), ("F", 0, 0, 0, 0), ("SEND_F", 0, 0, 0, 0), ("B", 0, 0, 0, 0)]
    assert ((rank.start - 10**9) // 1000).tolist() == [40, 100, 131, 140]
    assert ((rank.end - 10**9) // 1000).tolist() == [41, 130, 170, 160]
    assert [(remark.what, remark.times) for remark in recording.remarks] == [
        ("an event of the device belongs to no op", 1),
        ("an op without work on the device has the times of its host", 1),
    ]


def test_kernels_without_a_launch_are_found_by_annotations_of_the_device(tmp_path: Path) -> None:
    host = span("PP:0F0", 0, 10) | {"args": {"External id": 5}}
    device = span("PP:0F0", 100, 150, 7, "gpu_user_annotation") | {"args": {"External id": 5}}
    (_, event) = kernel(101, 149, launched=1)
    (rank,) = recording_of(kineto(tmp_path / "trace.json", [host, device, event])).ranks
    assert ((rank.start - 10**9).tolist(), (rank.end - 10**9).tolist()) == ([101_000], [149_000])


def test_a_computation_of_a_host_begins_when_its_message_was_found(tmp_path: Path) -> None:
    events = [
        span("PP:1RECV_F0", 0, 2),
        span("gloo:recv", 1, 50),
        span("PP:1RECV_F1", 2, 3),
        span("gloo:recv", 2.5, 101),
        span("PP:1F0", 3, 90),
        span("PP:1F1", 91, 130),
        span("PP:1B0", 131, 140),
    ]
    (rank,) = recording_of(kineto(tmp_path / "trace.json", events)).ranks
    assert rows(rank) == [
        *(("RECV_F", mb, 1, 0, 0) for mb in (0, 1)),
        *(("F", mb, 1, 0, 0) for mb in (0, 1)),
        ("B", 0, 1, 0, 0),
    ]
    assert ((rank.start - 10**9) // 1000).tolist() == [0, 2, 50, 101, 131]
    assert ((rank.end - 10**9) // 1000).tolist() == [50, 101, 90, 130, 140]


def test_a_single_stage_receives_and_sends_inside_its_computation(tmp_path: Path) -> None:
    events = [
        span("Forward 3", 0, 90),
        span("gloo:recv", 1, 50),
        span("c10d::send", 80, 83, cat="cpu_op"),
        span("gloo:send", 82, 200),
    ]
    (rank,) = recording_of(kineto(tmp_path / "trace.json", events)).ranks
    assert rows(rank) == [(kind, 3, -1, 0, 0) for kind in ("RECV_F", "F", "SEND_F")]
    assert ((rank.start - 10**9) // 1000).tolist() == [0, 50, 80]
    assert ((rank.end - 10**9) // 1000).tolist() == [50, 80, 90]


def test_waits_of_torch_are_of_the_op_that_they_wait_for(tmp_path: Path) -> None:
    """A send has left when it is waited for; a reduction ends there. What was sent before the recording has no mark."""
    events = [
        span("PP:0WAIT_SEND_B7", 0, 1),
        span("PP:0F0", 1, 10),
        span("PP:0SEND_F0", 10, 11),
        span("PP:0B0", 20, 30),
        span("PP:0WAIT_SEND_F0", 30, 31),
        span("PP:0REDUCE_GRAD", 40, 41),
        span("PP:0WAIT_REDUCE_GRAD", 50, 60),
    ]
    recording = recording_of(kineto(tmp_path / "trace.json", events))
    (rank,) = recording.ranks
    assert recording.remarks == ()
    assert times(rank) == [
        ("F", 1, 10),
        ("SEND_F", 10, 11),
        ("B", 20, 30),
        ("REDUCE_GRAD", 40, 60),
    ]


def test_kernels_of_a_wait_are_of_the_op_that_it_waits_for(tmp_path: Path) -> None:
    """FSDP has a range of its own in it."""
    events = [
        *(span("PP:0F0", 0, 5), *kernel(2, 9, launched=1)),
        *(span("PP:0REDUCE_GRAD", 10, 11), *kernel(12, 40, launched=10.5, name="ncclDevKernel_ReduceScatter")),
        *(span("PP:0WAIT_REDUCE_GRAD", 20, 25), span("FSDP::post_backward", 21, 24), *kernel(40, 45, launched=22)),
        span("PP:0WAIT_SEND_F0", 26, 27),
    ]
    recording = recording_of(kineto(tmp_path / "trace.json", events))
    (rank,) = recording.ranks
    assert recording.remarks == ()
    assert times(rank) == [
        ("F", 2, 9),
        ("REDUCE_GRAD", 12, 45),
    ]


@pytest.mark.parametrize("directory", sorted((GOLDEN / "torch").glob("*/profile")), ids=lambda path: path.parent.name)
def test_a_profile_of_each_version_of_torch_is_imported_without_a_remark(directory: Path) -> None:
    imported = import_profile([directory])
    assert (imported.schedule.name, imported.named, imported.remarks) == ("interleaved", True, ())


def test_steps_are_profiler_steps_or_begin_where_an_op_comes_again(tmp_path: Path) -> None:
    ops = [span(f"PP:0{kind}0", at, at + 5) for at, kind in ((0, "F"), (10, "B"), (20, "F"), (30, "B"))]
    (counted,) = recording_of(kineto(tmp_path / "counted.json", ops)).ranks
    assert counted.step.tolist() == [0, 0, 1, 1]
    named = [span("ProfilerStep#7", -1, 18), span("ProfilerStep#8", 18, 40)]
    (numbered,) = recording_of(kineto(tmp_path / "named.json", [*named, *ops])).ranks
    assert numbered.step.tolist() == [7, 7, 8, 8]
    together = [span("ProfilerStep#7", -1, 40)]
    (accumulated,) = recording_of(kineto(tmp_path / "together.json", [*together, *ops])).ranks
    assert accumulated.step.tolist() == [0, 0, 1, 1]


def test_process_groups_say_where_a_rank_stands(tmp_path: Path) -> None:
    def groups(pipeline: str) -> dict[str, Any]:
        return {
            "pg_config": [
                {"pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
                {"pg_desc": pipeline, "ranks": [1, 3]},
                {"pg_desc": "mesh_dp", "ranks": [2, 3]},
            ]
        }

    op = [span("PP:1F0", 0, 5)]
    recording = recording_of(kineto(tmp_path / "a.json", op, rank=3, info=groups("mesh_pp"), host_name="node7"))
    (rank,) = recording.ranks
    assert (rank.rank, rank.pp, rank.dp, recording.pp, recording.dp, rank.clock) == (3, 1, 1, 2, 2, "node7")
    renamed = recording_of(kineto(tmp_path / "b.json", op, rank=3, info=groups("mine")))
    assert (renamed.ranks[0].pp, renamed.pp) == (-1, None)
    assert "no process group is called that of a pipeline (default_pg, mesh_dp, mine)" in str(renamed.remarks[0])


def test_a_rank_is_told_by_the_content_then_by_the_name(tmp_path: Path) -> None:
    op = [span("PP:1F0", 0, 5)]
    named = kineto(tmp_path / "rank2_trace.json", op, rank=None)
    told = kineto(tmp_path / "rank5_trace.json", op, rank=1)
    recording = recording_of(named, told)
    assert [rank.rank for rank in recording.ranks] == [1, 2]
    assert "its name says rank 5, its content rank 1, which counts" in str(recording.remarks[0])
    with pytest.raises(ValueError, match=r"rank1_trace.json: of rank 1, as .*rank5_trace.json; give"):
        recording_of(told, kineto(tmp_path / "rank1_trace.json", op, rank=1))
    nameless = kineto(tmp_path / "trace.json", op, rank=None)
    with pytest.raises(ValueError, match=r"trace.json: neither its content .* call it rank0_trace.json"):
        recording_of(nameless, told)


def test_what_is_not_marked_or_not_known_is_said(tmp_path: Path) -> None:
    unmarked = kineto(tmp_path / "rank0.json", [span("step", 0, 5)])
    with pytest.raises(ValueError, match=r"rank0.json: no op of a pipeline is marked in it: .* Schedule1F1B"):
        recording_of(unmarked)
    odd = kineto(
        tmp_path / "rank1.json", [span("PP:1F0", 0, 5), span("PP:1F", 6, 7), span("PP:0UNSHARD", 8, 30_000)], 1
    )
    recording = recording_of(unmarked, odd)
    assert [rank.rank for rank in recording.ranks] == [1]
    told = [remark.what for remark in recording.remarks]
    assert told == [
        "PP:0UNSHARD or RESHARD, work of FSDP, has no op: 30.0 ms in all",
        "unknown range 'PP:1F', ignored",
        "no op of a pipeline is marked in it",
    ]


def test_a_cut_file_is_used_up_to_the_cut(tmp_path: Path) -> None:
    whole = gzip.decompress(DEEPSEEK.read_bytes())
    path = tmp_path / "rank0.json"
    path.write_bytes(whole[: whole.rindex(b'"mlp(B)"')])
    recording = recording_of(path)
    assert len(recording.ranks[0]) == 32
    assert "cut off: its JSON ends before it is closed; what stands before that is used" in str(recording.remarks[0])


def test_lanes_that_the_profiler_did_not_see_come_from_beside_the_events(tmp_path: Path) -> None:
    left: dict[str, Any] = {
        "treadle step 0": [["PP:dispatch_f 2.1 L3", 1_000_000_500, 1_000_000_900], ["PP:1SEND_F2", 5, 6]]
    }
    (rank,) = recording_of(kineto(tmp_path / "trace.json", [span("PP:attn_f 2.1 L3", 0, 0.4)], **left)).ranks
    assert rows(rank) == [("SEND_F", 2, 1, 0, 0), ("ATTN_F", 2, -1, 3, 0), ("DISPATCH_F", 2, -1, 3, 0)]
    assert rank.chunk.tolist() == [-1, 1, 1]
    assert rank.end.tolist() == [6, 1_000_000_400, 1_000_000_900]
