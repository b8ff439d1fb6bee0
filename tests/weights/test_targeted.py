"""Targeted plans: every wanted byte once, in matched steps; as Programs sound for any layout, and broken ones found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
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
from treadle.weights.bucket_stream import Stream, stream_of
from treadle.weights.buffer_sizes import Memory
from treadle.weights.chosen_plan import plan_transfer, predicted_s
from treadle.weights.layouts import Parallel, replicated, sharded, tensor_parallel
from treadle.weights.matched_steps import matched_steps
from treadle.weights.summary import measure_update
from treadle.weights.targeted_plan import UntargetedError, plan_targeted
from treadle.weights.tensor_boxes import Holding, Tensor
from treadle.weights.update_checks import verify_update
from treadle.weights.update_lowering import lower_update
from treadle.weights.update_plan import Bucket, UpdatePlan, plan_update
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


routes = st.permutations(range(5)).flatmap(lambda ranks: st.integers(1, 5).map(lambda num: tuple(ranks[:num])))


@settings(max_examples=100, deadline=None)
@given(st.lists(routes, min_size=1, max_size=40), st.integers(1, 2), st.integers(1, 2))
def test_steps_of_any_routes_end_in_any_order(some: list[tuple[int, ...]], num_ipc: int, num_h2d: int) -> None:
    """A route of one device is a bucket that stays."""
    some = [route if len(route) > 1 else route * 2 for route in some]
    hops = matched_steps(some, num_ipc)
    rows = list(zip(hops.bucket, hops.sender, hops.receiver, hops.step, hops.into, hops.held, strict=True))
    moved = [row for row in rows if row[1] != row[2]]
    assert max(Counter((step, sender) for _, sender, _, step, _, _ in moved).values(), default=0) <= 1
    assert max(Counter((step, receiver) for _, _, receiver, step, _, _ in moved).values(), default=0) <= 1
    reads: dict[tuple[int, int], list[int]] = {}
    for number, route in enumerate(some):
        mine = [row for row in rows if row[0] == number]
        assert [(row[1], row[2]) for row in mine] == list(pairwise(route)), "in the order of the route"
        assert all(one[3] < other[3] and one[4] == other[5] for one, other in pairwise(mine))
        for at, row in enumerate(mine if mine[0] in moved else ()):
            until = mine[at + 1][3] if at + 1 < len(mine) else row[3]
            assert not set(range(row[3], until + 1)) & set(reads.setdefault((row[2], row[4]), []))
            reads[row[2], row[4]] += range(row[3], until + 1)
    turns, seen = [], Counter[int]()
    for route in some:
        turns.append(seen[route[0]])
        seen[route[0]] += 1
        sends = [row[3] for row in moved if row[1] == route[0] and some[row[0]][0] == route[0]]
        assert sends == sorted(sends), "a source sends its buckets in their order"
    size = np.full((len(some), 1), 64)
    sources = np.array([route[0] for route in some], np.int32)
    stream = Stream(5, num_h2d, num_ipc, sources, np.array(turns, np.int32), size[:, 0], size, hops)
    program = lower_update(stream)
    assert verify_update(program).clean, verify_update(program)
    assert measure_update(simulate_update(program)).moved_bytes == 64 * len(moved)


@pytest.mark.parametrize("want", ["2 x TP2", "3 x TP2", "8 whole"])
@pytest.mark.parametrize("sources", [1, 2, 4])
def test_a_source_sends_a_piece_once_for_all_its_replicas(sources: int, want: str) -> None:
    num = int(want[0])
    wanted = Parallel(tp=1 if "whole" in want else 2, replicas=num, dim=lambda name: 0).holding(TENSORS)
    held, wanted = apart(sharded(TENSORS, sources), wanted)
    plan = plan_targeted(held, wanted, replace(SMALL, free_bytes=1 << 30, target_bytes=1 << 20))
    check_bytes(plan, held, wanted)
    assert {len(bucket.dests) for bucket in plan.buckets} == {num}
    out, into = Counter[int](), Counter[int]()
    for bucket in plan.buckets:
        for sender, receiver in pairwise((bucket.source, *bucket.dests)):
            out[sender] += bucket.size_bytes
            into[receiver] += bucket.size_bytes
    once = sum(bucket.size_bytes for bucket in plan.buckets)
    assert sum(out[rank] for rank in range(sources)) == once
    assert max(out[rank] for rank in range(sources, sources + 2)) <= max(into.values())
    limit_s = max(*out.values(), *into.values()) / 1e6
    assert predicted_s(plan, Rates(broadcast=1e6)) <= 1.25 * limit_s, "a chain is filled by a bucket a hop"
    assert plan.digest() != replace(plan, buckets=tuple(map(_turned, plan.buckets))).digest()


def _turned(bucket: Bucket) -> Bucket:
    return replace(bucket, dests=bucket.dests[::-1])


@pytest.mark.parametrize("want", ["TP4", "2 x TP2"])
@pytest.mark.parametrize("have", ["PP2 x EP2", "FSDP4"])
def test_the_slowest_link_is_nearly_always_busy(have: str, want: str) -> None:
    """Links alone take time. The limit is the bytes of the device that sends or receives most."""
    memory = Memory(1 << 30, share=1.0, target_bytes=4096, least_bytes=64)
    plan = plan_targeted(HAVE[have], WANT[want], memory)
    out, into = Counter[int](), Counter[int]()
    for bucket in plan.buckets:
        for sender, receiver in pairwise((bucket.source, *bucket.dests)):
            out[sender] += bucket.size_bytes * (sender != receiver)
            into[receiver] += bucket.size_bytes * (sender != receiver)
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
@pytest.mark.parametrize("num", [2, 3])
def test_a_wait_that_is_left_out_is_found_exactly_if_nothing_else_makes_it_wait(num: int) -> None:
    """What buffers ask for is written down from the plan: who fills a buffer waits for who read it last."""
    plan = plan_targeted(sharded(TENSORS[:4], num), replicated(TENSORS[:4], num), replace(SMALL, target_bytes=1024))
    assert max(len(bucket.dests) for bucket in plan.buckets) == num - 1
    program, hops = lower_update(stream_of(plan)), plan.hops
    rank = program.lane_rank[program.lane_of]
    at = {
        (OpKind(int(kind)), int(bucket), int(device)): op
        for op, (kind, bucket, device) in enumerate(zip(program.kind, program.cell, rank, strict=True))
    }
    pairs, held, packed = [], dict[tuple[int, int], list[int]](), dict[int, list[int]]()
    for number, bucket in enumerate(plan.buckets):
        copied = at[OpKind.H2D, number, bucket.source]
        mine = packed.setdefault(bucket.source, [])
        if len(mine) >= plan.num_h2d:
            pairs.append((mine[-plan.num_h2d], copied))
        stays = bucket.dests == (bucket.source,)
        read = at[OpKind.RELOAD if stays else OpKind.SEND_BUCKET, number, bucket.source]
        pairs.append((copied, read))
        mine.append(read)
    for hop in np.lexsort((hops.bucket, hops.step)).tolist():
        number, device = int(hops.bucket[hop]), int(hops.receiver[hop])
        if device == plan.buckets[number].source:
            continue
        got, reads = at[OpKind.RECV_BUCKET, number, device], [at[OpKind.RELOAD, number, device]]
        if device != plan.buckets[number].dests[-1]:
            reads.append(at[OpKind.SEND_BUCKET, number, device])
        pairs += [(got, read) for read in reads]
        pairs += [(read, got) for read in held.get((device, int(hops.into[hop])), ())]
        held[device, int(hops.into[hop])] = reads
    assert len(program.dep) > 20
    order = reaches(program)
    assert all(order[wanted, op] for wanted, op in pairs)
    assert waits_found(program, pairs) > 5


def test_a_route_in_the_wrong_order_or_without_a_hop_is_found() -> None:
    stream = stream_of(plan_targeted(*apart(replicated(TENSORS, 1), replicated(TENSORS, 3)), SMALL))
    hops, program = stream.hops, lower_update(stream)
    assert hops is not None
    assert verify_update(program).clean
    step = hops.step.copy()
    step[[0, 1]] = step[[1, 0]]  # the first taker sends on in a step before it receives
    early = verify_update(lower_update(replace(stream, hops=replace(hops, step=step))))
    assert "T201" in {finding.code for finding in early.findings}, early
    rank = program.lane_rank[program.lane_of]
    sends_on = np.flatnonzero((program.kind == OpKind.SEND_BUCKET) & (rank != program.layer))
    sent = program.cell[sends_on[0]]
    came = np.flatnonzero((program.kind == OpKind.RECV_BUCKET) & (program.cell == sent))
    receive = int(came[rank[came] == rank[sends_on[0]]][0])
    for op, words in ((int(sends_on[0]), "send bucket"), (receive, "recv bucket")):
        report = verify_update(leave_out(op)(program))
        assert "T101" in {finding.code for finding in report.findings}
        assert words in str(report)


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
