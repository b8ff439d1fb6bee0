"""Weight updates as Programs: as published, sound for any size, and broken ones are found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.paths import GOLDEN
from treadle.cli.app import app
from treadle.files import npz
from treadle.ir.execute import Times, execute
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Bools, Program
from treadle.verifier import VerifyReport
from treadle.weights.bucket_stream import Stream, even_stream, stream_of
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel, sharded, tensor_parallel
from treadle.weights.summary import measure_update
from treadle.weights.tensor_boxes import Tensor
from treadle.weights.update_checks import verify_update
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import plan_update
from treadle.weights.update_rates import Rates, simulate_update

BUFFERS = [(h2d, ipc) for h2d in (0, 1, 2) for ipc in (1, 2)]
PUBLISHED = even_stream(4, 2)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_published_figure(tmp_path: Path) -> None:
    path = str(tmp_path / "update.npz")
    run("simulate-update", "--devices", "4", "--rounds", "2", "-o", path)
    shown = run("show", path)
    assert rows(shown) == rows((GOLDEN / "update" / "d4_r2.txt").read_text())
    assert rows(run("show", path, "--rows")) == rows(shown)
    assert "makespan 17" in shown


@pytest.mark.parametrize(
    ("buffers", "makespan"), [((0, 1), 48), ((0, 2), 25), ((1, 1), 23), ((1, 2), 17), ((2, 2), 13)]
)
def test_more_buffers_hide_more(buffers: tuple[int, int], makespan: int) -> None:
    """Worked out by hand: serial 8 x (4 + 1 + 1), ..., with two H2D buffers 4 + 8 broadcasts + the last reload."""
    trace = simulate_update(lower_update(even_stream(4, 2, num_h2d=buffers[0], num_ipc=buffers[1])))
    assert trace.makespan == makespan * trace.clock.ticks


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Sources with different numbers of buckets, of different sizes, of which devices take different parts."""
    devices = draw(st.integers(1, 4))
    per_device = draw(st.lists(st.integers(0, 3), min_size=devices, max_size=devices).filter(any))
    pairs = sorted((turn, source) for source, num in enumerate(per_device) for turn in range(num))
    sizes = draw(st.lists(st.integers(1, 9), min_size=len(pairs), max_size=len(pairs)))
    taken = [[draw(st.integers(0, size)) for _ in range(devices)] for size in sizes]
    num_h2d, num_ipc = draw(st.sampled_from(BUFFERS))
    turns, sources = (np.array([pair[side] for pair in pairs], np.int32) for side in (0, 1))
    return Stream(devices, num_h2d, num_ipc, sources, turns, np.array(sizes), np.array(taken))


def find(program: Program, kind: OpKind, rank: int, bucket: int) -> int:
    lane = program.lane_of
    found = np.flatnonzero((program.kind == kind) & (program.lane_rank[lane] == rank) & (program.cell == bucket))
    assert len(found) == 1
    return int(found[0])


def check_times(stream: Stream, program: Program, times: Times) -> None:
    """By the times alone: no buffer is touched by two at once, and it is filled, read, filled, read."""
    assert times.finished
    for device in range(stream.num_devices):
        for buffer in range(stream.num_ipc):
            sequence: list[int] = []
            for bucket in range(buffer, stream.num_buckets, stream.num_ipc):
                if stream.source[bucket] == device and stream.num_h2d == 0:
                    sequence.append(find(program, OpKind.H2D, device, bucket))
                sequence += [find(program, kind, device, bucket) for kind in (OpKind.BROADCAST, OpKind.RELOAD)]
            ends = times.end[sequence]
            assert (times.start[sequence][1:] >= ends[:-1]).all()
        mine = np.flatnonzero(stream.source == device)
        for buffer in range(stream.num_h2d):
            used = mine[buffer :: stream.num_h2d]
            sequence = [find(program, kind, device, b) for b in used for kind in (OpKind.H2D, OpKind.BROADCAST)]
            assert (times.start[sequence][1:] >= times.end[sequence][:-1]).all()
        for own in mine:
            copied, sent = (find(program, kind, device, int(own)) for kind in (OpKind.H2D, OpKind.BROADCAST))
            assert times.start[sent] >= times.end[copied]


