"""Servers at a path: one process at a time listens there, however many start at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENT_S, SOON_S
from treadle.host.sockets import close_server, connect, listen
from treadle.wire.errors import PeerGoneError
from treadle.wire.link import Link


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "s").mkdir(mode=0o700)
    return tmp_path / "s" / "one.sock"


def test_a_server_that_is_about_to_listen_is_not_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, real = threading.Event(), socket.socket.listen

    def late(server: socket.socket, *args: Any) -> None:
        bound.set()
        time.sleep(0.3)  # whoever does not wait takes this one for the socket of a process that has ended
        real(server, *args)

    monkeypatch.setattr(socket.socket, "listen", late)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(listen, path)
        assert bound.wait(PATIENT_S)
        with pytest.raises(FileExistsError, match="another process listens"):
            listen(path)
        server = first.result(PATIENT_S)
    with connect(path):
        server.accept()[0].close()
    close_server(server, path)
    assert not path.exists()


def test_a_server_whose_queue_is_full_is_not_waited_for(path: Path) -> None:
    """As that of a process that is stopped."""
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(os.fspath(path))
        stopped.listen(0)
        with connect(path), ThreadPoolExecutor() as pool:
            coming = pool.submit(listen, path)
            try:
                with pytest.raises(FileExistsError, match="another process listens"):
                    coming.result(SOON_S)
            finally:
                stopped.close()  # ends whoever waits


def test_the_socket_of_a_process_that_has_ended_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(os.fspath(path))
    server = listen(path)
    connect(path).close()
    close_server(server, path)


def test_a_child_that_is_forked_meanwhile_keeps_nobody_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, children, other = socket.socket.listen, [], ThreadPoolExecutor()

    def forking(server: socket.socket, *args: Any) -> None:
        child = os.fork()
        if not child:
            time.sleep(PATIENT_S)
            os._exit(0)
        children.append(child)
        real(server, *args)

    monkeypatch.setattr(socket.socket, "listen", forking)
    try:
        close_server(listen(path), path)
        monkeypatch.undo()
        close_server(other.submit(listen, path.with_name("two.sock")).result(SOON_S), path.with_name("two.sock"))
    finally:
        for child in children:  # before the executor waits for its thread
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        other.shutdown()


@pytest.mark.parametrize("kind", ["forked", "given the socket"])
def test_a_socket_that_a_child_of_its_process_holds_is_that_of_a_process_that_has_ended(kind: str, path: Path) -> None:
    reads, writes = os.pipe()
    process = os.fork()
    if not process:
        server = listen(path)
        if kind == "forked":
            child = os.fork()
            if not child:
                time.sleep(PATIENT_S)
                os._exit(0)
        else:  # as by a program that closes nothing after a fork
            child = subprocess.Popen(["sleep", str(PATIENT_S)], pass_fds=[server.fileno()]).pid
        os.write(writes, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(os.read(reads, 100))
    os.close(reads)
    os.close(writes)
    try:
        os.waitpid(process, 0)
        if kind == "forked":
            assert _is_refused(path), "the child holds the socket"
        else:
            link: Link[Any] = Link(connect(path), Any)
            with pytest.raises(PeerGoneError, match=f"process {process} ended"):
                link.receive(PATIENT_S)
            link.close()
        server = listen(path)
        with connect(path):
            server.accept()[0].close()
        close_server(server, path)
    finally:
        os.kill(child, signal.SIGKILL)


def _is_refused(path: Path) -> bool:
    """True once nobody listens any more: the child closes its copy when it first runs."""
    for wait_s in (0.01, 0.1, 1, 10, SOON_S):  # few: what nobody accepts fills the queue, and then a caller waits
        try:
            connect(path).close()
        except ConnectionRefusedError:
            return True
        time.sleep(wait_s)
    return False


def test_a_forked_child_closes_connections_so_that_their_end_is_heard(path: Path) -> None:
    """Between hosts nothing else tells that a process has ended."""
    server = listen(path)
    here: Link[Any] = Link(connect(path), Any)
    there, _ = server.accept()
    child = os.fork()
    if not child:
        time.sleep(PATIENT_S)
        os._exit(0)
    try:
        here.connection.close()  # as the end of this process does
        there.settimeout(SOON_S)
        assert there.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        there.close()
        close_server(server, path)
