"""Weight updates between real processes: every byte right, seen from the worker's side; from FSDP; memory flat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.devices import DEVICE_TYPE
from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update.faults import shared_memory
from tests.support.update.models import SMALL, Compare, expected, model, numbers, served, source_of, trained
from tests.support.update.workers import Workers, ask_once, resident_bytes
from treadle.ir.ops import OpKind
from treadle.ir.program import NEVER
from treadle.update import Source, Updated, UpdateOptions, Updater
from treadle.update.protocol.update_messages import Answer, Rollback
from treadle.weights.buffer_sizes import Memory
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Box, Holding, Tensor
from treadle.weights.update_checks import verify_update

MiB = 1 << 20


def update_ranks(
    rank: int, sockets: Path, ledger: Path, have: Holding, versions: list[int], options: UpdateOptions
) -> list[Updated]:
    done = []
    with Updater(sockets, ledger=ledger, options=options) as updater:
        for version in versions:
            done.append(bare(updater.update(source_of(have, rank, version), version)))
    return done


def bare(d: Updated) -> Updated:
    """The result without the fields that cannot leave its process."""
    return Updated(d.version, d.epoch, d.size_bytes, d.rollback_bytes, d.rollbacks, d.seconds, d.notes)


@pytest.mark.parametrize("rollback", ["host", "disk", "none"])
def test_every_byte_arrives(rollback: Rollback) -> None:
    tensors = model(4, 64)
    have, want = trained(tensors, 4), served(tensors)
    with Workers(want) as workers:
        args = (
            workers.sockets,
            workers.ledger,
            have,
            [1, 2],
            UpdateOptions(SMALL, rollback=rollback, deadline_s=PATIENT_S),
        )
        for done in check(run_ranks(4, update_ranks, *args)):
            assert [updated.version for updated in done] == [1, 2]
            assert (done[1].rollback_bytes > 0) == (rollback != "none")
        for worker in range(4):
            answer = ask_once(workers.sockets, worker)
            assert isinstance(answer, Answer)
            assert (answer.version, answer.body.decode()) == (2, expected(want, worker, 2))


def changed_options(rank: int, sockets: Path, ledger: Path, have: Holding, options: UpdateOptions) -> list[int]:
    """Bytes that rollback copies held in two updates, the second without one."""
    with Updater(sockets, ledger=ledger, options=options) as updater:
        updater.update(source_of(have, rank, 1), 1)
        first = updater.update(source_of(have, rank, 2), 2).rollback_bytes
        updater.options = replace(options, rollback="none")
        return [first, updater.update(source_of(have, rank, 3), 3).rollback_bytes]


def test_options_that_are_assigned_hold_from_the_next_update_on() -> None:
    tensors = model(1, 32)
    have, want = trained(tensors, 4), served(tensors)
    with Workers(want) as workers:
        args = workers.sockets, workers.ledger, have, UpdateOptions(SMALL, rollback="host", deadline_s=PATIENT_S)
        for first, second in check(run_ranks(4, changed_options, *args)):
            assert first > 0
            assert second == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [192, pytest.param(1024, marks=pytest.mark.nightly)], ids=["36 MiB", "a gibibyte"])
def test_many_experts_of_pp_ep_into_tp(width: int) -> None:
    """Buckets are a sixteenth of it, as many as of a large model."""
    tensors = model(8, width, experts=28)
    have, want = trained(tensors, 8), served(tensors)
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    assert size_bytes >= width**2 << 10
    memory = Memory(size_bytes // 4, target_bytes=size_bytes // 16, least_bytes=size_bytes // 64)
    options = UpdateOptions(memory, deadline_s=PATIENT_S, rollback="none")
    with Workers(want) as workers:
        args = workers.sockets, workers.ledger, have, [1], options
        done = check(run_ranks(4, update_ranks, *args))
        assert all(updated[0].size_bytes >= size_bytes for updated in done)
        for worker in range(4):
            assert workers.tell(worker, Compare(1)) == []


class Net(nn.Module):
    """Layers whose rows do not divide by the ranks."""

    def __init__(self, width: int, rows: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, rows, bias=True) for _ in range(layers))


def net_tensors(width: int, rows: int, layers: int) -> list[Tensor]:
    named = Net.__new__(Net)
    with torch.device("meta"):
        named.__init__(width, rows, layers)  # type: ignore[misc]
    return [Tensor(name, tuple(value.shape), "bfloat16") for name, value in named.state_dict().items()]


def fsdp_ranks(
    rank: int, sockets: Path, ledger: Path, sizes: tuple[int, int, int], options: UpdateOptions
) -> list[str]:
    mesh = init_device_mesh(DEVICE_TYPE, (4,))
    with torch.device("meta"):
        net = Net(*sizes).to(torch.bfloat16)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.to_empty(device=torch.get_default_device())
    shown = []
    with Updater(sockets, ledger=ledger, options=options) as updater:
        for version in (1, 2):
            state: dict[str, Any] = net.state_dict()
            source = Source.of(state)
            for piece, local in source.held.items():
                local.copy_(
                    torch.from_numpy(numbers(source.tensors[piece.tensor], piece.box, version)).view(local.dtype)
                )
            assert all(isinstance(value, DTensor) for value in state.values())
            updater.update(source, version)
            shown.append(f"{sum(piece.box.num_elements for piece in source.held)}")
    return shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [(64, 50, 3), (512, 1026, 8), pytest.param((4096, 16386, 8), marks=pytest.mark.nightly)],
    ids=["uneven", "in buckets", "a gibibyte"],
)
def test_from_an_fsdp_source(sizes: tuple[int, int, int]) -> None:
    tensors = net_tensors(*sizes)
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    want = Parallel(tp=4, dim=lambda name: 1 if "weight" in name else None).holding(tensors)
    memory = Memory(size_bytes // 4, target_bytes=size_bytes // 16, least_bytes=size_bytes // 64)
    options = UpdateOptions(memory, deadline_s=PATIENT_S, rollback="none")
    with Workers(want) as workers:
        check(run_ranks(4, fsdp_ranks, workers.sockets, workers.ledger, sizes, options))
        for worker in range(4):
            assert workers.tell(worker, Compare(2)) == []


def held_now() -> tuple[int, int]:
    """Bytes and descriptors of this process."""
    return sum(resident_bytes()), len(list(Path("/proc/self/fd").iterdir()))


def many_updates(
    rank: int, sockets: Path, ledger: Path, have: Holding, versions: range, options: UpdateOptions
) -> list[tuple[int, int]]:
    held = []
    source = source_of(have, rank, 0)
    with Updater(sockets, ledger=ledger, options=options) as updater:
        for version in versions:
            if version == versions[-1]:  # the one that is compared
                for piece, local in source.held.items():
                    local.copy_(as_bfloat16(numbers(source.tensors[piece.tensor], piece.box, version)))
            updater.update(source, version)
            held.append(held_now())
    return held


def worker_holds(adapter: Any) -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text()
    assert "/dev/shm/" not in maps  # shared memory has no name that could be left behind
    return held_now()


@pytest.mark.slow
@pytest.mark.parametrize("num_updates", [16, pytest.param(50, marks=pytest.mark.nightly)])
def test_memory_is_flat_over_many_updates(num_updates: int) -> None:
    tensors = model(4, 384)
    have, want, before = trained(tensors, 4), served(tensors), shared_memory()
    options = UpdateOptions(Memory(8 * MiB, target_bytes=2 * MiB), deadline_s=PATIENT_S)
    with Workers(want) as workers:
        places = workers.sockets, workers.ledger, have
        check(run_ranks(4, many_updates, *places, range(1, 4), options))
        first = [workers.tell(worker, worker_holds) for worker in range(4)]
        ranks = check(run_ranks(4, many_updates, *places, range(4, 4 + num_updates), options))
        last = [workers.tell(worker, worker_holds) for worker in range(4)]
        assert [workers.tell(worker, Compare(3 + num_updates)) for worker in range(4)] == [[]] * 4
    processes = [*zip(first, last, strict=True), *((held[5], held[-1]) for held in ranks)]
    for (early_bytes, early_files), (late_bytes, late_files) in processes:
        assert late_bytes - early_bytes < 10 * MiB  # a buffer that leaks at each update would be 20 at the least
        assert late_files <= early_files + 1
    assert shared_memory() <= before


def as_bfloat16(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


def traced(rank: int, sockets: Path, ledger: Path, have: Holding, options: UpdateOptions) -> Any:
    with Updater(sockets, ledger=ledger, options=options) as updater:
        updater.update(source_of(have, rank, 1), 1)
        done = updater.update(source_of(have, rank, 2), 2)
        trace = updater.trace(done)
        return trace, done.seconds


@pytest.mark.parametrize("num_h2d", [0, 1, 2])
def test_the_trace_is_of_the_planned_program(num_h2d: int) -> None:
    tensors = model(2, 256)
    have, want = trained(tensors, 2), served(tensors)
    share = {0: 2, 1: 3, 2: 6}[num_h2d]  # of the memory: as many buffers as fit
    options = UpdateOptions(
        Memory(share * MiB // 4 * 10 // 9 + 64, target_bytes=MiB // 4, least_bytes=MiB // 4), deadline_s=PATIENT_S
    )
    with Workers(want) as workers:
        (trace, seconds), *others = check(run_ranks(4, traced, workers.sockets, workers.ledger, have, options))
    program = trace.program
    assert all(np.array_equal(other.end, trace.end) for other, _ in others)
    assert trace.measured
    assert (program.num_ranks, {program.op(i).kind.name for i in range(program.num_ops)}) == (
        4,
        {"H2D", "BROADCAST", "RELOAD"},
    )
    assert verify_update(program).clean
    assert (trace.end >= trace.start).all()
    assert trace.makespan <= seconds["total"] * 1e9
    copies = set(program.chunk[program.kind == OpKind.H2D].tolist())
    assert copies == {0: {NEVER}, 1: {0}, 2: {0, 1}}[num_h2d]
    for op in range(program.num_ops):
        waits = [dep for dep in program.deps(op) if dep >= 0]
        if op > program.lane_ptr[program.lane_of[op]]:
            waits.append(op - 1)
        late = max((int(trace.end[dep]) for dep in waits), default=0) - int(trace.start[op])
        assert late <= 0, f"{program.op(op)} on {program.op(op).lane} began {late} ns before what it waits for"


def test_pieces_of_a_state_dict() -> None:
    state = {"a": torch.zeros(4, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    source = Source.of(state)
    assert {piece.tensor: piece.box for piece in source.held} == {"a": Box((0, 0), (4, 3)), "b": Box((0,), (2,))}
    with pytest.raises(ValueError, match="is held as"):
        Source(source.tensors, {next(iter(source.held)): torch.zeros(3, 3)})
