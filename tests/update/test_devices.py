"""Updates of engines on a device whose bytes the host cannot touch and whose copies end after their calls."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.patience import PATIENT_S
from tests.support.ranks import check, run_ranks
from tests.support.update import far
from tests.support.update.models import SMALL, expected, model, source_of
from tests.support.update.workers import Asker, Spawned
from treadle.update import Endpoint, Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.update.adapters.plain import digest_of
from treadle.update.adapters.transformers import Transformers, named_weights
from treadle.update.protocol.update_messages import Answer, Move
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Holding

OPTIONS = UpdateOptions(SMALL, deadline_s=PATIENT_S, drain_s=1)


def layouts() -> tuple[Holding, Holding]:
    """Two ranks that have everything, into TP2 along columns, whose slices are strided, and rows."""
    tensors = model(2, 128)
    dim = lambda name: None if "norm" in name else int("down" in name)  # noqa: E731
    return Parallel(replicas=2).holding(tensors), Parallel(tp=2, dim=dim).holding(tensors)


class Whole(Plain):
    """An engine like vLLM's: it takes whole pieces and gives none, so each version is kept as it arrives."""

    can_export = False
    whole = True


def serve(sockets: Path, worker: int, want: Holding, kind: type[Plain] = Plain) -> Endpoint:
    """A plain engine on the device. What it answers is read from memory as it is, without waiting for the device."""
    far.enter()
    memory = {p.tensor: torch.zeros(p.box.shape, dtype=torch.bfloat16) for p in want.pieces[worker]}
    boxes = {piece.tensor: piece.box for piece in want.pieces[worker]}
    engine = kind({name: far.far(held) for name, held in memory.items()}, want.tensors, boxes)

    def answer(body: bytes) -> tuple[int, bytes]:
        with engine.serving() as version:
            return version, digest_of(memory).encode()

    return Endpoint(engine, sockets, worker, answer=answer, spill=sockets)


def weights(have: Holding, rank: int, version: int, *, on_device: bool) -> Source:
    """Weights on the host, or on the device, where the current stream has yet to write them."""
    made = source_of(have, rank, version)
    if not on_device:
        return made
    written = {piece: far.far(torch.zeros_like(held)).copy_(far.far(held)) for piece, held in made.held.items()}
    return Source(made.tensors, written)


def served(sockets: Path, worker: int) -> tuple[int, str]:
    asker = Asker(sockets, worker)
    answer = asker.ask()
    asker.close()
    assert isinstance(answer, Answer), answer
    return answer.version, answer.body.decode()


Places = tuple[Path, Path, Holding, Holding]


def updates(
    rank: int, places: Places, where: torch.device | None, options: UpdateOptions, do: Callable[..., Any]
) -> Any:
    far.enter()
    with Updater(places[0], ledger=places[1], options=options, device=where) as updater:
        return do(updater, rank, places)


def run(
    workers: Spawned, do: Callable[..., Any], where: torch.device | None = far.FAR, options: UpdateOptions = OPTIONS
) -> list[Any]:
    """`do` on both ranks, with buffers on a device."""
    places = (workers.sockets, workers.ledger, *layouts())
    return check(run_ranks(2, updates, places, where, options, do))


# ---- what ranks do ---------------------------------------------------------------------------------------------------


def from_both(updater: Updater, rank: int, places: Places) -> list[bool]:
    """Versions from weights on the device and on the host, checked and not; then whether every byte was right."""
    sockets, _, have, want = places
    right = []
    for version, (on_device, checked) in enumerate([(True, True), (True, False), (False, True), (False, False)], 1):
        updater.options = replace(updater.options, checked=checked, compare_sources="all" if checked else "sample")
        updater.update(weights(have, rank, version, on_device=on_device), version)
        right.append(served(sockets, rank) == (version, expected(want, rank, version)))
        dist.barrier()
    return right


