"""A vLLM replica without vLLM: its gate's table, an engine that is slow, lines of workers, leftover memory."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

import treadle.update.adapters.vllm.replica as replica_module
from tests.support.patience import PATIENT_S, SOON_S
from tests.support.update.engines import eventually, out_of_descriptors
from treadle.host.boot_clock import boot_ns
from treadle.host.sockets import connect
from treadle.update.adapters.vllm.engine_messages import LeaseEnd, Reply, Serve, Shut
from treadle.update.adapters.vllm.gate_phases import TRANSITIONS, GateEvent, GatePhase, after
from treadle.update.adapters.vllm.leftovers import Leftovers, named_memory
from treadle.update.adapters.vllm.line import Line, replica_path
from treadle.update.adapters.vllm.listening import Listening
from treadle.update.adapters.vllm.replica import Replica
from treadle.update.worker.gate import ClosedError, Gate
from treadle.wire.errors import PeerGoneError
from treadle.wire.link import Link
from treadle.wire.listeners import Listener


def test_the_table_of_the_gate_has_every_phase_and_no_dead_end() -> None:
    for phase in GatePhase:
        assert after(phase, GateEvent.SHUT) in (GatePhase.DRAINING, GatePhase.CLOSED), "nobody is let in"
        assert after(phase, GateEvent.READY) is GatePhase.STARTING
    seen, ahead = {GatePhase.OPEN}, [GatePhase.OPEN]
    while ahead:
        phase = ahead.pop()
        new = {to for (at, _), to in TRANSITIONS.items() if at is phase} - seen
        seen |= new
        ahead += new
    assert seen == set(GatePhase)
    assert {event for _, event in TRANSITIONS} == set(GateEvent)


def test_only_a_start_that_is_under_way_opens_the_gate() -> None:
    assert [at for (at, event) in TRANSITIONS if event is GateEvent.OPENED] == [GatePhase.STARTING]
    for phase in set(GatePhase) - {GatePhase.STARTING}:
        with pytest.raises(KeyError):
            after(phase, GateEvent.OPENED)


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ("SHUT DRAINED READY OPENED", GatePhase.OPEN),
        ("SHUT SHUT DRAINED SHUT", GatePhase.CLOSED),
        ("SHUT NOT_DRAINED", GatePhase.OPEN),
        ("READY SHUT", GatePhase.DRAINING),
        ("SHUT DRAINED READY SHUT NOT_DRAINED READY", GatePhase.STARTING),
        ("READY GAVE_UP SHUT DRAINED READY OPENED SHUT", GatePhase.DRAINING),
    ],
)
def test_events_in_a_row_lead_to_the_phase_of_the_table(events: str, phase: GatePhase) -> None:
    at = GatePhase.OPEN
    for event in events.split():
        at = after(at, GateEvent[event])
    assert at is phase


class Slow:
    """An engine of vLLM's kind whose start takes a while; notes what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.starting, self.may_start = threading.Event(), threading.Event()
        self.may_start.set()
        self.break_s = 0.0
        self.running: list[threading.Event] = []

    @property
    def scheduling(self) -> bool:
        return "resume" in self.said and self.said[::-1].index("resume") < self.said[::-1].index("pause")

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return [None, None]

    def break_off(self) -> None:
        time.sleep(self.break_s)
        for request in list(self.running):  # those that come later are queued until the next start
            request.set()
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


def test_a_replica_serves_while_the_leases_of_all_its_workers_last(slow: tuple[Slow, Replica, list[Line]]) -> None:
    _, replica, lines = slow
    for line, until_s in ((lines[0], 1000), (lines[1], 2000)):
        assert line.ask(LeaseEnd(boot_ns() + until_s * 10**9), 10) is None
    assert serve_all(lines, 1) == [None, None]
    with replica.serving() as version:
        assert version == 1
    with pytest.raises(ClosedError, match="its lease is over"), replica.serving():
        assert lines[1].ask(LeaseEnd(boot_ns() - 1), 10) is None
    assert replica.version is None
    with pytest.raises(ClosedError, match="its lease is over"), replica.serving():
        pytest.fail("a request entered")
    assert lines[1].ask(LeaseEnd(None), 10) is None
    with replica.serving(wait_s=10) as version:
        assert version == 1


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
        assert eventually(lambda: replica.phase is not GatePhase.STARTING)
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


