"""One listener under all of Treadle's servers: who is held, who is closed for whom, what a shortage does."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import treadle.wire.listeners as listeners_module
from tests.support.patience import PATIENT_S, SOON_S
from treadle.host.sockets import connect
from treadle.runtime.faults.watch.links import open_listener
from treadle.update.adapters.vllm.engine_messages import Attach, FromVllm, Reply
from treadle.update.adapters.vllm.listening import Listening
from treadle.wire.errors import PeerGoneError, RefusedError, WireError
from treadle.wire.link import Link
from treadle.wire.listeners import (
    MOST_STRANGERS,
    PAUSE_S,
    LinkThreads,
    Listener,
    call_port,
    listen_at_path,
    listen_at_port,
)

Caller: TypeAlias = Callable[[], socket.socket]


def at_path(place: Path) -> tuple[Listener[Any], Caller]:
    path = place / "one.sock"
    return listen_at_path(path, FromVllm), lambda: connect(path)


def at_port(place: Path) -> tuple[Listener[Any], Caller]:
    listener = listen_at_port("127.0.0.1", secrets.token_bytes(32), FromVllm)
    return listener, lambda: socket.create_connection(listener.server.getsockname())


def of_a_watch(place: Path) -> tuple[Listener[Any], Caller]:
    listener = open_listener("127.0.0.1")
    return listener, lambda: socket.create_connection(listener.server.getsockname())


@pytest.fixture(params=[at_path, at_port, of_a_watch])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Listener[Any], Caller]]:
    place = tmp_path / "s"
    place.mkdir(mode=0o700)
    listener, call = request.param(place)
    yield listener, call
    listener.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process has as many files open as it may."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/dev/null", os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(spare)


def close(link: Any) -> None:
    getattr(link, "socket", link).close()


def is_closed(caller: socket.socket, within_s: float = SOON_S) -> bool:
    caller.settimeout(within_s)
    try:
        while caller.recv(1000):  # a nonce, where there is a key
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_without_descriptors_a_caller_waits_and_the_processor_is_left_alone(
    opened: tuple[Listener[Any], Caller],
) -> None:
    listener, call = opened
    with call():
        with no_descriptors():
            for _ in range(3):
                before = time.monotonic()
                assert listener.accept() is None
                assert time.monotonic() - before >= PAUSE_S
        assert not listener.strangers
        link = listener.accept()
        assert list(listener.strangers) == [link]
        close(link)


def test_one_stranger_too_many_closes_the_oldest(opened: tuple[Listener[Any], Caller]) -> None:
    listener, call = opened
    callers, links = [], []
    for _ in range(MOST_STRANGERS):
        callers.append(call())
        links.append(listener.accept())
        assert not list(listener.overdue())
    assert listener.discard(links[0])  # it has identified itself
    assert not listener.discard(links[0])
    pushed = []
    for _ in range(3):
        callers.append(call())
        links.append(listener.accept())
        pushed += list(listener.overdue())
    assert [link for link, _ in pushed] == links[1:3]
    assert all(f"{MOST_STRANGERS} others came" in str(why) for _, why in pushed)
    assert not any(listener.discard(link) for link, _ in pushed)
    assert list(listener.strangers) == links[3:]
    for link in links:
        close(link)
    for caller in callers:
        caller.close()


def test_a_stranger_that_says_nothing_is_overdue(
    opened: tuple[Listener[Any], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, call = opened
    with call(), call():
        monkeypatch.setattr(listeners_module, "HELLO_S", 0.0)
        silent = listener.accept()
        monkeypatch.setattr(listeners_module, "HELLO_S", 1000.0)
        late = listener.accept()
        assert [(link, type(why)) for link, why in listener.overdue()] == [(silent, TimeoutError)]
        assert list(listener.strangers) == [late]
        for link in (silent, late):
            close(link)


def test_those_that_are_expected_have_room_beside(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    path = tmp_path / "s" / "one.sock"
    listener = listen_at_path(path, FromVllm, expected=3)
    callers, links = [], []
    for _ in range(MOST_STRANGERS + 3):
        callers.append(connect(path))
        links.append(listener.accept())
    assert not list(listener.overdue())
    with connect(path):
        links.append(listener.accept())
        assert [link for link, _ in listener.overdue()] == links[:1]
    listener.close()
    for link in (*links, *callers):
        assert link is not None
        link.close()


def test_a_peer_that_is_refused_reads_why() -> None:
    """The reason is its last message; after a shortage it may call again, after an error of its own it need not."""
    key = secrets.token_bytes(32)
    listener = listen_at_port("127.0.0.1", key, FromVllm)
    address, port = listener.server.getsockname()
    for error, kind in ((PeerGoneError("full; try again"), PeerGoneError), (WireError("a bad word"), RefusedError)):
        with ThreadPoolExecutor() as pool:
            calling = pool.submit(call_port, address, port, key, Reply, PATIENT_S)
            link = listener.accept()
            assert link is not None
            link.meet(PATIENT_S)
            link.refuse(error)
            caller = calling.result()
        with pytest.raises(kind, match=str(error)):
            caller.receive(PATIENT_S)
        with pytest.raises(PeerGoneError, match="closed the connection"):
            caller.receive(PATIENT_S)
        link.close()
        caller.close()
    listener.close()


def test_a_peer_that_is_refused_is_closed_and_holds_no_place() -> None:
    def refuse(connection: socket.socket) -> Any:
        raise OSError(errno.ENOTCONN, "gone")

    listener: Listener[Any] = Listener(socket.create_server(("127.0.0.1", 0)), refuse)
    with socket.create_connection(listener.server.getsockname()) as caller:
        assert listener.accept() is None
        assert is_closed(caller)
    assert not listener.strangers
    listener.close()


@pytest.mark.parametrize("kind", [at_path, at_port])
@pytest.mark.parametrize("moment", ["waits", "is about to wait", "has accepted"])
def test_a_close_ends_a_thread_in_accept_and_all_links(
    kind: Callable[[Path], tuple[Listener[Any], Caller]], moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    listener, call = kind(tmp_path / "s")
    reached, closing, real = threading.Event(), threading.Event(), socket.socket.accept

    def late(server: socket.socket) -> Any:
        if moment == "is about to wait":
            reached.set()
            assert closing.wait(PATIENT_S)
            time.sleep(0.1)  # a close that does not wait is over by now
        accepted = real(server)
        if moment == "has accepted":
            reached.set()
            assert closing.wait(PATIENT_S)
            time.sleep(0.1)
        return accepted

    def serve(link: Link[Any]) -> None:
        with pytest.raises(OSError):  # noqa: PT011 - a wait for a nonce, or for a message
            link.receive(None)
        served.append(link)

    served: list[Link[Any]] = []
    monkeypatch.setattr(socket.socket, "accept", late)
    threads = LinkThreads(listener, serve, "listens")
    callers = [call()] if moment == "has accepted" else []
    if moment != "waits":
        assert reached.wait(PATIENT_S)
    closing.set()
    threads.close()
    assert "listens" not in {thread.name for thread in threading.enumerate()}
    for caller in callers:
        assert is_closed(caller)
        caller.close()


def test_a_successor_keeps_its_path(tmp_path: Path) -> None:
    """A listener that is closed late removes its own file, not the one that another process put there."""
    (tmp_path / "s").mkdir(mode=0o700)
    path = tmp_path / "s" / "one.sock"
    first = listen_at_path(path, FromVllm)
    path.unlink()
    second = listen_at_path(path, FromVllm)
    first.close()
    connect(path).close()
    second.close()
    assert not path.exists()


# ---- the lines of a replica ------------------------------------------------------------------------------------------


@pytest.fixture
def lost() -> list[int]:
    return []


@pytest.fixture
def listening(tmp_path: Path, lost: list[int]) -> Iterator[tuple[Listening, Path]]:
    (tmp_path / "s").mkdir(mode=0o700)
    path = tmp_path / "s" / "replica.sock"
    made = Listening(path, lambda worker, pid, message: None, lambda worker, why: lost.append(worker))
    yield made, path
    made.close()


def test_a_crowd_at_a_replica_closes_no_line_of_a_worker(listening: tuple[Listening, Path], lost: list[int]) -> None:
    line: Link[Reply] = Link(connect(listening[1]), Reply)
    line.send(Attach(0, 1))
    assert line.receive(PATIENT_S) == Reply(None)
    crowd = [connect(listening[1]) for _ in range(MOST_STRANGERS + 1)]
    assert is_closed(crowd[0])
    assert not is_closed(crowd[-1], 0.1)
    line.send(Attach(0, 1))
    assert line.receive(PATIENT_S) == Reply(None)
    assert lost == []
    for caller in crowd:
        caller.close()
    line.close()


def test_a_worker_that_is_closed_in_a_crowd_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Attach came, and before it was read another stranger took its place."""
    monkeypatch.setattr(listeners_module, "MOST_STRANGERS", 1)
    (tmp_path / "s").mkdir(mode=0o700)
    path, lost = tmp_path / "s" / "replica.sock", list[int]()
    came, pushed, over, discard = threading.Event(), threading.Event(), threading.Event(), Listener.discard

    def late(listener: Listener[Any], link: Any) -> bool:
        came.set()
        assert pushed.wait(PATIENT_S)
        still = discard(listener, link)
        over.set()
        return still

    monkeypatch.setattr(Listener, "discard", late)
    listening = Listening(path, lambda worker, pid, message: None, lambda worker, why: lost.append(worker))
    line: Link[Reply] = Link(connect(path), Reply)
    line.send(Attach(0, 1))
    assert came.wait(PATIENT_S)
    with connect(path):
        with pytest.raises(PeerGoneError, match="others came that have not said yet who they are"):
            line.receive(PATIENT_S)
        pushed.set()
        assert over.wait(PATIENT_S)
        line.close()
    listening.close()
    assert lost == []