@pytest.mark.parametrize("buffers", [far.FAR, torch.device("cpu")], ids=["on the device", "on the host"])
def test_every_byte_arrives_in_an_engine_on_a_device(buffers: torch.device) -> None:
    with Spawned(2, serve, layouts()[1]) as workers:
        assert run(workers, from_both, buffers) == [[True] * 4] * 2


def first(updater: Updater, rank: int, places: Places) -> None:
    updater.update(weights(places[2], rank, 1, on_device=True), 1)


def recovered(updater: Updater, rank: int, places: Places) -> tuple[int, bool]:
    done = updater.recover()
    return done.size_bytes, served(places[0], rank) == (1, expected(places[3], rank, 1))


@pytest.mark.slow
def test_peers_give_what_their_devices_hold() -> None:
    """Worker 1 of each of two replicas: the ranks' weights are gone, and a worker exports into a device's buffer."""
    have = layouts()[0]
    with Spawned(2, serve, have) as workers:
        places = (workers.sockets, workers.ledger, have, have)
        check(run_ranks(2, updates, places, far.FAR, OPTIONS, first))
        for checked in (True, False):
            workers.restart(1)
            options = replace(OPTIONS, checked=checked)
            for size_bytes, right in check(run_ranks(2, updates, places, far.FAR, options, recovered)):
                assert size_bytes > 0
                assert right, f"checked={checked}"


def rolled_back(updater: Updater, rank: int, places: Places) -> list[Any]:
    """A byte of version 2 changes in a buffer; ranks differ in version 3; version 4 is right."""
    sockets, _, have, want = places
    first(updater, rank, places)
    told: list[Any] = []
    for version, spoil in ((2, _flip), (3, _differ)):
        source = weights(have, rank, version, on_device=True)
        spoil(updater, rank, source)
        try:
            updater.update(source, version)
        except UpdateError as error:
            told.append((str(error), served(sockets, rank) == (1, expected(want, rank, 1))))
        dist.barrier()
    updater.update(weights(have, rank, 4, on_device=True), 4)
    return [*told, served(sockets, rank) == (4, expected(want, rank, 4))]


def _flip(updater: Updater, rank: int, source: Source) -> None:
    """Change a byte under the last load of worker 1, after the broadcast."""
    client, send = updater.context.worker, updater.context.worker.send

    def sending(message: Any, fds: Any = ()) -> None:
        if isinstance(message, Move) and rank == 1:
            buffer: Any = updater.context.buffers.all[message.buffer]
            buffer.tensor.memory[: updater.context.options.memory.target_bytes] ^= 1  # type: ignore[union-attr]
            client.send = send  # type: ignore[method-assign]
        send(message, fds)

    client.send = sending  # type: ignore[method-assign]


def _differ(updater: Updater, rank: int, source: Source) -> None:
    if rank == 1:
        for held in source.held.values():
            held += 1


@pytest.mark.slow
@pytest.mark.parametrize(("rollback", "kind"), [("host", Plain), ("disk", Plain), ("host", Whole)])
def test_a_device_goes_back_to_the_old_version(rollback: Any, kind: type[Plain]) -> None:
    with Spawned(2, serve, layouts()[1], kind) as workers:
        for (corrupt, back), (mixed, back_again), right in run(
            workers, rolled_back, options=replace(OPTIONS, rollback=rollback)
        ):
            assert "differ from their source's" in corrupt
            assert "they hold different weights, all as version 3" in mixed
            assert back
            assert back_again
            assert right


class Tied(nn.Module):
    """What the adapter of transformers asks of a model: weights, one of them tied, and `tie_weights`."""

    def __init__(self, version: int) -> None:
        super().__init__()
        torch.manual_seed(version)
        self.embed, self.inside, self.head = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


def serve_model(sockets: Path, worker: int) -> Endpoint:
    far.enter()
    model, held = Tied(0), {}
    for name in ("embed", "inside"):
        held[name] = getattr(model, name).weight.data
        getattr(model, name).weight = nn.Parameter(far.far(held[name]), requires_grad=False)
    engine = Transformers(model)

    def answer(body: bytes) -> tuple[int, bytes]:
        with engine.serving() as version:
            return version, digest_of(held).encode()

    return Endpoint(engine, sockets, worker, answer=answer)