def test_a_request_that_reaches_the_engine_after_others_were_broken_off_ends_too(
    slow: tuple[Slow, Replica, list[Line]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed the gate before, and its prompt took a while."""
    engine, replica, lines = slow
    serve_all(lines, 1)
    inside, ended = threading.Event(), threading.Event()

    def request() -> None:
        with replica.serving():
            inside.set()
            assert eventually(lambda: "break off" in engine.said)
            engine.running.append(ended)
            assert ended.wait(PATIENT_S)

    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(replica_module, "ENGINE_S", 10.0)
        asking = pool.submit(request)
        assert inside.wait(PATIENT_S)
        assert lines[0].ask(Shut("abort", PATIENT_S), 2 * PATIENT_S) is None
        asking.result()
    assert replica.version is None


def test_who_waits_at_a_gate_that_could_not_be_closed_is_let_in(slow: tuple[Slow, Replica, list[Line]]) -> None:
    _, replica, lines = slow
    serve_all(lines, 1)

    def wait() -> int:
        with replica.serving(wait_s=PATIENT_S) as version:
            return version

    with ThreadPoolExecutor() as pool, replica.serving():
        shut = pool.submit(lines[0].ask, Shut("drain", 0.5), PATIENT_S)
        assert eventually(lambda: replica.phase is GatePhase.DRAINING or shut.done())
        waiting = pool.submit(wait)
        told = shut.result(PATIENT_S)
        assert told is not None
        assert "1 requests still run" in told
        assert waiting.result(SOON_S) == 1


def test_the_last_request_may_leave_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, inside = Gate(), ExitStack()
    gate.open(1)
    inside.enter_context(gate.serving())
    wait = gate._changed.wait

    def late(timeout: float | None = None) -> bool:
        """Wait in vain; before this thread is on again, the request leaves."""
        monkeypatch.undo()
        assert not wait(0.01)
        inside.close()
        return False

    monkeypatch.setattr(gate._changed, "wait", late)
    assert gate.close("drain", 0.01) is None
    assert gate.version is None


def test_a_line_that_is_accepted_while_its_replica_closes_ends_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, path, accept = threading.Event(), replica_path(place, 0), Listener.accept

    def late(*args: Any) -> Any:
        link = accept(*args)
        accepted.set()
        time.sleep(0.3)  # a close that does not wait is over by now
        return link

    monkeypatch.setattr(Listener, "accept", late)
    listening = Listening(path, lambda worker, pid, message: None, lambda worker, why: None)
    line: Link[Reply] = Link(connect(path), Reply)
    assert accepted.wait(PATIENT_S)
    listening.close()
    with pytest.raises(PeerGoneError):
        line.receive(SOON_S)
    line.close()


def test_a_replica_that_was_out_of_descriptors_takes_lines_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "accept", out_of_descriptors(socket.socket.accept, [1]))
    monkeypatch.setattr(replica_module, "ENGINE_S", 0.1)
    with Replica(Slow(), place):
        with pytest.raises(ConnectionRefusedError):
            Line(replica_path(place, 0), 0)
        Line(replica_path(place, 0), 0).close()


def test_a_torn_note_of_leftovers_is_no_reason_not_to_start(tmp_path: Path) -> None:
    path = tmp_path / "replica-0.left"
    for torn in (b"", b'{"pids": [12', b'{"pids": "x", "names": []}', b"\xff\xfe"):
        path.write_bytes(torn)
        Leftovers(path)
        assert not path.exists()
    leftovers = Leftovers(path)
    leftovers.add(os.getpid(), 1)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert Leftovers(path).pids == [1]


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
    assert len(leftovers.pids) == 801
    assert [entry.name for entry in tmp_path.iterdir()] == ["replica-0.left"]
