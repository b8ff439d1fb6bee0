"""Connections to a worker: who gets one, who is turned away, what they are told."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import treadle.update.rank.worker_client as worker_client
import treadle.update.worker.endpoint as endpoint_module
import treadle.wire.listeners as listeners_module
from tests.support.patience import PATIENT_S, SOON_S
from tests.support.update.engines import Noting, begin, bring_first, eventually, out_of_descriptors, plan_of
from tests.support.update.workers import Asker
from treadle.host.sockets import close_server, connect, listen
from treadle.update import Endpoint, Plain
from treadle.update.protocol.update_messages import (
    PROTOCOL,
    Describe,
    Finish,
    FromWorker,
    Grant,
    Hello,
    Refused,
    Status,
)
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.worker_client import WorkerClient, WorkerRefusedError
from treadle.update.worker.asking import ask
from treadle.update.worker.endpoint import MOST_ASK_BYTES, MOST_ASKERS, worker_path
from treadle.update.worker.worker import BUSY_S, Worker
from treadle.wire.errors import PeerGoneError, RefusedError, WireError
from treadle.wire.link import Link
from treadle.wire.listeners import MOST_STRANGERS, call_path


def test_an_endpoint_that_was_out_of_descriptors_takes_connections_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "accept", out_of_descriptors(socket.socket.accept, [1, 2]))
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0) as endpoint:
        for _ in range(2):
            with suppress(PeerGoneError):
                Asker(place, 0)
        asker = Asker(place, 0)
        assert asker.status().state == "lapsed"
        asker.close()
    assert f"treadle worker {endpoint.worker.worker}" not in {thread.name for thread in threading.enumerate()}


def test_those_who_ask_leave_a_place_for_update_ranks(place: Path) -> None:
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0) as endpoint:
        askers = [Asker(place, 0) for _ in range(MOST_ASKERS)]
        with pytest.raises(PeerGoneError, match=f"{MOST_ASKERS} others ask this worker"):
            Asker(place, 0)
        post = Inbox()
        post.start()
        for rank in range(3):  # one after the other; each takes over
            beside = WorkerClient(place, 0, post, lambda name, text: None)
            beside.connect(rank, 3.0)
            assert isinstance(beside.ask(Describe(), Status, 3.0), Status)
            beside.drop()
        askers.pop().close()
        assert eventually(lambda: endpoint.num_askers < MOST_ASKERS)
        askers.append(Asker(place, 0))
        strangers = [connect(worker_path(place, 0)) for _ in range(MOST_STRANGERS + 1)]
        strangers[0].settimeout(PATIENT_S)
        told = b"".join(iter(lambda: strangers[0].recv(1000), b""))  # one more than these closes the oldest
        assert f"{MOST_STRANGERS} others came that have not said yet who they are".encode() in told
        beside.connect(3, PATIENT_S)  # nobody has to wait until strangers say who they are
        assert isinstance(beside.ask(Describe(), Status, PATIENT_S), Status)
        beside.drop()
        for asker in askers:
            assert asker.status().state == "lapsed"
            asker.close()
        for stranger in strangers:
            stranger.close()


def test_an_update_rank_that_is_closed_among_strangers_comes_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners_module, "MOST_STRANGERS", 1)
    calls: list[Link[FromWorker]] = []
    strangers = []

    def crowded(path: Path, *args: Any) -> Link[FromWorker]:
        link = call_path(path, *args)
        calls.append(link)
        if len(calls) <= 2:
            strangers.append(connect(path))
            poll = select.poll()
            poll.register(link.connection, select.POLLIN)
            assert poll.poll(PATIENT_S * 1000), "it was not closed"
        return link

    monkeypatch.setattr(worker_client, "call_path", crowded)
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        beside = WorkerClient(place, 0, Inbox(), lambda name, text: None)
        beside.connect(0, PATIENT_S)
        assert len(calls) == 3
        beside.drop()
    for stranger in strangers:
        stranger.close()


def test_a_question_is_no_larger_than_an_engine_can_spare(place: Path) -> None:
    """An asker that announces more is refused before a byte of it is held; update ranks send layouts of any size."""
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0, answer=lambda body: (1, str(len(body)).encode())):
        assert ask(place, 0, b"x" * MOST_ASK_BYTES) == (1, str(MOST_ASK_BYTES).encode())
        with pytest.raises(ValueError, match=f"a question has up to {MOST_ASK_BYTES} bytes, got {MOST_ASK_BYTES + 1}"):
            ask(place, 0, b"x" * (MOST_ASK_BYTES + 1))
        for role in ("ask", "update"):
            link: Link[FromWorker] = Link(connect(worker_path(place, 0)), FromWorker)
            link.send(Hello(PROTOCOL, role))
            assert isinstance(link.receive(PATIENT_S), Status)
            link.connection.send(struct.pack("!I", MOST_ASK_BYTES + (1 << 20)))
            if role == "update":
                with pytest.raises(TimeoutError):
                    link.receive(0.5)
            else:
                with pytest.raises(RefusedError, match=f"has {MOST_ASK_BYTES + (1 << 20)} bytes, the limit is"):
                    link.receive(PATIENT_S)
            link.close()


def test_an_update_rank_comes_again_where_a_worker_ended_before_its_welcome(place: Path) -> None:
    """A restarted worker: the connection was made to the process before."""
    path = worker_path(place, 0)
    dying = listen(path)
    post = Inbox()
    post.start()
    beside = WorkerClient(place, 0, post, lambda name, text: None)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(beside.connect, 0, 20.0)
        dying.accept()[0].close()
        close_server(dying, path)
        with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
            coming.result()
            assert beside.ask(Describe(), Status, 3.0).state == "lapsed"
            beside.drop()


def test_a_connection_that_says_nothing_is_told_so_when_it_ends(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HELLO_S", 0.2)
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        link: Link[FromWorker] = Link(connect(worker_path(place, 0)), FromWorker)
        with pytest.raises(PeerGoneError, match=f"process {os.getpid()} did not send a message in time"):
            link.receive(PATIENT_S)
        link.close()


def test_a_rank_whose_worker_was_taken_over_hears_by_whom(place: Path) -> None:
    """The rank hears it as the reason why its connection ended, not as the answer to a question."""
    told: SimpleQueue[str] = SimpleQueue()
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        first, second = (WorkerClient(place, 0, Inbox(), lambda name, text: told.put(text)) for _ in range(2))
        first.connect(0, 5.0)
        second.connect(1, 5.0)
        who = f"update rank 1 of process {os.getpid()} has taken worker 0 over"
        with pytest.raises(PeerGoneError, match=who):
            first.expect(Status, 5.0)
        assert told.get(timeout=SOON_S) == who
        assert second.ask(Describe(), Status, 5.0).state == "lapsed"
        second.drop()


@pytest.mark.parametrize("served", [True, False])
def test_a_worker_that_goes_back_after_its_endpoint_was_closed_keeps_its_slot(
    served: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the slot, another process could take it and serve another version beside this one."""
    engine, release = Noting(), Worker.release
    plan, closed, released = plan_of(engine), threading.Event(), threading.Event()

    def late(*args: Any) -> None:
        assert closed.wait(PATIENT_S)
        release(*args)
        released.set()

    monkeypatch.setattr(Worker, "release", late)
    with Endpoint(engine, place, 0) as endpoint:
        endpoint.worker.handle(plan)
        if served:
            bring_first(endpoint.worker, plan)
        rank = WorkerClient(place, 0, Inbox(), lambda name, text: None)
        rank.connect(0, PATIENT_S)
        endpoint.worker.handle(begin(2, 2, plan))
        assert endpoint.worker.state == "loading"
    closed.set()
    assert released.wait(PATIENT_S)
    assert endpoint._slot.held == (engine.gate.version is not None) == served


