"""A worker's side of updates: when it closes, where the old version waits, who gets a connection, what is refused."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import treadle.update.adapters.vllm.replica as replica_module
import treadle.update.worker.endpoint as endpoint_module
import treadle.wire.link as link_module
from tests.support.ranks import check, run_ranks
from tests.support.update.workers import Asker, Troubled, Workers
from treadle.host.sockets import close_server, connect, listen
from treadle.update import Endpoint, Plain, Source, UpdateError, UpdateOptions, Updater
from treadle.update.adapters.transformers import named_weights
from treadle.update.adapters.vllm.leftovers import Leftovers, named_memory
from treadle.update.adapters.vllm.line import Line, replica_path
from treadle.update.adapters.vllm.messages import Serve, Shut
from treadle.update.adapters.vllm.replica import Replica
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.memory.copying import copy_hashed, digest
from treadle.update.memory.host import HostBuffer
from treadle.update.protocol.messages import (
    Begin,
    Begun,
    Commit,
    Export,
    Finish,
    FromWorker,
    GetStatus,
    Load,
    Map,
    Refused,
    Settle,
    Status,
    TakePlan,
)
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.shares import Shares
from treadle.update.rank.worker_client import WorkerClient
from treadle.update.worker.arrivals import Arrival, Assembly
from treadle.update.worker.endpoint import MOST_ASKERS, MOST_STRANGERS, worker_path
from treadle.update.worker.rollback_store import RollbackStore, left_in_group
from treadle.update.worker.staging import assembled, shortfall
from treadle.update.worker.worker import Worker
from treadle.weights.buffers import Memory
from treadle.weights.pieces import Box, Holding, Piece, Tensor
from treadle.weights.plan import plan_update
from treadle.wire.errors import PeerGoneError
from treadle.wire.link import Link, accept

SMALL = Memory(1 << 20, least_bytes=4096)
OPTIONS = UpdateOptions(SMALL, deadline_s=10, drain_s=1)


def whole(shapes: dict[str, tuple[int, ...]], ranks: int, dtype: str = "float32") -> Holding:
    tensors = {name: Tensor(name, shape, dtype) for name, shape in shapes.items()}
    pieces = tuple(Piece(name, Box.whole(shape)) for name, shape in shapes.items())
    return Holding(tensors, (pieces,) * ranks)


def state(shapes: dict[str, tuple[int, ...]], version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in shapes.items()}


@pytest.fixture
def place() -> Iterator[Path]:
    """Short enough for a socket, and nobody else's."""
    with tempfile.TemporaryDirectory(prefix="treadle-u") as name:
        yield Path(name)


def run(workers: Workers, do: Callable[..., Any], *args: Any, options: UpdateOptions = OPTIONS) -> list[Any]:
    return check(run_ranks(2, _run, (workers.sockets, workers.ledger), do, options, args, timeout_s=60))


def _run(
    rank: int, places: tuple[Path, Path], do: Callable[..., Any], options: UpdateOptions, args: tuple[Any, ...]
) -> Any:
    with Updater(places[0], ledger=places[1], options=options) as updater:
        return do(updater, rank, *args)


# ---- an engine and its worker may disagree ---------------------------------------------------------------------------


class Noting(Plain):
    """Notes how it was closed, and whether requests were served while the way back was kept."""

    late = False

    def __init__(self) -> None:
        super().__init__({"w": torch.zeros(4)})
        self.closes: list[tuple[str, float]] = []
        self.given: list[bool] = []

    def close(self, how: str, deadline_s: float) -> str | None:
        self.closes.append((how, deadline_s))
        return super().close(how, deadline_s)

    def export(self, piece: Piece, out: Any) -> str | None:
        self.given.append(self.gate.version is not None)
        return super().export(piece, out)

    def open(self, version: int) -> str | None:
        super().open(version)
        return "not started within 40 s" if self.late else None


