"""Update ranks that a command starts on this host, one for each worker: for one update, or for one after the other.

Ranks that stay get a checkpoint and its version as a line of JSON on standard input, a socket, and answer with a byte
once it is committed. After a failure they end: the next update is by new ones.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RANK, WORLD = "RANK", "WORLD_SIZE"

ORDERS = "-"
"""In place of a checkpoint's directory: they come on standard input."""


def workers_at(target: Path) -> list[Path]:
    """Return the sockets of an engine's workers. Raises ValueError where there are none."""
    workers = sorted(target.glob("worker-*.sock"))
    if not workers:
        raise ValueError(f"{target} has no sockets of workers; is the engine running, and is this its directory?")
    return workers


class UpdateRanks:
    """Processes of this very command, as ranks of one process group.

    `inputs`: their ends of sockets, on which orders come; such ranks have sessions of their own, so that signals of a
    terminal do not reach them.
    """

    def __init__(self, num: int, arguments: Sequence[str], inputs: Sequence[socket.socket] = ()) -> None:
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # nobody can take its port
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num):
            port = str(self._store.port)
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            place |= {RANK: str(rank), WORLD: str(num)}
            how: dict[str, Any] = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            if inputs:
                how |= {"stdin": inputs[rank], "start_new_session": True}
            command = [sys.executable, sys.argv[0], *arguments]
            environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **place}
            self._processes.append(subprocess.Popen(command, env=environment, **how))

    def wait(self) -> int:
        """Wait for their end; the worst exit code. An interrupt ends them."""
        try:
            return max(abs(process.wait()) for process in self._processes)
        finally:
            self.kill()

    def kill(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()


class StayingRanks:
    """Ranks that update to one checkpoint after the other, until they are closed. They are started at the first one."""

    def __init__(self, target: Path, arguments: Sequence[str]) -> None:
        self.target, self._arguments = target, [*arguments, "--from", ORDERS]
        self._workers: list[Path] = []
        self._links: list[socket.socket] = []
        self._ranks: UpdateRanks | None = None

    def update(self, checkpoint: Path, version: int) -> int:
        """Update to a checkpoint; 0 if its version was committed, else the worst exit code."""
        workers = workers_at(self.target)
        if self._ranks is None or workers != self._workers:
            self.close()
            self._start(workers)
        order = json.dumps([str(checkpoint), version]).encode() + b"\n"
        for link in self._links:
            with suppress(OSError):  # it has ended, and has no answer
                link.sendall(order)
        if all(_is_done(link) for link in self._links):
            return 0
        return self.close() or 1

    def _start(self, workers: list[Path]) -> None:
        pairs = [socket.socketpair() for _ in workers]
        self._workers, self._links = workers, [own for own, _ in pairs]
        self._ranks = UpdateRanks(len(workers), self._arguments, [theirs for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()

    def close(self) -> int:
        """Have the ranks end, when an update under way has; the worst exit code."""
        for link in self._links:
            link.close()
        ranks, self._ranks, self._links = self._ranks, None, []
        return ranks.wait() if ranks is not None else 0

    def kill(self) -> None:
        """End the ranks at once."""
        if self._ranks is not None:
            self._ranks.kill()


def _is_done(link: socket.socket) -> bool:
    """Wait for a rank's answer, or its end."""
    try:
        return bool(link.recv(1))
    except OSError:
        return False


def orders() -> Iterator[tuple[Path, int]]:
    """Yield checkpoints and versions, as a rank that stays; whoever asks for the next one is done with the one before.

    They end with the process that gives them.
    """
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as link, link.makefile() as lines:
        for line in lines:
            path, version = json.loads(line)
            yield Path(path), version
            link.sendall(b"y")
