"""Connections to a worker: who gets one, who is turned away, what they are told."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

import treadle.update.worker.endpoint as endpoint_module
import treadle.wire.link as link_module
from tests.support.patience import SOON_S
from tests.support.update.engines import eventually, out_of_descriptors
from tests.support.update.workers import Asker
from treadle.host.sockets import close_server, connect, listen
from treadle.update import Endpoint, Plain
from treadle.update.protocol.messages import (
    FromWorker,
    GetStatus,
    Refused,
    Status,
)
from treadle.update.rank.inbox import Inbox
from treadle.update.rank.worker_client import WorkerClient
from treadle.update.worker.endpoint import MOST_ASKERS, MOST_STRANGERS, worker_path
from treadle.wire.errors import PeerGoneError
from treadle.wire.link import Link, accept


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
    assert f"treadle worker {endpoint.worker.worker}" not in {thread.name for thread in threading.enumerate()}


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
        assert eventually(lambda: endpoint.num_askers < MOST_ASKERS)
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


def test_an_update_rank_comes_again_where_a_worker_ended_before_its_welcome(place: Path) -> None:
    """A restarted worker: the connection was made to the process before."""
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
    """The rank hears it as the reason why its connection ended, not as the answer to a question."""
    told: SimpleQueue[str] = SimpleQueue()
    with Endpoint(Plain({"w": torch.zeros(4)}), place, 0):
        first, second = (WorkerClient(place, 0, Inbox(), told.put) for _ in range(2))
        first.connect(0, 5.0)
        second.connect(1, 5.0)
        who = f"update rank 1 of process {os.getpid()} has taken worker 0 over"
        with pytest.raises(PeerGoneError, match=who):
            first.expect(Status, 5.0)
        assert told.get(timeout=SOON_S) == who
        assert second.ask(GetStatus(), Status, 5.0).state == "closed"
        second.drop()