def plan_of(adapter: Plain, ranks: int = 1) -> TakePlan:
    wants = adapter.layout()
    have = Holding({tensor.name: tensor for tensor in wants.tensors}, (wants.pieces,) * ranks)
    return Shares(plan_update(have, have, SMALL)).of_worker(0, exports=False)


def begin(epoch: int, version: int, plan: TakePlan) -> Begin:
    return Begin(epoch, version, plan.digest, "host", "drain", 1.0, checked=False, partial=False)


def test_an_engine_that_is_open_is_closed_by_what_comes_first() -> None:
    """A new endpoint around an engine that serves: its worker knows nothing of that."""
    for closing in ("settle", "begin"):
        engine = Noting()
        engine.gate.open(1)
        worker, plan = Worker(engine, 0), plan_of(engine)
        assert worker.state == "closed"
        worker.handle(plan)
        first = Settle(5, None, ()) if closing == "settle" else begin(5, 2, plan)
        answer = worker.handle(first)
        assert isinstance(answer, Status | Begun), answer
        assert engine.gate.version is None, closing


def served(engine: Noting) -> tuple[Worker, TakePlan]:
    """A worker that serves version 1 by attempt 1."""
    worker, plan = Worker(engine, 0), plan_of(engine)
    worker.handle(plan)
    buffer = HostBuffer.make(1 << 16)
    assert buffer.fd is not None
    worker.map(Map((buffer.size_bytes,)), [os.dup(buffer.fd)])
    for message in (begin(1, 1, plan), Load(1, 0, 0), Finish(1), Commit(1, 1)):
        worker.handle(message)
    return worker, plan


def test_an_engine_that_opens_after_it_said_it_could_not_is_closed_before_it_is_loaded() -> None:
    engine = Noting()
    engine.late = True
    worker, plan = served(engine)
    assert (worker.state, engine.gate.version) == ("closed", 1)
    assert isinstance(worker.handle(begin(2, 2, plan)), Begun)
    assert engine.gate.version is None


def test_the_way_back_is_kept_while_requests_are_served() -> None:
    engine = Noting()
    worker, plan = served(engine)
    assert (worker.state, engine.gate.version) == ("serving", 1)
    assert isinstance(worker.handle(begin(2, 2, plan)), Begun)
    assert engine.given == [True]
    assert engine.gate.version is None


def test_settling_closes_as_it_is_told() -> None:
    engine = Noting()
    worker, _ = served(engine)
    engine.closes.clear()
    told = worker.handle(Settle(3, 7, (2,), "abort", 12.5))
    assert isinstance(told, Status)
    assert (told.state, engine.closes) == ("closed", [("abort", 12.5)])


# ---- a replica whose engine is slow ----------------------------------------------------------------------------------