@pytest.mark.slow
@settings(max_examples=150)
@given(streams(), st.randoms(use_true_random=False))
def test_any_update_is_sound_whatever_its_ops_take(stream: Stream, random: Random) -> None:
    program = lower_update(stream)
    report = verify_update(program)
    assert report.clean, report
    dur = np.array([random.randint(0, 5) for _ in range(program.num_ops)], np.int64)
    check_times(stream, program, execute(program, dur))
    largest = [stream.size_bytes[i :: stream.num_ipc].max(initial=0) for i in range(stream.num_ipc)]
    assert max(report.peaks) >= sum(largest)


def reaches(program: Program) -> Bools:
    """[a, b]: must a have ended before b starts: the transitive closure of a small program, by no code of treadle's."""
    n = program.num_ops
    group: dict[tuple[int, int], int] = {}
    node = list(range(n))
    for lane in range(program.num_lanes):
        if program.lane_group[lane] >= 0:
            for place, op in enumerate(range(program.lane_ptr[lane], program.lane_ptr[lane + 1])):
                node[op] = node[group.setdefault((int(program.lane_group[lane]), place), op)]
    before = np.zeros((n, n), bool)
    for lane in range(program.num_lanes):
        for op in range(program.lane_ptr[lane] + 1, program.lane_ptr[lane + 1]):
            before[node[op - 1], node[op]] = True
    for op in range(n):
        for dep in program.deps(op):
            before[node[dep], node[op]] = True
    while True:
        more = before | (before.astype(np.float32) @ before.astype(np.float32) > 0)
        if (more == before).all():
            return before[np.ix_(node, node)]
        before = more


def must_wait(stream: Stream, program: Program) -> list[tuple[int, int]]:
    """(what must have ended, what may start then), written down from the buffers, not from the rule."""
    pairs = []
    for device in range(stream.num_devices):
        for bucket in range(stream.num_buckets):
            sent, read = (find(program, kind, device, bucket) for kind in (OpKind.BROADCAST, OpKind.RELOAD))
            pairs.append((sent, read))
            own = stream.source[bucket] == device
            copy = find(program, OpKind.H2D, device, bucket) if own else NEVER
            pairs += [(copy, sent)] if own else []
            if bucket >= stream.num_ipc:
                freed = find(program, OpKind.RELOAD, device, bucket - stream.num_ipc)
                pairs.append((freed, sent))
                pairs += [(freed, copy)] if own and stream.num_h2d == 0 else []
        mine = np.flatnonzero(stream.source == device)
        if stream.num_h2d:
            for earlier, later in zip(mine[: -stream.num_h2d], mine[stream.num_h2d :], strict=True):
                sent, copy = find(program, OpKind.BROADCAST, device, earlier), find(program, OpKind.H2D, device, later)
                pairs.append((sent, copy))
    return pairs


def without_dep(program: Program, place: int) -> Program:
    ptr = program.dep_ptr - (program.dep_ptr > place)
    return replace(program, dep_ptr=ptr, dep=np.delete(program.dep, place))


def waits_found(program: Program, pairs: list[tuple[int, int]]) -> int:
    """Leave out each wait in turn, and return how many were needed: those that keep ops of `pairs` in order."""
    found = 0
    for place in range(len(program.dep)):
        broken = without_dep(program, place)
        order = reaches(broken)
        unordered = {op for wanted, op in pairs if not order[wanted, op]}
        report = verify_update(broken)
        assert {finding.code for finding in report.findings} <= {"T401"}
        assert {finding.op for finding in report.findings} == unordered
        found += bool(unordered)
    return found


@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_wait_that_is_left_out_is_found_exactly_if_nothing_else_makes_it_wait(buffers: tuple[int, int]) -> None:
    stream = even_stream(3, 3, num_h2d=buffers[0], num_ipc=buffers[1])
    program = lower_update(stream)
    found = waits_found(program, must_wait(stream, program))
    assert found >= 3 * 9 * 2 - 10


