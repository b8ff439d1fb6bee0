"""Inference workers in processes of their own, for tests of weight updates, and clients that ask them."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tests.support import devices
from tests.support.patience import PATIENT_S
from tests.support.rank_pool import server
from treadle.host.sockets import connect
from treadle.update import Endpoint, Plain
from treadle.update.adapters.plain import digest_of
from treadle.update.protocol.update_messages import (
    PROTOCOL,
    Answer,
    Ask,
    Describe,
    FromWorker,
    Hello,
    Refused,
    Status,
    WeightLayout,
)
from treadle.update.worker.arrived_boxes import Arrival
from treadle.update.worker.endpoint import worker_path
from treadle.weights.tensor_boxes import Holding
from treadle.wire.errors import PeerGoneError
from treadle.wire.link import Link


@dataclass(frozen=True)
class Trouble:
    """A fault that a worker's engine commits at the `at`-th call of a method, once."""

    act: str
    method: str
    at: int = 0
    hang_s: float = 60.0


class Troubled(Plain):
    """A plain engine with faults."""

    trouble: Trouble | None = None
    endpoint: Endpoint | None = None
    calls: int = 0
    marks: Path | None = None

    def _meet(self, method: str) -> str | None:
        trouble = self.trouble
        if trouble is None or trouble.method != method:
            return None
        self.calls += 1
        if self.calls <= trouble.at:
            return None
        self.trouble = None
        if self.marks is not None:
            self.marks.write_text(str(time.monotonic()))
        if trouble.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trouble.act == "hang":
            time.sleep(trouble.hang_s)
        elif trouble.act == "socket":
            assert self.endpoint is not None
            for link in list(self.endpoint._links.links):
                link.shut()
        else:
            raise RuntimeError(f"trouble in {method}")
        return None

    def layout(self) -> WeightLayout:
        self._meet("layout")
        return super().layout()

    def close(self, how: str, deadline_s: float) -> str | None:
        return self._meet("close") or super().close(how, deadline_s)

    def begin(self) -> str | None:
        return self._meet("begin") or super().begin()

    def load(self, arrivals: Sequence[Arrival]) -> str | None:
        trouble = self.trouble
        if trouble is not None and trouble.act == "tear" and self.calls >= trouble.at:
            super().load(list(arrivals)[: len(arrivals) // 2])
        return self._meet("load") or super().load(arrivals)

    def finish(self) -> str | None:
        return self._meet("finish") or super().finish()

    def invalidate(self) -> str | None:
        return self._meet("invalidate") or super().invalidate()

    def open(self, version: int) -> str | None:
        return self._meet("open") or super().open(version)


def zeros(want: Holding, worker: int, kind: type[Plain] = Plain) -> Plain:
    """A worker's tensors before the first update."""
    held, boxes = {}, {}
    for piece in want.pieces[worker]:
        dtype = getattr(torch, want.tensors[piece.tensor].dtype)
        held[piece.tensor] = torch.zeros(piece.box.shape, dtype=dtype)
        boxes[piece.tensor] = piece.box
    return kind(held, tensors=want.tensors, boxes=boxes)


def _worker_main(directory: Path, worker: int, want: Holding, kind: type[Troubled], pipe: Connection) -> None:
    torch.set_num_threads(1)
    devices.enter(worker)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    adapter = zeros(want, worker, kind)
    assert isinstance(adapter, Troubled)

    def answer(body: bytes) -> tuple[int, bytes]:
        with adapter.serving() as version:
            return version, digest_of(adapter.held).encode()

    with Endpoint(adapter, directory, worker, answer=answer, spill=directory) as endpoint:
        adapter.endpoint = endpoint
        pipe.send("up")
        with suppress(EOFError):
            while True:
                order = pipe.recv()
                if isinstance(order, Trouble):
                    adapter.trouble, adapter.calls = order, 0
                    pipe.send("ok")
                elif order == "memory":
                    pipe.send(resident_bytes())
                else:
                    pipe.send(order(adapter))


def resident_bytes() -> tuple[int, int]:
    """Bytes resident in this process: private, and shared with others."""
    fields = Path("/proc/self/statm").read_text().split()
    page = os.sysconf("SC_PAGE_SIZE")
    return (int(fields[1]) - int(fields[2])) * page, int(fields[2]) * page


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


class Workers:
    """Worker processes of one set, each of which can be started again."""

    def __init__(self, want: Holding, kind: type[Troubled] = Troubled) -> None:
        self.want, self.kind = want, kind
        self.directory = Path(tempfile.mkdtemp(prefix="treadle-u"))
        self.directory.chmod(0o700)
        self.sockets, self.ledger = self.directory / "s", self.directory / "l"
        self.sockets.mkdir(mode=0o700)
        self.processes: dict[int, ForkServerProcess] = {}
        self.pipes: dict[int, Connection] = {}
        for worker in range(len(want.pieces)):
            self.start(worker)
        for worker in self.pipes:
            self.await_up(worker)

    def start(self, worker: int) -> None:
        context = server()
        self.pipes[worker], theirs = context.Pipe()
        args = (self.sockets, worker, self.want, self.kind, theirs)
        self.processes[worker] = context.Process(target=_worker_main, args=args, daemon=True)
        self.processes[worker].start()
        theirs.close()

    def await_up(self, worker: int) -> None:
        assert self.pipes[worker].poll(PATIENT_S)
        assert self.pipes[worker].recv() == "up"

    def restart(self, worker: int) -> None:
        self.kill(worker)
        self.start(worker)
        self.await_up(worker)

    def kill(self, worker: int) -> None:
        self.processes[worker].kill()
        self.processes[worker].join()
        self.pipes[worker].close()

    def tell(self, worker: int, order: Trouble | str | Callable[[Troubled], Any]) -> Any:
        """Have a worker do something and return the answer; `order` must be importable."""
        self.pipes[worker].send(order)
        assert self.pipes[worker].poll(PATIENT_S)
        return self.pipes[worker].recv()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self.processes:
            self.kill(worker)
        shutil.rmtree(self.directory)


class Spawned:
    """Worker processes that serve whatever `serve(sockets, worker, *args)` makes."""

    def __init__(self, num: int, serve: Callable[..., Endpoint], *args: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="treadle-u"))
        self.sockets, self.ledger = self.directory / "s", self.directory / "l"
        self.sockets.mkdir(mode=0o700)
        self._serve, self._args = serve, args
        self.processes: dict[int, ForkServerProcess] = {}
        for pipe in [self._start(worker) for worker in range(num)]:
            _await_up(pipe)

    def _start(self, worker: int) -> Connection:
        context = server()
        pipe, theirs = context.Pipe()
        args = (self._serve, self.sockets, worker, self._args, theirs)
        self.processes[worker] = context.Process(target=_spawned_main, args=args, daemon=True)
        self.processes[worker].start()
        theirs.close()
        return pipe

    def restart(self, worker: int) -> None:
        """Kill a worker's process and start another in its place."""
        self.processes[worker].kill()
        self.processes[worker].join()
        _await_up(self._start(worker))

    def __enter__(self) -> Spawned:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        shutil.rmtree(self.directory)


def _await_up(pipe: Connection) -> None:
    assert pipe.poll(PATIENT_S)
    assert pipe.recv() == "up"


def _spawned_main(
    serve: Callable[..., Endpoint], sockets: Path, worker: int, args: tuple[Any, ...], pipe: Connection
) -> None:
    torch.set_num_threads(1)
    devices.enter(worker)
    with serve(sockets, worker, *args):
        pipe.send("up")
        _end_with_parent()


class Asker:
    """Asks one worker from outside."""

    def __init__(self, directory: Path, worker: int) -> None:
        self.link: Link[FromWorker] = Link(connect(worker_path(directory, worker)), FromWorker)
        self.link.send(Hello(PROTOCOL, "ask"))
        assert isinstance(self.link.receive(10), Status)
        self.link.trust()

    def ask(self) -> Answer | Refused:
        self.link.send(Ask(b""))
        answer = self.link.receive(30)
        assert isinstance(answer, Answer | Refused)
        return answer

    def status(self) -> Status:
        self.link.send(Describe())
        status = self.link.receive(30)
        assert isinstance(status, Status)
        return status

    def close(self) -> None:
        self.link.close()


def ask_once(directory: Path, worker: int) -> Answer | Refused | None:
    """Ask once; None where nobody listens."""
    try:
        asker = Asker(directory, worker)
    except OSError:
        return None
    try:
        return asker.ask()
    except (PeerGoneError, TimeoutError):
        return None
    finally:
        asker.close()
