"""Treadle's sockets: what they refuse, and that nothing of what is refused stays or runs."""

from __future__ import annotations

import ast
import os
import random
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import treadle.update
from tests.support.patience import PATIENT_S, SOON_S
from tests.support.ranks import check, run_ranks
from tests.support.update.models import model, served
from tests.support.update.workers import Workers, ask_once, resident_bytes
from treadle.host.sockets import connect, listen, peer_of
from treadle.update import Endpoint, Plain
from treadle.update.memory.host import HostBuffer
from treadle.update.protocol.update_messages import (
    PROTOCOL,
    Answer,
    Ask,
    Begin,
    Describe,
    FromWorker,
    Hello,
    Map,
    Move,
    Refused,
    Share,
    Status,
    TakePlan,
    ToWorker,
)
from treadle.weights.tensor_boxes import Box, Piece, Tensor
from treadle.weights.update_plan import Item, Take
from treadle.wire.errors import PeerGoneError, RefusedError, WireError
from treadle.wire.frames import FIRST_BYTES, Frames, framed
from treadle.wire.link import MOST_FDS, Link, Refusal
from treadle.wire.listeners import listen_at_path

NUM_MALFORMED = int(os.environ.get("TREADLE_UPDATE_MALFORMED", "5000"))
RUNS_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "code", "codeop", "runpy"}
CALLS_CODE = {"eval", "exec", "compile", "__import__"}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    (tmp_path / "s").mkdir(mode=0o700)
    with Endpoint(Plain({"w": torch.zeros(4)}), tmp_path / "s", 0) as made:
        yield made


def call(endpoint: Endpoint, role: str = "update") -> Link[FromWorker]:
    link: Link[FromWorker] = Link(connect(endpoint.path), FromWorker)
    link.trust()
    link.send(Hello(PROTOCOL, role))  # type: ignore[arg-type]
    assert isinstance(link.receive(5), Status)
    return link