class Slow:
    """An engine of vLLM's kind whose start takes a while; notes what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.starting, self.may_start = threading.Event(), threading.Event()
        self.may_start.set()
        self.break_s = 0.0

    @property
    def scheduling(self) -> bool:
        return "resume" in self.said and self.said[::-1].index("resume") < self.said[::-1].index("pause")

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return [None, None]

    def break_off(self) -> None:
        time.sleep(self.break_s)
        self.said.append("break off")

    def pause(self) -> None:
        self.said.append("pause")

    def forget(self) -> None:
        pass

    def resume(self, version: int) -> None:
        self.starting.set()
        self.may_start.wait()
        self.said.append("resume")

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return []

    def shutdown(self) -> None:
        pass


@pytest.fixture
def slow(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Slow, Replica, list[Line]]]:
    """A replica of two workers."""
    monkeypatch.setattr(replica_module, "ENGINE_S", 0.3)
    engine = Slow()
    with Replica(engine, place) as replica:
        lines = [Line(replica_path(place, 0), worker) for worker in (0, 1)]
        yield engine, replica, lines
    for line in lines:
        line.close()


def serve_all(lines: list[Line], version: int) -> list[str | None]:
    return [line.ask(Serve(version), 10) for line in lines]


def eventually(so: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not so() and time.monotonic() < until:
        time.sleep(0.005)
    return so()


def test_a_start_that_took_too_long_opens_nothing(slow: tuple[Slow, Replica, list[Line]]) -> None:
    engine, replica, lines = slow
    engine.may_start.clear()
    told = serve_all(lines, 1)
    assert told[0] is None
    assert told[1] is not None
    assert "did not start again within" in told[1]
    early = lines[1].ask(Shut("drain", 1.0), 10)
    assert early is not None
    assert "has not ended an earlier start" in early
    engine.may_start.set()
    assert eventually(lambda: engine.said[-2:] == ["resume", "pause"]), engine.said
    assert replica.version is None
    assert lines[1].ask(Shut("drain", 1.0), 10) is None
    assert not engine.scheduling
    assert lines[1].ask(Serve(1), 10) is None
    assert replica.version == 1
    assert engine.scheduling


def test_a_worker_that_shuts_meanwhile_keeps_the_gate_closed(
    slow: tuple[Slow, Replica, list[Line]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, replica, lines = slow
    engine.may_start.clear()
    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(replica_module, "ENGINE_S", 10.0)
        serving = pool.submit(serve_all, lines, 1)
        assert engine.starting.wait(10)
        shut = pool.submit(lines[0].ask, Shut("drain", 1.0), 10)
        assert eventually(lambda: replica._starting is None)
        engine.may_start.set()
        assert shut.result(10) is None
        assert not engine.scheduling, "it is loaded from here on"
        told = serving.result(10)[1]
    assert replica.version is None
    assert told is not None
    assert "too late" in told


def test_breaking_off_does_not_outlive_a_close_that_failed(
    slow: tuple[Slow, Replica, list[Line]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, replica, lines = slow
    serve_all(lines, 1)
    engine.break_s = 0.4
    with monkeypatch.context() as patch:
        patch.setattr(replica_module, "ENGINE_S", 10.0)
        with replica.serving():
            told = lines[0].ask(Shut("abort", 0.2), 10)
            assert told is not None
            assert "still run" in told
            assert engine.said[-2:] == ["break off", "resume"], "what was broken off started again, in this order"
            assert lines[0].ask(Shut("abort", 0.0), 10) is not None  # too short to be seen
        said = len(engine.said)
        assert lines[0].ask(Shut("drain", 1.0), 10) is None
        time.sleep(0.5)
    assert engine.said[said:] == ["pause"], "requests of a later close were broken off"


# ---- what was said to have changed -----------------------------------------------------------------------------------


def test_a_change_that_no_worker_wants_is_refused() -> None:
    tied = whole({"embed": (8, 4), "lm_head": (8, 4)}, 2)
    want = whole({"embed": (8, 4)}, 2)
    with pytest.raises(ValueError, match="'lm_head', which no worker wants; name the tensor it is tied to, or leave"):
        plan_update(tied, want, SMALL, only={"lm_head"})
    with pytest.raises(ValueError, match="'lm_head', which no worker wants"):
        plan_update(tied, want, SMALL, only={"embed", "lm_head"})
    assert plan_update(tied, want, SMALL).buckets
    assert plan_update(tied, want, SMALL, only={"embed"}).buckets


CHANGED: dict[str, tuple[int, ...]] = {"embed": (64, 32), "steps": ()}


def first(updater: Updater, rank: int) -> int:
    return updater.update(Source.of(state(CHANGED, 1)), 1).version


def nothing_then_tied(updater: Updater, rank: int) -> tuple[int, str]:
    source = Source.of(state(CHANGED, 2) | {"lm_head": torch.ones(64, 32)})
    done = updater.update(source, 2, changed=[], base=1)  # the first of this updater: it has no buffers yet
    with pytest.raises(UpdateError) as caught:
        updater.update(source, 3, changed=["lm_head"], base=2)
    return done.size_bytes, str(caught.value)


def values(adapter: Troubled) -> dict[str, list[float]]:
    return {name: sorted(set(held.flatten().tolist())) for name, held in adapter.held.items()}


def ipc_maps(adapter: Troubled) -> int:
    return Path("/proc/self/maps").read_text().count("treadle-ipc")


def test_nothing_changed_and_nothing_wanted() -> None:
    with Workers(whole(CHANGED, 2)) as workers:
        assert run(workers, first) == [1, 1]
        assert eventually(lambda: not workers.tell(0, ipc_maps)), "buffers of update ranks that are gone"
        for moved, told in run(workers, nothing_then_tied):
            assert moved == 0
            assert "no worker wants" in told
        assert workers.tell(0, values) == {"embed": [1.0], "steps": [1.0]}
        asker = Asker(workers.sockets, 0)
        assert asker.status().version == 2
        asker.close()


def recover_twice(updater: Updater, rank: int, flags: Path) -> list[int]:
    """From a source, and later the same bytes from peers."""
    known = {name: Tensor(name, shape, "float32") for name, shape in CHANGED.items()}
    source = Source.of(state(CHANGED, 1)) if rank == 0 else Source(known, {})
    versions = [updater.update(source, 1).version]
    for turn in (0, 1):
        (flags / f"done {turn} {rank}").touch()
        while not (flags / f"restarted {turn}").exists():
            time.sleep(0.02)
        done = updater.recover(source, 1) if turn == 0 else updater.recover()
        versions.append(done.version)
    return versions


def restart(workers: Workers) -> None:
    for turn in (0, 1):
        while not all((workers.directory / f"done {turn} {rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        workers.restart(1)
        (workers.directory / f"restarted {turn}").touch()


def test_a_number_moves_too_and_one_plan_is_from_a_source_or_from_peers() -> None:
    """The plans are the same but for who fills buckets: there is no room for an H2D buffer in either."""
    lone = UpdateOptions(Memory(free_bytes=8192, least_bytes=4096), deadline_s=10, drain_s=1)
    with Workers(whole(CHANGED, 2)) as workers:
        thread = threading.Thread(target=restart, args=(workers,), daemon=True)
        thread.start()
        assert run(workers, recover_twice, workers.directory, options=lone) == [[1, 1, 1]] * 2
        assert workers.tell(1, values) == {"embed": [1.0], "steps": [1.0]}


def test_a_plan_to_give_from_has_a_name_of_its_own() -> None:
    shares = Shares(plan_update(whole(CHANGED, 2), whole(CHANGED, 2), SMALL))
    takes, exports = (shares.of_worker(0, exports=which) for which in (False, True))
    assert takes.digest == shares.digest != exports.digest == shares.name(exports=True)
    engine = Noting()
    worker, _ = served(engine)
    told = worker.handle(Export(1, "unknown", 0, 0, checked=True))
    assert told == Refused("order", "worker 0 does not have plan unknown")


@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3)])
def test_copies_of_any_shape(shape: tuple[int, ...]) -> None:
    source, target = np.full(shape, 7, np.uint32), np.zeros(shape, np.uint32)
    assert copy_hashed(target, source) == digest(source)
    assert np.array_equal(source, target)


# ---- where the old version waits -------------------------------------------------------------------------------------

BOXES = [("w", Box((0,), (1 << 16,)), "float32")]


def test_a_disk_that_is_full_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length)
        blocks.append(os.fstat(fd).st_blocks)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    store = RollbackStore(tmp_path)
    assert store.reserve(BOXES) is None
    assert blocks[0] * 512 >= 1 << 18  # no holes
    store.array("w", BOXES[0][1])[:] = 1

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    told = RollbackStore(tmp_path).reserve(BOXES)
    assert told is not None
    assert f"{1 << 18} bytes of disk in {tmp_path}" in told
    assert "No space left" in told
    assert "rollback='host'" in told

    engine = Noting()
    worker, plan = served(engine)
    worker._rollback.spill = tmp_path
    on_disk = Begin(2, 2, plan.digest, "disk", "drain", 1.0, checked=False, partial=False)
    refused = worker.handle(on_disk)
    assert isinstance(refused, Refused)
    assert refused.code == "memory"
    assert (worker.state, engine.gate.version) == ("serving", 1)


def test_files_that_were_read_do_not_count_as_used(tmp_path: Path) -> None:
    assert left_in_group(tmp_path) is None
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 600\nactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert left_in_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert left_in_group(tmp_path) == 700
    (tmp_path / "memory.current").write_text("2000\n")
    assert left_in_group(tmp_path) == 0


def test_a_buffer_of_nothing_and_one_that_is_closed_twice() -> None:
    buffer = HostBuffer.make(0)
    assert buffer.fd is not None
    mapped = HostBuffer.map(os.dup(buffer.fd), buffer.size_bytes)
    for one in (buffer, mapped):
        one.close()
        one.close()


# ---- connections -----------------------------------------------------------------------------------------------------


def out_of_descriptors(real: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    def accepting(*args: Any) -> Any:
        link = real(*args)
        if times:
            times.pop()
            if link is not None:
                link.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return link

    return accepting


def test_an_endpoint_that_was_out_of_descriptors_takes_connections_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "accept", out_of_descriptors(accept, [1, 2]))
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0) as endpoint:
        for _ in range(2):
            with suppress(PeerGoneError):
                Asker(place, 0)
        asker = Asker(place, 0)
        assert asker.status().state == "closed"
        asker.close()
    assert not endpoint._thread.is_alive()


def test_a_replica_that_was_out_of_descriptors_takes_lines_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "accept", out_of_descriptors(accept, [1]))
    monkeypatch.setattr(replica_module, "ENGINE_S", 0.1)
    with Replica(Slow(), place):
        with pytest.raises(ConnectionRefusedError):
            Line(replica_path(place, 0), 0)
        Line(replica_path(place, 0), 0).close()


def test_those_who_ask_leave_a_place_for_update_ranks(place: Path) -> None:
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0) as endpoint:
        askers = [Asker(place, 0) for _ in range(MOST_ASKERS)]
        with pytest.raises(AssertionError):  # it is told, rather than welcomed
            Asker(place, 0)
        post = Inbox()
        post.start()
        for rank in range(3):  # one after the other; each takes over
            beside = WorkerClient(place, 0, post, lambda text: None)
            beside.connect(rank, 3.0)
            assert isinstance(beside.ask(GetStatus(), Status, 3.0), Status)
            beside.drop()
        askers.pop().close()
        assert eventually(lambda: len(endpoint._askers) < MOST_ASKERS)
        askers.append(Asker(place, 0))
        strangers = [connect(worker_path(place, 0)) for _ in range(MOST_STRANGERS + 1)]
        strangers[-1].settimeout(3.0)
        told = b"".join(iter(lambda: strangers[-1].recv(1000), b""))  # one beyond these is turned away at once
        assert b"32 others have not said yet who they are" in told
        with ThreadPoolExecutor() as pool:
            coming = pool.submit(beside.connect, 3, 20.0)  # an update rank that is turned away comes again
            time.sleep(0.3)
            assert not coming.done()
            strangers.pop(0).close()
            coming.result()
        for asker in askers:
            assert asker.status().state == "closed"
            asker.close()
        for stranger in strangers:
            stranger.close()


def test_buffers_go_with_the_update_rank_unless_another_took_over() -> None:
    worker, _ = served(Noting())
    assert len(worker._buffers) == 1
    worker.release(lambda: True)
    assert len(worker._buffers) == 1
    worker.release()
    assert worker._buffers == []


# ---- the ledger ------------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from treadle.update.coordinator.commit_log import Ledger
Ledger(Path(sys.argv[1]))
"""


