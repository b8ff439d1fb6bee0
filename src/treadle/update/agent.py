"""An agent: an update rank beside an inference worker, which joins the ranks that call for updates, and leaves.

    treadle agent --to /run/engine --worker 3 --at trainer-0:29600

It takes part in each update that is called, and in the recoveries that the coordinator begins among agents where a
worker does not serve what is committed. It looks for the ranks at that address until they are there; where they are
gone it does so again. The worker serves meanwhile, as long as its lease lasts.

`python -m treadle.update.agent` is one that ends with the process that started it, for `start_agent`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from treadle.dist.rank_world import RankWorld
from treadle.update.errors import UpdateError
from treadle.update.rank.rendezvous import newest_contact
from treadle.update.updater import Updater
from treadle.wire.errors import WireError

LOOK_S = 1.0
"""Seconds between two looks at the worker, and between two calls at an address where nobody is."""

JOIN_S = 10.0
"""Seconds in which ranks that are there answer."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks that call for updates are: the store that their rank 0 opened, and the key of all."""

    address: str
    port: int
    key: str | None = None

    def is_open(self) -> bool:
        """Return whether anybody listens there."""
        try:
            socket.create_connection((self.address, self.port), timeout=JOIN_S).close()
        except OSError:
            return False
        return True


class Agent:
    """Speaks for one worker until it is closed. `say` is called with a line for people when something changes."""

    def __init__(
        self,
        directory: Path,
        worker: int,
        meeting: Meeting,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.directory, self.worker, self.meeting, self._say = directory, worker, meeting, say
        self._over = threading.Event()
        self._said = ""

    def close(self) -> None:
        """End `run` within about a second, after the attempt under way. From any thread."""
        self._over.set()

    def run(self) -> None:
        """Take part until the agent is closed."""
        at = f"{self.meeting.address}:{self.meeting.port}"
        while not self._over.is_set():
            if not self.meeting.is_open():
                self._tell(f"worker {self.worker}: waits for update ranks at {at}")
            else:
                try:
                    self._attend()
                    self._tell(f"worker {self.worker}: the update ranks at {at} are gone")
                except Exception as error:  # stores raise various types, when rank 0 ends
                    self._tell(f"worker {self.worker}: {error}")
            self._over.wait(LOOK_S)

    def _attend(self) -> None:
        """Take part until the coordinator is gone."""
        with self._join() as updater:
            self._tell(f"worker {self.worker}: joined as update rank {updater.rank}")
            coordinator = updater.context.coordinator
            while not self._over.is_set() and not coordinator.lost:
                with suppress(UpdateError, WireError, OSError):  # the callers raise it, and decide what follows
                    done = updater.attend(LOOK_S)
                    if done is not None:
                        self._tell(f"worker {self.worker}: version {done.version}")
                        continue
                if not coordinator.lost and updater.options.lease_s is None:  # else the lease's keeper reports
                    with suppress(UpdateError, WireError, OSError):  # the worker is away, or busy
                        updater.report()

    def _join(self) -> Updater:
        meeting = self.meeting
        world = RankWorld.join(meeting.address, meeting.port, -1, 0, JOIN_S)
        contact = newest_contact(world.store, JOIN_S)
        if contact.error:
            raise RuntimeError(f"update rank 0 could not start its coordinator: {contact.error}")
        return Updater(
            self.directory,
            worker=self.worker,
            key=Path(meeting.key) if meeting.key is not None else None,
            options=contact.options,
            world=RankWorld(world.store, contact.world + self.worker, contact.world),
        )

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)


def start_agent(meeting: Meeting, directory: Path, worker: int) -> subprocess.Popen[bytes]:
    """Start a worker's agent. It ends with this process, or with `stop_agent`."""
    place = str(directory), str(worker)
    command = [sys.executable, "-m", "treadle.update.agent", msgspec.json.encode(meeting).decode(), *place]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def stop_agent(process: subprocess.Popen[bytes]) -> None:
    """End an agent; the worker goes on serving."""
    assert process.stdin is not None
    process.stdin.close()
    process.kill()
    process.wait()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Be the agent that `start_agent` describes."""
    meeting, (directory, worker) = msgspec.json.decode(sys.argv[1], type=Meeting), sys.argv[2:]
    threading.Thread(target=_end_with_parent, name="treadle parent", daemon=True).start()
    torch.set_num_threads(1)
    Agent(Path(directory), int(worker), meeting).run()


if __name__ == "__main__":
    main()
