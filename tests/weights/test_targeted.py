"""Targeted plans: every wanted byte once, in matched steps; as Programs sound for any layout, and broken ones found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.weights.test_program import leave_out, put, reaches, wait_for, waits_found
from treadle.cli.app import app
from treadle.files import npz
from treadle.ir.execute import execute
from treadle.ir.ops import LaneKind, OpKind
from treadle.ir.program import NEVER, Program
from treadle.weights.bucket_stream import matched_steps, stream_of
from treadle.weights.buffer_sizes import Memory
from treadle.weights.chosen_plan import plan_transfer, predicted_s
from treadle.weights.layouts import Parallel, replicated, sharded, tensor_parallel
from treadle.weights.summary import measure_update
from treadle.weights.targeted_plan import UntargetedError, plan_targeted
from treadle.weights.tensor_boxes import Holding, Tensor
from treadle.weights.update_checks import verify_update
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import UpdatePlan, plan_update
from treadle.weights.update_rates import Rates, simulate_update

SMALL = Memory(1 << 20, share=1.0, target_bytes=4096, least_bytes=256)
TENSORS = [Tensor("embed", (64, 32), "bfloat16"), Tensor("norm", (32,), "float32"), Tensor("empty", (0, 4), "int8")]
TENSORS += [Tensor(f"layers.{i // 4}.experts.{i % 4}", (64, 32), "bfloat16") for i in range(8)]
TENSORS += [Tensor("scale", (64, 1), "float32", "q"), Tensor("values", (64, 32), "int8", "q")]


def _stage(name: str) -> int:
    return int(name[7]) if name.startswith("layers") else 0


def _expert(name: str) -> int | None:
    return int(name[-1]) // 2 if "experts" in name else None


HAVE = {
    "PP2 x EP2": Parallel(pp=2, ep=2, stage=_stage, expert=_expert).holding(TENSORS),
    "FSDP4": sharded(TENSORS, 4),
    "all on each": replicated(TENSORS, 3),
    "one": replicated(TENSORS, 1),
}
WANT = {
    "TP4": tensor_parallel(TENSORS, 4, lambda name: 1 if "experts" in name else None),
    "2 x TP2": Parallel(tp=2, replicas=2, dim=lambda name: 0).holding(TENSORS),
    "whole, twice": replicated(TENSORS, 2),
    "PP2": Parallel(pp=2, stage=_stage).holding(TENSORS),
}


def apart(have: Holding, want: Holding) -> tuple[Holding, Holding]:
    """The same on separate devices: sources first."""
    sources = len(have.pieces)
    none = ((),) * sources
    return replace(have, pieces=(*have.pieces, *((),) * len(want.pieces))), replace(want, pieces=(*none, *want.pieces))


def check_bytes(plan: UpdatePlan, have: Holding, want: Holding) -> None:
    """Element by element, from the layouts alone: what arrives is what is wanted, once, from who has it."""
    for taker, pieces in enumerate(want.pieces):
        for name, tensor in want.tensors.items():
            wanted, came = np.zeros(tensor.shape, int), np.zeros(tensor.shape, int)
            for piece in pieces:
                if piece.tensor == name:
                    wanted[tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))] = 1
            for bucket in plan.buckets:
                for item in bucket.items if taker in bucket.dests else ():
                    if item.piece.tensor == name:
                        box = item.piece.box
                        came[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
                        assert any(
                            own.tensor == name and own.box.meet(box) == box for own in have.pieces[bucket.source]
                        )
            assert np.array_equal(wanted, came), (taker, name)


@pytest.mark.parametrize("separate", [False, True], ids=["beside", "separate"])
@pytest.mark.parametrize("want", WANT)
@pytest.mark.parametrize("have", HAVE)
def test_every_wanted_byte_moves_once_and_the_program_is_sound(have: str, want: str, separate: bool) -> None:
    held, wanted = apart(HAVE[have], WANT[want]) if separate else (HAVE[have], WANT[want])
    plan = plan_targeted(held, wanted, SMALL)
    check_bytes(plan, held, wanted)
    assert max(bucket.size_bytes for bucket in plan.buckets) <= 4096
    program = lower_update(stream_of(plan))
    report = verify_update(program)
    assert report.clean, report
    assert execute(program, np.ones(program.num_ops, np.int64)).finished
    assert plan.digest() == plan_targeted(held, wanted, SMALL).digest()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40))
def test_a_device_sends_one_and_receives_one_in_a_step(pairs: list[tuple[int, int]]) -> None:
    sources, dests = [s for s, _ in pairs], [d for _, d in pairs]
    steps = matched_steps(sources, dests)
    moved = [(step, s, d) for step, s, d in zip(steps, sources, dests, strict=True) if s != d]
    assert max(Counter((step, s) for step, s, _ in moved).values(), default=0) <= 1
    assert max(Counter((step, d) for step, _, d in moved).values(), default=0) <= 1
    for device in range(5):
        for side in (sources, dests):
            mine = [step for step, rank in zip(steps, side, strict=True) if rank == device]
            assert mine == sorted(mine), "the buckets of a device move in their order"


@pytest.mark.parametrize("want", ["TP4", "2 x TP2"])
@pytest.mark.parametrize("have", ["PP2 x EP2", "FSDP4"])
def test_the_slowest_link_is_nearly_always_busy(have: str, want: str) -> None:
    """Links alone take time. The limit is the bytes of the device that sends or receives most."""
    memory = Memory(1 << 30, share=1.0, target_bytes=4096, least_bytes=64)
    plan = plan_targeted(HAVE[have], WANT[want], memory)
    out, into = Counter[int](), Counter[int]()
    for bucket in plan.buckets:
        if bucket.source not in bucket.dests:
            out[bucket.source] += bucket.size_bytes
            into[bucket.dests[0]] += bucket.size_bytes
    limit_s = max(*out.values(), *into.values()) / 1e6
    assert predicted_s(plan, Rates(broadcast=1e6)) <= 1.15 * limit_s


def test_what_is_on_a_device_does_not_leave_it() -> None:
    plan = plan_targeted(replicated(TENSORS, 2), tensor_parallel(TENSORS, 2, lambda name: 0), SMALL)
    assert all(bucket.dests == (bucket.source,) for bucket in plan.buckets)
    program = lower_update(stream_of(plan))
    assert verify_update(program).clean
    assert measure_update(simulate_update(program)).moved_bytes == 0


def test_the_faster_way_is_chosen() -> None:
    links = Rates(broadcast=1e6)  # buckets are small here: no latency
    parts = plan_transfer(HAVE["PP2 x EP2"], WANT["TP4"], SMALL, rates=links)
    assert parts.is_targeted
    broadcast = plan_update(HAVE["PP2 x EP2"], WANT["TP4"], SMALL)
    assert predicted_s(parts, links) < predicted_s(broadcast, links) / 2
    assert not plan_transfer(HAVE["PP2 x EP2"], WANT["TP4"], SMALL, rates=Rates(latency_s=1)).is_targeted, "fewer ops"
    one, many = apart(replicated(TENSORS, 1), replicated(TENSORS, 6))
    assert not plan_transfer(one, many, SMALL, rates=links).is_targeted, (
        "one source sends the same to six devices: once is enough"
    )
    assert plan_transfer(one, many, SMALL, transfer="targeted").is_targeted


def test_without_room_for_two_buffers_buckets_are_broadcast() -> None:
    tight = Memory(600, share=1.0, target_bytes=512, least_bytes=512)
    with pytest.raises(UntargetedError, match="no room"):
        plan_targeted(HAVE["FSDP4"], WANT["TP4"], tight)
    assert not plan_transfer(HAVE["FSDP4"], WANT["TP4"], tight).is_targeted


def test_pieces_that_several_ranks_have_are_named_for_comparison() -> None:
    plan = plan_targeted(HAVE["PP2 x EP2"], WANT["TP4"], SMALL)
    shared = {some.ranks: {piece.tensor for piece in some.pieces} for some in plan.shared}
    assert shared == {(0, 1): {"embed", "norm", "scale", "values"}}
    assert plan_targeted(HAVE["FSDP4"], WANT["TP4"], SMALL).shared == ()


# ---- broken programs -------------------------------------------------------------------------------------------------


def whole() -> Program:
    return lower_update(stream_of(plan_targeted(HAVE["PP2 x EP2"], WANT["2 x TP2"], SMALL)))


def op_of(program: Program, kind: OpKind, nth: int = 0) -> int:
    return int(np.flatnonzero(program.kind == kind)[nth])


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_found_exactly_if_nothing_else_makes_it_wait() -> None:
    """What buffers ask for is written down from the plan: who fills a buffer waits for who read it last."""
    plan = plan_targeted(sharded(TENSORS[:4], 2), replicated(TENSORS[:4], 2), replace(SMALL, target_bytes=1024))
    program = lower_update(stream_of(plan))
    at = {
        (OpKind(int(kind)), int(bucket)): op
        for op, (kind, bucket) in enumerate(zip(program.kind, program.cell, strict=True))
    }
    pairs, came, packed = [], dict[int, list[int]](), dict[int, list[int]]()
    for number, bucket in enumerate(plan.buckets):
        copied, read = at[OpKind.H2D, number], at[OpKind.RELOAD, number]
        mine = packed.setdefault(bucket.source, [])
        if len(mine) >= plan.num_h2d:
            pairs.append((mine[-plan.num_h2d], copied))
        if bucket.source in bucket.dests:
            pairs.append((copied, read))
            mine.append(read)
            continue
        sent, got = at[OpKind.SEND_BUCKET, number], at[OpKind.RECV_BUCKET, number]
        pairs += [(copied, sent), (got, read)]
        mine.append(sent)
        before = came.setdefault(bucket.dests[0], [])
        if len(before) >= plan.num_ipc:
            pairs.append((before[-plan.num_ipc], got))
        before.append(read)
    assert len(program.dep) > 20
    order = reaches(program)
    assert all(order[wanted, op] for wanted, op in pairs)
    assert waits_found(program, pairs) > 5


def test_broken_programs_are_found() -> None:
    program = whole()
    assert verify_update(program).clean
    send, recv, reload = (op_of(program, kind) for kind in (OpKind.SEND_BUCKET, OpKind.RECV_BUCKET, OpKind.RELOAD))
    broken = {
        "a send is missing": (leave_out(send)(program), {"T101"}, "send bucket"),
        "a receive is missing": (leave_out(recv)(program), {"T101"}, "recv bucket"),
        "a reload is missing": (leave_out(reload)(program), {"T101"}, "is missing"),
        "of another size": (put("size_bytes", recv, 1)(program), {"T205"}, "bytes"),
        "another bucket": (put("mb", recv, int(program.mb[recv]) - 1)(program), {"T105"}, "has no place"),
        "a wait for nothing": (wait_for(recv, NEVER)(program), {"T203"}, "waits for ever"),
        "a circle": (wait_for(op_of(program, OpKind.H2D), recv)(program), set[str](), ""),
    }
    for name, (changed, codes, words) in broken.items():
        report = verify_update(changed)
        assert codes <= {finding.code for finding in report.findings}, (name, report)
        assert words in str(report), name


def test_a_lane_without_its_other_end_is_found() -> None:
    program = whole()
    group = program.lane_group.copy()
    group[np.flatnonzero(program.lane_kind == LaneKind.SEND)[0]] = NEVER
    assert "T202" in {finding.code for finding in verify_update(replace(program, lane_group=group)).findings}


@pytest.mark.slow
def test_files_pictures_and_text_hold_targeted_updates(tmp_path: Path) -> None:
    trace = simulate_update(whole(), Rates(h2d=1e9, broadcast=1e6, reload=1e9))
    npz.save_trace(trace, tmp_path / "update.npz")
    assert np.array_equal(npz.load_trace(tmp_path / "update.npz").end, trace.end)
    for command in (
        ["verify"],
        ["show"],
        ["draw", "-o", str(tmp_path / "u.svg")],
        ["draw", "-o", str(tmp_path / "u.html")],
    ):
        done = CliRunner().invoke(app, [command[0], str(tmp_path / "update.npz"), *command[1:]])
        assert done.exit_code == 0, (command, done.output)
        if command == ["show"]:
            assert "src" in done.output
            assert "dst" in done.output