def test_one_coordinator_holds_the_ledger_in_one_process_too(tmp_path: Path) -> None:
    held = CommitLog(tmp_path / "l")
    (tmp_path / "a").symlink_to(tmp_path)
    for path in (tmp_path / "l", tmp_path / "a" / "l"):
        with pytest.raises(BlockingIOError, match="another coordinator holds"):
            CommitLog(path)
    other = subprocess.run([sys.executable, "-c", HOLD, tmp_path / "l"], capture_output=True, text=True, check=False)
    assert "another coordinator holds" in other.stderr, "a second try released it"
    held.close()
    held.close()
    again = CommitLog(tmp_path / "l")
    held.close()
    with pytest.raises(BlockingIOError):
        CommitLog(tmp_path / "l")
    again.close()


def test_a_new_ledger_has_its_directories_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    ledger = CommitLog(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}
    ledger.close()
    synced.clear()
    CommitLog(tmp_path / "a" / "b").close()
    assert synced == []


# ---- what is refused, and what is not --------------------------------------------------------------------------------


def test_what_is_held_is_what_is_named() -> None:
    with pytest.raises(ValueError, match="w is held as float16, it is named as bfloat16"):
        Plain({"w": torch.zeros(4, dtype=torch.float16)}, tensors={"w": Tensor("w", (4,), "bfloat16")})