# ---- no code from the wire -------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    """What reads from a connection, or is told what came over one."""
    rooms = (Path(treadle.__file__).parent / room for room in ("update", "wire", "host", "runtime/faults"))
    return sorted(path for room in rooms for path in room.rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_here_can_run_what_it_reads(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        else:
            names = set()
        assert not names & RUNS_CODE, f"{path.name} imports {names & RUNS_CODE}"
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                assert called.id not in CALLS_CODE, f"{path.name} calls {called.id}"
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert (called.value.id, called.attr) != ("torch", "load"), f"{path.name} calls torch.load"


def test_the_reader_of_imports_sees_them() -> None:
    assert len(sources()) > 20
    assert any(path.name == "link.py" for path in sources())


# ---- who may speak ---------------------------------------------------------------------------------------------------


def test_sockets_lie_where_only_their_owner_can_reach(endpoint: Endpoint, tmp_path: Path) -> None:
    assert stat.S_IMODE(endpoint.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(endpoint.path.stat().st_mode) == 0o600
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError, match="mode 0700"):
        Endpoint(Plain({}), tmp_path / "open", 0)
    with pytest.raises(ValueError, match="longer than the 107 bytes"):
        listen(tmp_path / ("x" * 100) / "s")


def other_user(rank: int, path: Path, uid: int) -> str:
    """Connects as somebody else, who can reach the socket as the directory was opened for the purpose."""
    os.seteuid(uid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        client.connect(os.fspath(path))
        try:
            client.sendall(framed(msgspec.msgpack.encode(Hello(PROTOCOL, "ask"))))
            return "closed" if client.recv(1) == b"" else "answered"
        except (BrokenPipeError, ConnectionResetError):
            return "closed"
        finally:
            os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_it_can_reach_the_socket(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="treadle-u", dir="/tmp") as name:
        directory = Path(name) / "s"
        directory.mkdir(mode=0o700)
        with Endpoint(Plain({}), directory, 0) as endpoint:
            for path, mode in ((Path(name), 0o755), (directory, 0o755), (endpoint.path, 0o666)):
                path.chmod(mode)
            assert check(run_ranks(1, other_user, endpoint.path, 65534)) == ["closed"]


def test_the_kernel_says_who_is_there(endpoint: Endpoint) -> None:
    with connect(endpoint.path) as connection:
        assert (peer_of(connection).pid, peer_of(connection).uid) == (os.getpid(), os.getuid())


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_frames_hold_no_more_than_has_come() -> None:
    frames = Frames(1000)
    frames.feed(struct.pack("!I", 999) + b"x")
    assert frames.next() is None
    frames.feed(b"x" * 998 + framed(b"next"))
    assert (frames.next(), frames.next(), frames.next()) == (b"x" * 999, b"next", None)
    frames.feed(struct.pack("!I", 1001))
    with pytest.raises(WireError, match="1001 bytes, the limit is 1000"):
        frames.next()
    with pytest.raises(WireError, match="larger than the limit"):
        framed(b"x" * 101, 100)


def test_half_a_message_ends_the_connection(tmp_path: Path) -> None:
    """What came next would be taken for the rest of it."""
    (tmp_path / "s").mkdir(mode=0o700)
    server = listen_at_path(tmp_path / "s" / "one.sock", ToWorker)
    here: Link[FromWorker] = Link(connect(tmp_path / "s" / "one.sock"), FromWorker)
    there: Link[ToWorker] | None = server.accept()
    assert there is not None
    there.trust()
    with pytest.raises(TimeoutError):
        here.send(Ask(b"x" * (8 << 20)), timeout_s=0.1)
    with pytest.raises(PeerGoneError):
        here.send(Describe())
    with pytest.raises(PeerGoneError):
        there.receive(5)
    for end in (here, there, server):
        end.close()


@pytest.mark.parametrize("moment", ["waits", "is about to wait", "is about to send"])
def test_a_connection_that_is_closed_while_another_thread_sends(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of a connection closes it at its end; whoever sends meanwhile hears that it is gone, at once."""
    (tmp_path / "s").mkdir(mode=0o700)
    server = listen_at_path(tmp_path / "s" / "one.sock", ToWorker)
    here: Link[FromWorker] = Link(connect(tmp_path / "s" / "one.sock"), FromWorker)
    there: Link[ToWorker] | None = server.accept()
    assert there is not None
    begun, closing = threading.Event(), threading.Event()
    held = {"is about to wait": "_await", "is about to send": "_send_some"}.get(moment)
    if held is not None:
        plain = getattr(Link, held)

        def late(*args: object) -> object:
            begun.set()
            assert closing.wait(PATIENT_S)
            time.sleep(0.2)  # a close that does not wait is over by now
            return plain(*args)

        monkeypatch.setattr(Link, held, late)
    errors: list[BaseException] = []

    def send() -> None:
        try:
            here.send(Ask(b"x" * (8 << 20)), timeout_s=PATIENT_S)
        except BaseException as error:  # also ValueError, of a descriptor of -1
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    if held is None:
        time.sleep(0.2)
    else:
        assert begun.wait(PATIENT_S)
    closing.set()
    here.close()
    sender.join(PATIENT_S)
    assert [type(error) for error in errors] == [PeerGoneError]
    with pytest.raises(PeerGoneError, match="is closed"):
        here.send(Describe())
    for end in (here, there, server):
        end.close()


def test_descriptors_that_a_process_has_no_room_for_are_not_said_to_be_too_many(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    server = listen_at_path(tmp_path / "s" / "one.sock", ToWorker)
    here: Link[FromWorker] = Link(connect(tmp_path / "s" / "one.sock"), FromWorker)
    there: Link[ToWorker] | None = server.accept()
    assert there is not None
    buffers = [HostBuffer.make(100) for _ in range(2)]
    here.send(Map((100, 100)), fds=[buffer.fd for buffer in buffers if buffer.fd is not None])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(server.server.fileno())
    mapped = os.dup(buffers[0].fd or 0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limits[1]))
        os.close(spare)  # room for one
        with pytest.raises(
            WireError, match=rf"process {os.getpid()} has as many files open as it may, {spare + 1}; raise"
        ):
            there.receive(PATIENT_S)
        assert there.fds == []
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))
        with pytest.raises(ValueError, match=r"a buffer cannot be mapped: .* raise its limit \(ulimit -n\)"):
            HostBuffer.map(mapped, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for buffer in buffers:
        buffer.close()
    for end in (here, there, server):
        end.close()


LEAVES_A_CHILD = """
import os, socket, subprocess, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
child = subprocess.Popen(["sleep", "1000"], pass_fds=[connection.fileno()])
print(child.pid, flush=True)
sys.stdin.read()
connection.sendall(bytes.fromhex(sys.argv[2]))
os._exit(0)
"""


@pytest.mark.parametrize("seen_by", ["whoever receives", "whoever sends"])
def test_the_end_of_a_process_whose_child_holds_the_connection(seen_by: str, tmp_path: Path) -> None:
    """It is noticed once, by one thread: others must not wait for what will never come."""
    (tmp_path / "s").mkdir(mode=0o700)
    path = tmp_path / "s" / "one.sock"
    server = listen_at_path(path, ToWorker)
    last = framed(msgspec.msgpack.encode(Ask(b"x" * 100)))
    command = [sys.executable, "-c", LEAVES_A_CHILD, str(path), last.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        link: Link[ToWorker] | None = server.accept()
        assert link is not None
        child = int(process.stdout.readline())
        try:
            process.stdin.close()
            process.wait(PATIENT_S)
            if seen_by == "whoever sends":
                with pytest.raises(PeerGoneError, match="ended"):
                    link.send(Answer(1, b"x" * (8 << 20)), timeout_s=PATIENT_S)
            assert link.receive(SOON_S) == Ask(b"x" * 100)
            with pytest.raises(PeerGoneError, match="ended"):
                link.receive(SOON_S)
            with pytest.raises(PeerGoneError, match="ended"):
                link.send(Answer(1, b"x" * (8 << 20)), timeout_s=PATIENT_S)
        finally:
            os.kill(child, signal.SIGKILL)
    link.close()
    server.close()


def malformed(chance: random.Random) -> bytes:
    """Something that is no first message: wrong lengths, wrong bytes, wrong types, wrong order."""
    hello = msgspec.msgpack.encode(Hello(PROTOCOL, "ask"))
    kind = chance.randrange(8)
    if kind == 0:
        return struct.pack("!I", chance.randrange(FIRST_BYTES + 1, 1 << 32)) + hello
    if kind == 1:
        return framed(chance.randbytes(chance.randrange(1, 200)))
    if kind == 2:
        at = chance.randrange(len(hello))
        return framed(hello[:at] + bytes([hello[at] ^ (1 << chance.randrange(8))]) + hello[at + 1 :] + b"\xc1")
    if kind == 3:
        return framed(msgspec.msgpack.encode({"type": "hello", "protocol": PROTOCOL, "role": "update", "more": 1}))
    if kind == 4:
        return framed(msgspec.msgpack.encode({"type": chance.choice(["eval", "hallo", "", 3]), "protocol": PROTOCOL}))
    if kind == 5:
        return framed(
            msgspec.msgpack.encode(
                chance.choice(
                    [Describe(), Ask(b"x"), Hello(PROTOCOL, "join"), Move(1, "p", 0, 0, out=False, checked=False)]
                )
            )
        )
    if kind == 6:
        return framed(b"\x91" * chance.randrange(1, 2000))
    return framed(
        msgspec.msgpack.encode(
            {
                "type": "hello",
                "protocol": chance.choice([0, PROTOCOL + 1, "1", -1]),
                "role": chance.choice(["ask", "join"]),
            }
        )
    )


def refused(path: Path, data: bytes) -> bool:
    """Was it answered by a refusal, or nothing, and the connection closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(os.fspath(path))
        answer = b""
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(4096):
                answer += part
        except (BrokenPipeError, ConnectionResetError):
            return True
    return not answer or isinstance(msgspec.msgpack.decode(answer[4:], type=FromWorker | Refusal), Refusal)


def worker_memory(adapter: object) -> tuple[int, int, int]:
    return sum(resident_bytes()), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


@pytest.mark.slow
def test_malformed_messages_are_refused_without_crash_or_growth() -> None:
    """TREADLE_UPDATE_MALFORMED says how many."""
    chance = random.Random(7)
    with Workers(served(model(1, 16))) as workers:
        path = workers.sockets / "worker-0.sock"
        for _ in range(1000):
            assert refused(path, malformed(chance))
        before = workers.tell(0, worker_memory)
        for _ in range(NUM_MALFORMED):
            data = malformed(chance)
            assert refused(path, data), data
        after = workers.tell(0, worker_memory)
        assert after[0] - before[0] < 2 << 20
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2] + 2
        answer = ask_once(workers.sockets, 0)
        assert isinstance(answer, Refused)
        assert answer.code == "closed"


def test_a_question_cannot_update(endpoint: Endpoint) -> None:
    link = call(endpoint, "ask")
    link.send(Move(1, "p", 0, 0, out=False, checked=False))
    with pytest.raises(RefusedError, match="Move comes from update ranks only"):
        link.receive(5)
    with pytest.raises(PeerGoneError):
        link.receive(5)
    link.close()


def test_only_the_last_update_rank_has_the_say(endpoint: Endpoint) -> None:
    first, second = call(endpoint), call(endpoint)
    with pytest.raises(RefusedError, match=f"of process {os.getpid()} has taken worker 0 over"):
        first.receive(5)
    with pytest.raises(PeerGoneError):
        first.receive(5)
    second.send(Describe())
    assert isinstance(second.receive(5), Status)
    first.close()
    second.close()


def test_more_who_ask_than_fit_are_refused(endpoint: Endpoint) -> None:
    links = [call(endpoint, "ask") for _ in range(32)]
    one_more: Link[FromWorker] = Link(connect(endpoint.path), FromWorker)
    one_more.send(Hello(PROTOCOL, "ask"))
    with pytest.raises(PeerGoneError, match="32 others ask this worker"):
        one_more.receive(5)
    for link in (*links, one_more):
        link.close()


W = Tensor("w", (4,), "float32")


def plan_of(item: Item, take: Take) -> TakePlan:
    return TakePlan("p", (W,), (Share(0, (item,), (take,), (0,), 64),))


BAD_PLANS = {
    "item outside of its tensor": plan_of(Item(Piece("w", Box((0,), (5,))), 0), Take(0, Box((0,), (4,)))),
    "take outside of its item": plan_of(Item(Piece("w", Box((2,), (4,))), 0), Take(0, Box((1,), (4,)))),
    "no such item": plan_of(Item(Piece("w", Box((0,), (4,))), 0), Take(-1, Box((0,), (4,)))),
    "unknown tensor": plan_of(Item(Piece("x", Box((0,), (4,))), 0), Take(0, Box((0,), (4,)))),
    "other dimensions": plan_of(Item(Piece("w", Box((0, 0), (4, 1))), 0), Take(0, Box((0,), (4,)))),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_plans_that_reach_outside_are_refused(endpoint: Endpoint, name: str) -> None:
    link = call(endpoint)
    link.send(BAD_PLANS[name])
    assert isinstance(link.receive(5), Refused)
    link.close()


def test_a_bucket_outside_of_its_buffer_is_refused(endpoint: Endpoint) -> None:
    link, buffer = call(endpoint), HostBuffer.make(32)
    assert buffer.fd is not None
    steps = [
        plan_of(Item(Piece("w", Box((0,), (4,))), 24), Take(0, Box((0,), (4,)))),
        Begin(1, 1, "p", "none", "drain", 1.0, partial=False),
    ]
    for step in steps:
        link.send(step)
        assert not isinstance(link.receive(5), Refused)
    link.send(Map((32,)), fds=[buffer.fd])
    assert not isinstance(link.receive(5), Refused)
    for number in (0, 1, -1):
        link.send(Move(1, "p", 0, number, out=False, checked=False))
        assert isinstance(link.receive(5), Refused)
    buffer.close()
    link.close()


def test_buffers_that_are_none_are_refused(endpoint: Endpoint, tmp_path: Path) -> None:
    link, buffer = call(endpoint), HostBuffer.make(32)
    assert buffer.fd is not None
    with (tmp_path / "file").open("wb") as file:
        for message, fds in ((Map((33,)), [buffer.fd]), (Map((8,)), [file.fileno()]), (Map((8, 8)), [buffer.fd])):
            link.send(message, fds=fds)
            assert isinstance(link.receive(5), Refused)
    files = len(list(Path("/proc/self/fd").iterdir()))
    link.send(Describe(), fds=[buffer.fd] * MOST_FDS)  # nobody asked for them
    assert isinstance(link.receive(5), Status)
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    buffer.close()
    link.close()


def test_messages_survive_the_wire() -> None:
    share = Share(3, (Item(Piece("w", Box((0,), (4,))), 64),), (Take(0, Box((1,), (2,))),), (5,), 128)
    for message in (TakePlan("d", (W,), (share,)), Begin(1, 2, "p", "disk", "abort", 0.5, partial=True), Ask(b"\0x")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToWorker) == message