def of_model(updater: Updater, rank: int, places: Places) -> list[bool]:
    """Three versions, the second unchecked: the third reads the rollback copy of a version that came by copies."""
    right = []
    for version in (1, 2, 3):
        updater.options = replace(updater.options, checked=version != 2)
        weights = {name: held.detach() for name, held in named_weights(Tied(version)).items()}
        updater.update(Source.of({name: far.far(held) for name, held in weights.items()}), version)
        want = digest_of({name.removesuffix(".weight"): held for name, held in weights.items()})
        right.append(served(places[0], rank) == (version, want))
        dist.barrier()
    return right


@pytest.mark.slow
def test_a_model_of_transformers_is_updated_on_its_device() -> None:
    with Spawned(2, serve_model) as workers:
        assert run(workers, of_model) == [[True] * 3] * 2


def measured(updater: Updater, rank: int, places: Places) -> tuple[list[str], int, bool]:
    """What a rank asked of its device in its first update, its buffers' bytes, and whether its worker is right."""
    sizes_bytes: list[int] = []
    updater.context.progress = lambda done, total: sizes_bytes.append(
        sum(buffer.size_bytes for buffer in updater.context.buffers.all)
    )
    updater.update(weights(places[2], rank, 1, on_device=True), 1)
    first_asked = [event for event, _ in itertools.groupby(far.events)]
    return first_asked, max(sizes_bytes), served(places[0], rank) == (1, expected(places[3], rank, 1))


def freed(updater: Updater, rank: int, places: Places) -> list[bool]:
    """Whether the worker maps buffers while it loads, and any process of rank and worker has some after each update."""
    seen: list[bool] = []
    asker = Asker(places[0], rank)
    pids = os.getpid(), asker.status().pid
    asker.close()
    updater.context.progress = lambda done, total: seen.append(all(map(_has_buffers, pids)))
    for version in (1, 2):
        updater.update(weights(places[2], rank, version, on_device=True), version)
        assert any(seen)
        seen.clear()
    source = weights(places[2], rank, 3, on_device=True)
    _differ(updater, rank, source)
    with pytest.raises(UpdateError, match="they hold different weights"):
        updater.update(source, 3)
    assert far.streams_made["h2d"] == 1, "the allocator keeps blocks for each"
    return [_has_buffers(pid) for pid in pids]


def _has_buffers(pid: int) -> bool:
    return "memfd:treadle-ipc" in Path(f"/proc/{pid}/maps").read_text()


def test_buffers_of_a_device_are_freed_after_each_update() -> None:
    with Spawned(2, serve, layouts()[1]) as workers:
        options = replace(OPTIONS, rollback="host", compare_sources="all")
        assert run(workers, freed, options=options) == [[False, False]] * 2


@pytest.mark.slow
def test_memory_is_measured_when_the_group_has_its_own() -> None:
    with Spawned(2, serve, layouts()[1]) as workers:
        for asked, size_bytes, right in run(workers, measured, options=replace(OPTIONS, memory=None)):
            assert asked == ["measured", "group", "measured", "buffer"]  # first: whether it can be
            assert size_bytes <= far.FREE_BYTES
            assert right


def chosen(updater: Updater, rank: int, places: Places) -> tuple[str, bool]:
    """The device of the buffers that nobody has given, with a source on the host."""
    updater.update(weights(places[2], rank, 1, on_device=False), 1)
    return updater.context.device.type, served(places[0], rank) == (1, expected(places[3], rank, 1))


def test_buffers_are_on_the_device_of_the_worker_where_none_is_given() -> None:
    with Spawned(2, serve, layouts()[1]) as workers:
        assert run(workers, chosen, None) == [(far.TYPE, True)] * 2