def test_a_source_of_pieces_says_what_does_not_fit() -> None:
    tensors = {name: Tensor(name, (8, 4), "float32") for name in ("w", "v")}
    halves = Piece("w", Box((0, 0), (4, 4))), Piece("w", Box((4, 0), (8, 4)))
    holding = Holding(tensors, ((halves[0],), (halves[1],), halves, ()))
    source = Source.of({"w": torch.zeros(4, 4)}, holding, 1)
    assert list(source.held) == [halves[1]]
    with pytest.raises(ValueError, match=r"gives rank 2 \[0:4, 0:4\] and \[4:8, 0:4\] of w, and the state has one"):
        Source.of({"w": torch.zeros(4, 4)}, holding, 2)
    with pytest.raises(ValueError, match="the state has u, the holding does not know it"):
        Source.of({"w": torch.zeros(4, 4), "u": torch.zeros(3)}, holding, 0)
    with pytest.raises(ValueError, match="the state has w, the holding gives rank 3 nothing of it"):
        Source.of({"w": torch.zeros(4, 4)}, holding, 3)
    assert not Source.of({"w": torch.zeros(0, 4)}, holding, 3).held


def test_what_is_wanted_twice_comes_once() -> None:
    tensor = Tensor("w", (6,), "float32")
    pieces = Piece("w", Box((0,), (4,))), Piece("w", Box((2,), (6,))), Piece("w", Box((0,), (4,)))
    have = Holding({"w": tensor}, ((Piece("w", Box.whole((6,))),),))
    plan = Shares(plan_update(have, Holding({"w": tensor}, (pieces,)), SMALL)).of_worker(0, exports=False)
    assert shortfall(plan, pieces) == []
    assert shortfall(plan, [*pieces, Piece("v", Box((0,), (1,)))]) == ["v"]
    numbers = np.arange(6, dtype=np.uint32)
    parts = [
        Arrival("w", take.box, "float32", numbers[take.box.slices(Box((0,), (6,)))])
        for share in plan.shares
        for take in share.takes
    ]
    made = assembled(Assembly(), parts, pieces)
    assert {str(arrival.box): arrival.staged.tolist() for arrival in made} == {
        "[0:4]": [0, 1, 2, 3],
        "[2:6]": [2, 3, 4, 5],
    }
    assert len(made) == 2
    with pytest.raises(ValueError, match=r"w \[4:6\] was never wanted"):
        assembled(Assembly(), parts, pieces[:1])