def test_a_second_endpoint_of_a_process_waits_until_the_engine_of_the_first_has_closed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could be filled and opened while the first still serves another version."""
    monkeypatch.setattr(endpoint_module, "RETIRE_S", 0.05)
    engine, other = Noting(), Noting()
    plan = plan_of(engine)
    with Endpoint(engine, place, 0) as first:
        first.worker.handle(plan)
        bring_first(first.worker, plan)
        first.path.unlink()  # as somebody may who wants to start the worker elsewhere
        with engine.gate.serving():
            second = Endpoint(other, place, 0)
            status = second.worker.status
            assert (status.holds_slot, status.before) == (False, os.getpid())
        assert eventually(lambda: second.worker.status.holds_slot)
        assert engine.gate.version is None
        second.close()


def test_a_message_that_was_read_before_a_close_opens_nothing_after_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, handle = Noting(), Worker.handle
    plan, read, closed, handled = plan_of(engine), threading.Event(), threading.Event(), threading.Event()
    with Endpoint(engine, place, 0) as endpoint:
        endpoint.worker.handle(plan)
        bring_first(endpoint.worker, plan, to="staged")
        rank = WorkerClient(place, 0, Inbox(), lambda name, text: None)
        rank.connect(0, PATIENT_S)

        def late(worker: Worker, message: Any) -> FromWorker:
            read.set()
            assert closed.wait(PATIENT_S)
            answer = handle(worker, message)
            handled.set()
            return answer

        monkeypatch.setattr(Worker, "handle", late)
        rank.send(Grant(1, 1, (1,)))
        assert read.wait(PATIENT_S)
    closed.set()
    assert handled.wait(PATIENT_S)
    assert not endpoint._slot.held
    assert engine.gate.version is None


def test_an_answer_of_another_attempt_is_not_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a connection used again on which an answer is outstanding."""
    lost: SimpleQueue[str] = SimpleQueue()
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0) as endpoint:
        rank = WorkerClient(place, 0, Inbox(), lambda name, text: lost.put(text))
        rank.connect(0, PATIENT_S)
        assert rank.ask(Grant(5, None, ()), Status, PATIENT_S).epoch == 5
        told = rank.ask(Grant(6, None, ()), Status, PATIENT_S)
        monkeypatch.setattr(Worker, "handle", lambda worker, message: told)
        with pytest.raises(WireError, match="Status of attempt 6 came in attempt 7"):
            rank.ask(Grant(7, None, ()), Status, PATIENT_S)
        monkeypatch.setattr(Worker, "handle", lambda worker, message: Refused("busy", "later", 6))
        with pytest.raises(WireError, match="Refused of attempt 6 came in attempt 7"):
            rank.ask(Grant(7, None, ()), Status, PATIENT_S)
        monkeypatch.undo()
        with pytest.raises(WorkerRefusedError, match="attempt 4 is over") as refused:
            rank.ask(Finish(4), Status, PATIENT_S)
        assert refused.value.refused.epoch == 4
        link = rank._link
        rank.connect(0, PATIENT_S)
        assert rank._link is link
        rank.send(Describe())
        assert rank.is_answering
        rank.connect(0, PATIENT_S)
        assert rank._link is not link
        assert not rank.is_answering
        assert rank.layout(0, PATIENT_S) == endpoint.worker.adapter.layout()
        rank.drop()


def test_a_busy_worker_is_asked_again_until_the_deadline(place: Path) -> None:
    """It may be making the rollback copy of an attempt that is over."""
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0) as endpoint:
        rank = WorkerClient(place, 0, Inbox(), lambda name, text: None)
        rank.connect(0, PATIENT_S)
        endpoint.worker._one.acquire()
        with pytest.raises(WorkerRefusedError, match="still busy"):
            rank.ask(Grant(5, None, ()), Status, 1.5 * BUSY_S)
        later = threading.Timer(2.5 * BUSY_S, endpoint.worker._one.release)
        later.start()
        assert rank.ask(Grant(5, None, ()), Status, PATIENT_S).epoch == 5
        later.join()
        rank.drop()