Change = Callable[[Program], Program]


def put(column: str, op: int, value: int) -> Change:
    def change(program: Program) -> Program:
        values = getattr(program, column).copy()
        values[op] = value
        return replace(program, **{column: values})

    return change


def both(one: Change, other: Change) -> Change:
    return lambda program: other(one(program))


def swap(one: int, other: int) -> Change:
    """Two ops of one lane change places; what waits for a place waits for whatever is there then."""

    def change(program: Program) -> Program:
        columns = {}
        for name in ("mb", "chunk", "layer", "cell", "size_bytes"):
            values = getattr(program, name).copy()
            values[[one, other]] = values[[other, one]]
            columns[name] = values
        return replace(program, **columns)

    return change


def leave_out(op: int) -> Change:
    """An op disappears, and with it the waits of others for it."""

    def change(program: Program) -> Program:
        keep = np.arange(program.num_ops) != op
        owner = np.repeat(np.arange(program.num_ops), np.diff(program.dep_ptr))
        kept = keep[owner] & (program.dep != op)
        count = np.bincount(owner[kept], minlength=program.num_ops)[keep]
        dep = program.dep[kept]
        return replace(
            program,
            **{name: getattr(program, name)[keep] for name in ("kind", "mb", "chunk", "layer", "cell", "launch")},
            size_bytes=program.size_bytes[keep],
            joined=program.joined[keep],
            lane_ptr=program.lane_ptr - (program.lane_ptr > op),
            dep_ptr=np.r_[0, np.cumsum(count)],
            dep=(dep - (dep > op)).astype(np.int32),
        )

    return change


def wait_for(op: int, wanted: int) -> Change:
    def change(program: Program) -> Program:
        place = int(program.dep_ptr[op + 1])
        ptr = program.dep_ptr + (np.arange(len(program.dep_ptr)) > op)
        return replace(program, dep_ptr=ptr, dep=np.insert(program.dep, place, wanted).astype(np.int32))

    return change


def lane(program: Program, rank: int, kind: LaneKind) -> int:
    return int(np.flatnonzero((program.lane_rank == rank) & (program.lane_kind == kind))[0])


def at(kind: OpKind, rank: int, bucket: int) -> int:
    return find(lower_update(PUBLISHED), kind, rank, bucket)