class Tied(nn.Module):
    """Two of three weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.narrow = nn.Linear(8, 1)
        self.head.weight = self.embed.weight


def sharded_names(rank: int) -> tuple[list[str], list[str]]:
    net = Tied()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    with torch.device("meta"):
        meta = Tied()
    return sorted(named_weights(net)), sorted(named_weights(meta))


def test_only_tied_weights_are_one_however_they_are_held() -> None:
    names = ["embed.weight", "middle.weight", "narrow.bias", "narrow.weight"]
    assert sorted(named_weights(Tied())) == names
    for sharded, meta in check(run_ranks(2, sharded_names)):
        assert sharded == names  # of the second rank, those of the narrow one are empty
        assert meta == names


def test_a_torn_note_of_leftovers_is_no_reason_not_to_start(tmp_path: Path) -> None:
    path = tmp_path / "replica-0.left"
    for torn in (b"", b'{"pids": [12', b'{"pids": "x", "names": []}', b"\xff\xfe"):
        path.write_bytes(torn)
        Leftovers(path)
        assert not path.exists()
    leftovers = Leftovers(path)
    leftovers.add(os.getpid(), 1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert Leftovers(path)._note.pids == [1]


def test_what_a_user_keeps_in_shared_memory_is_no_leftover() -> None:
    """Checkpoints are kept there, and mapped by the engines that load them."""
    made = SharedMemory(create=True, size=100)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="treadle-model", suffix=".safetensors") as checkpoint:
        checkpoint.write(bytes(100))
        checkpoint.flush()
        with mmap.mmap(checkpoint.fileno(), 100):
            assert checkpoint.name in Path("/proc/self/maps").read_text()
            named = named_memory(os.getpid())
    made.close()
    made.unlink()
    assert f"/dev/shm/{made.name}" in named
    assert checkpoint.name not in named


def test_workers_that_join_at_once_are_all_noted(tmp_path: Path) -> None:
    leftovers = Leftovers(tmp_path / "replica-0.left")
    together = threading.Barrier(8)

    def join(first: int) -> None:
        together.wait()
        for pid in range(first, first + 100):
            leftovers.add(pid, 1 << 22)

    with ThreadPoolExecutor(8) as pool:
        for joined in [pool.submit(join, (1 << 22) + 1000 * i) for i in range(1, 9)]:
            joined.result()
    assert len(leftovers._note.pids) == 801
    assert [entry.name for entry in tmp_path.iterdir()] == ["replica-0.left"]


def test_an_update_rank_comes_again_where_a_worker_ended_before_its_welcome(place: Path) -> None:
    """As where it is started again: the connection was made to the process before."""
    path = worker_path(place, 0)
    dying = listen(path)
    post = Inbox()
    post.start()
    beside = WorkerClient(place, 0, post, lambda text: None)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(beside.connect, 0, 20.0)
        dying.accept()[0].close()
        close_server(dying, path)
        with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
            coming.result()
            assert beside.ask(GetStatus(), Status, 3.0).state == "closed"
            beside.drop()


def test_a_connection_that_says_nothing_is_told_so_when_it_ends(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HELLO_S", 0.2)
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        link: Link[FromWorker] = Link(connect(worker_path(place, 0)), FromWorker)
        told = link.receive(5.0)
        assert isinstance(told, Refused)
        assert (told.code, told.text) == ("late", f"process {os.getpid()} did not send a message in time")
        link.close()


def test_a_rank_whose_worker_was_taken_over_hears_by_whom(place: Path) -> None:
    """As the reason for which its connection ended, wherever it waits; not as an answer to what it asked."""
    told: SimpleQueue[str] = SimpleQueue()
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        first, second = (WorkerClient(place, 0, Inbox(), told.put) for _ in range(2))
        first.connect(0, 5.0)
        second.connect(1, 5.0)
        who = f"update rank 1 of process {os.getpid()} has taken worker 0 over"
        with pytest.raises(PeerGoneError, match=who):
            first.expect(Status, 5.0)
        assert told.get(timeout=5.0) == who
        assert second.ask(GetStatus(), Status, 5.0).state == "closed"
        second.drop()