def serve_on_host(sockets: Path, worker: int, want: Holding) -> Endpoint:
    boxes = {piece.tensor: piece.box for piece in want.pieces[worker]}
    held = {name: torch.zeros(box.shape, dtype=torch.bfloat16) for name, box in boxes.items()}
    return Endpoint(Plain(held, want.tensors, boxes), sockets, worker)


def apart(rank: int, places: Places) -> str:
    """Rank 0 sends from the device, rank 1 speaks for a worker on the host."""
    far.enter()
    with Updater(places[0], ledger=places[1], options=OPTIONS, worker=0 if rank else None) as updater:
        with pytest.raises(UpdateError) as refused:
            updater.update(weights(places[2], 0, 1, on_device=True) if rank == 0 else None, 1)
        updater.context.given = torch.device("cpu")
        updater.update(weights(places[2], 0, 1, on_device=True) if rank == 0 else None, 1)
    return str(refused.value)


def test_ranks_on_two_kinds_of_devices_name_both_and_can_go_by_the_host() -> None:
    have = layouts()[0]
    with Spawned(1, serve_on_host, have) as workers:
        for told in check(run_ranks(2, apart, (workers.sockets, workers.ledger, have, have))):
            assert f"rank 0 sends from {far.TYPE} (far), rank 1 serves on cpu (gloo)" in told


class Packing(Plain):
    """An engine like vLLM's, which makes what it serves of what was loaded when a load is over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.packed = {name: far.far(torch.zeros(held.shape, dtype=held.dtype)) for name, held in self.held.items()}

    def finish(self) -> str | None:
        for name, held in self.held.items():
            self.packed[name].copy_(held)
        return None


def serve_packed(sockets: Path, worker: int, want: Holding) -> Endpoint:
    """What it answers is what was packed, read from memory as it is, without waiting for the device."""
    far.enter()
    held = {p.tensor: far.far(torch.zeros(p.box.shape, dtype=torch.bfloat16)) for p in want.pieces[worker]}
    engine = Packing(held, want.tensors, {piece.tensor: piece.box for piece in want.pieces[worker]})

    def answer(body: bytes) -> tuple[int, bytes]:
        with engine.serving() as version:
            return version, digest_of({name: packed.memory for name, packed in engine.packed.items()}).encode()

    return Endpoint(engine, sockets, worker, answer=answer)


def packed(updater: Updater, rank: int, places: Places) -> list[bool]:
    """Whether a version is packed when it is served, and the one before when the worker has gone back to it."""
    sockets, _, have, want = places
    first(updater, rank, places)
    right = [served(sockets, rank) == (1, expected(want, rank, 1))]
    source = weights(have, rank, 2, on_device=True)
    _differ(updater, rank, source)
    with pytest.raises(UpdateError, match="they hold different weights"):
        updater.update(source, 2)
    return [*right, served(sockets, rank) == (1, expected(want, rank, 1))]


def test_an_engine_is_waited_for_when_a_load_is_over() -> None:
    with Spawned(2, serve_packed, layouts()[1]) as workers:
        options = replace(OPTIONS, rollback="host", compare_sources="all")
        assert run(workers, packed, options=options) == [[True, True]] * 2


def timed(updater: Updater, rank: int, places: Places) -> tuple[int, int]:
    """Nanoseconds that were noted for filling buffers, and those that the device copied on the stream for that."""
    done = updater.update(weights(places[2], rank, 1, on_device=True), 1)
    assert done.times is not None
    assert done.shares is not None
    assert done.shares.plan.num_h2d
    return sum(end - start for start, end in done.times.h2d.values()), far.copied_ns["h2d"]


@pytest.mark.slow
def test_a_copy_is_timed_where_it_runs_on_a_stream_of_its_own() -> None:
    with Spawned(2, serve, layouts()[1]) as workers:
        for noted_ns, copied_ns in run(workers, timed, options=replace(OPTIONS, checked=False)):
            assert 0 < copied_ns <= noted_ns + 1000  # times are rounded; launching takes the host a fraction