H2D, BROADCAST, RELOAD = OpKind.H2D, OpKind.BROADCAST, OpKind.RELOAD
BROKEN: dict[str, tuple[Change, set[str], str]] = {
    "a reload is missing": (leave_out(at(RELOAD, 2, 3)), {"T101"}, "reload 0.3 is missing"),
    "a copy is missing": (leave_out(at(H2D, 1, 5)), {"T101", "T401"}, "h2d 1.1 is missing"),
    "a broadcast is missing on one device": (leave_out(at(BROADCAST, 1, 7)), {"T101", "T202", "T401"}, "has only 7"),
    "broadcasts in another order on one device": (
        swap(at(BROADCAST, 3, 2), at(BROADCAST, 3, 3)),
        {"T204"},
        "broadcast 0.3 meets broadcast 0.2 of rank 0",
    ),
    "a broadcast into the other buffer on one device": (put("chunk", at(BROADCAST, 2, 4), 1), {"T204"}, "meets"),
    "a broadcast of another size": (put("size_bytes", at(BROADCAST, 1, 2), 7), {"T205"}, "of 1 and 7 bytes"),
    "a copy of another size": (
        put("size_bytes", at(H2D, 1, 1), 7),
        {"T205"},
        "but h2d 0.1, which it reads, of 7",
    ),
    "more reloaded than came": (put("size_bytes", at(RELOAD, 1, 1), 2), {"T205"}, "reload 0.1 is of 2 bytes, but"),
    "a bucket twice": (
        both(put("layer", at(BROADCAST, 0, 1), 0), put("cell", at(BROADCAST, 0, 1), 0)),
        {"T102", "T101"},
        "broadcast 0.0 runs more than once",
    ),
    "another source than on the other devices": (
        put("layer", at(BROADCAST, 0, 1), 0),
        {"T105", "T101"},
        "has no place in this update",
    ),
    "a round that is not there": (put("mb", at(RELOAD, 0, 7), 2), {"T105", "T101"}, "has no place in this update"),
    "a copy for another device": (put("layer", at(H2D, 0, 0), 1), {"T105", "T101"}, "copies for device 1"),
    "a reload on the lane of broadcasts": (put("kind", at(BROADCAST, 0, 0), RELOAD), {"T105"}, "stands on a lane for"),
    "a wait for nothing": (wait_for(at(RELOAD, 0, 0), NEVER), {"T203"}, "waits for ever"),
    "a circle": (wait_for(at(H2D, 0, 0), at(RELOAD, 3, 6)), {"T201"}, "wait for each other in a circle"),
    "a reload that waits for a later one": (wait_for(at(RELOAD, 1, 0), at(RELOAD, 1, 1)), {"T201"}, "circle"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_updates_are_found(name: str) -> None:
    change, codes, words = BROKEN[name]
    program = lower_update(PUBLISHED)
    assert verify_update(program).clean
    report = verify_update(change(program))
    assert codes <= {finding.code for finding in report.findings}, report
    assert words in str(report)


def test_a_broadcast_before_its_buffer_was_reloaded_is_found() -> None:
    program = lower_update(PUBLISHED)
    sent, freed = find(program, BROADCAST, 2, 2), find(program, RELOAD, 2, 0)
    place = int(program.dep_ptr[sent]) + program.deps(sent).index(freed)
    report = verify_update(without_dep(program, place))
    (finding,) = report.findings
    assert str(finding) == (
        "T401 rank 2: broadcast 0.2 does not wait for reload 0.0, which reads what is in its IPC buffer"
    )


def test_a_device_outside_of_the_group_is_found() -> None:
    program = lower_update(PUBLISHED)
    group = program.lane_group.copy()
    group[lane(program, 3, LaneKind.BROADCAST)] = NEVER
    report: VerifyReport = verify_update(replace(program, lane_group=group))
    assert "T202" in {finding.code for finding in report.findings}


COLUMNS = {"kind": 26, "mb": 3, "chunk": 3, "layer": 4, "cell": 7, "size_bytes": 3, "dep": 42, "lane_kind": 11}
"""How far a random value may go; some of it makes no sense."""


CHANGES = st.lists(st.tuples(st.sampled_from(list(COLUMNS)), st.integers(0), st.integers(0)), max_size=4)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from(BUFFERS), CHANGES)
def test_no_columns_make_the_verifier_stumble(buffers: tuple[int, int], changes: list[tuple[str, int, int]]) -> None:
    """And what it calls clean ends, and its waits are those that the buffers ask for."""
    stream = even_stream(3, 2, num_h2d=buffers[0], num_ipc=buffers[1])
    program = lower_update(stream)
    for name, place, value in changes:
        column = getattr(program, name).copy()
        lowest = 0 if name in ("kind", "lane_kind") else -1
        column[place % len(column)] = value % (COLUMNS[name] - lowest) + lowest
        program = replace(program, **{name: column})
    report = verify_update(program)
    assert str(report)
    if report.clean and {name for name, *_ in changes} <= {"dep", "size_bytes"}:
        assert execute(program, np.arange(program.num_ops, dtype=np.int64)).finished
        order = reaches(program)
        assert all(order[wanted, op] for wanted, op in must_wait(stream, program))


def test_buffers_over_the_limit_are_found() -> None:
    program = lower_update(even_stream(4, 2, bucket_bytes=100))
    assert verify_update(program, memory_limit=300).clean
    report = verify_update(program, memory_limit=299)
    assert [finding.code for finding in report.findings] == ["T302"] * 4
    assert "has 300 bytes of buffers" in str(report)


def test_the_program_of_a_plan() -> None:
    """PP2 x EP2 into TP4: sizes on the lanes are those of the plan."""
    tensors = [Tensor(f"layers.{i // 4}.experts.{i % 4}", (64, 32), "bfloat16") for i in range(8)]
    have = Parallel(pp=2, ep=2, stage=lambda n: int(n[7]), expert=lambda n: int(n[-1]) // 2).holding(tensors)
    want = tensor_parallel(tensors, 4, lambda name: 0)
    plan = plan_update(have, want, Memory(20_000, share=1.0, target_bytes=4096, least_bytes=64))
    stream = stream_of(plan)
    program = lower_update(stream)
    assert verify_update(program).clean
    assert (plan.num_h2d, plan.num_ipc, stream.num_rounds) == (2, 2, 8)
    assert program.size_bytes[program.kind == BROADCAST].sum() == 4 * 8 * 4096
    assert program.size_bytes[program.kind == RELOAD].sum() == 8 * 4096
    assert set(program.size_bytes[program.kind == RELOAD]) == {1024}
    metrics = measure_update(simulate_update(program, Rates(h2d=1e6, broadcast=1e6, reload=1e6)))
    assert metrics.moved_bytes == 8 * 4096


def test_a_plan_without_work_is_an_update_without_ops() -> None:
    empty = [Tensor("nothing", (0, 4), "float32")]
    plan = plan_update(sharded(empty, 2), tensor_parallel(empty, 2, lambda name: 0), Memory(1 << 30))
    program = lower_update(stream_of(plan))
    assert program.num_ops == 0
    assert verify_update(program).clean


def test_files_hold_updates(tmp_path: Path) -> None:
    trace = simulate_update(lower_update(PUBLISHED))
    npz.save_trace(trace, tmp_path / "update.npz")
    loaded = npz.load_trace(tmp_path / "update.npz")
    assert loaded.program.layout == trace.program.layout
    assert np.array_equal(loaded.end, trace.end)
    assert loaded.program.layout.is_update
    run("simulate-update", "--devices", "2", "--rounds", "1", "-o", str(tmp_path / "trace.npz"))
    run("show", str(tmp_path / "trace.npz"), "-o", str(tmp_path / "program.npz"))
    for name in ("trace.npz", "program.npz"):
        assert "clean" in run("verify", str(tmp_path / name))
        assert "makespan 7" in run("simulate", str(tmp_path / name))
        assert rows(run("show", str(tmp_path / name)))
    assert rows(run("show", str(tmp_path / "update.npz"))) == rows((GOLDEN / "update" / "d4_r2.txt").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate-update", "--devices", "2"), "an update has --rounds, or --size and --bucket"),
        (("simulate-update", "--devices", "2", "--rounds", "1", "--h2d-rate", "1GB"), "need --size"),
        (("simulate-update", "--devices", "2", "--size", "1GB"), "--size needs --broadcast-rate"),
        (("simulate-update", "--devices", "2", "--rounds", "1", "--h2d-buffers", "3"), "0, 1 or 2 H2D buffers"),
    ],
)
def test_errors_say_the_way_out(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_simulating_at_size() -> None:
    """A hand calculation: 16 devices, 160 GB in buckets of 5 GB are 2 rounds; only broadcasts take time."""
    size = ("--devices", "16", "--size", "160GB", "--bucket", "5GB", "--broadcast-rate", "80GB")
    assert "makespan 2 s, 160 GB broadcast" in run("simulate-update", *size)
    slow = run("simulate-update", *size, "--h2d-rate", "50GB", "--reload-rate", "5000GB")
    assert "makespan 2.201 s" in slow  # and two copies of 0.1 s, and the last reload of 1 ms


def test_what_is_hidden() -> None:
    metrics = measure_update(simulate_update(lower_update(PUBLISHED)))
    assert metrics.hidden == 0.75
    unit = metrics.clock.ticks
    assert [(d.h2d, d.broadcast, d.reload, d.h2d_hidden, d.reload_hidden) for d in metrics.devices] == [
        (8 * unit, 8 * unit, 8 * unit, 0, 6 * unit)
    ] * 4
    deeper = measure_update(simulate_update(lower_update(even_stream(4, 2, num_h2d=2))))
    assert deeper.devices[0].h2d_hidden == 4 * unit
    assert deeper.hidden == 7 / 8
