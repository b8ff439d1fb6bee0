"""An update rank without weights, in a process beside an inference worker: `python -m treadle.update.beside`.

Rank 0 of a world writes what is to be done to the world's store, and the ranks beside workers take part:

    set-up      how updates are done
    order 1     the version of the first update
    order 2     ...

A rank ends when the store does, when its parent closes its stdin, or when it has lost the coordinator.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore

from treadle.dist.rank_world import RankWorld
from treadle.update.errors import UpdateError
from treadle.update.update_options import UpdateOptions
from treadle.update.updater import Updater

_PREFIX = "treadle/update/beside"
_SETUP = "set-up"
_LONG = timedelta(days=365)


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank beside a worker finds the others, and its number among them."""

    address: str
    port: int
    rank: int
    size: int
    key: str | None = None


class UpdateSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How updates are done, the same on all ranks."""

    options: UpdateOptions
    takeover: bool = False


class Orders:
    """Set-up and versions in the store of a world; rank 0 writes them, all others read them in the same order."""

    def __init__(self, world: RankWorld) -> None:
        self._store = PrefixStore(_PREFIX, world.store)
        self._number = 0

    def set_up(self, setup: UpdateSetup) -> None:
        """Write the set-up, once."""
        self._store.set(_SETUP, msgspec.json.encode(setup).decode())

    def read_setup(self) -> UpdateSetup:
        """Wait for the set-up."""
        return msgspec.json.decode(self._store.get(_SETUP), type=UpdateSetup)

    def announce(self, version: int) -> None:
        """Order the next update."""
        self._number += 1
        self._store.set(f"order {self._number}", str(version))

    def next(self) -> int:
        """Wait, however long, for the next update, and return its version."""
        self._number += 1
        key = f"order {self._number}"
        self._store.wait([key], _LONG)
        return int(self._store.get(key))


def start_beside(seat: Seat, directory: Path, worker: int, device: torch.device | None) -> subprocess.Popen[bytes]:
    """Start the rank of a worker. It ends with this process, or with `stop_beside`."""
    words = [msgspec.json.encode(seat).decode(), str(directory), str(worker), str(device) if device is not None else ""]
    return subprocess.Popen([sys.executable, "-m", "treadle.update.beside", *words], stdin=subprocess.PIPE)


def stop_beside(process: subprocess.Popen[bytes]) -> None:
    """End a rank; the worker goes on serving."""
    assert process.stdin is not None
    process.stdin.close()
    process.kill()
    process.wait()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> int:
    """Take part in updates until the store ends."""
    seat, (directory, worker, device) = msgspec.json.decode(sys.argv[1], type=Seat), sys.argv[2:]
    threading.Thread(target=_end_with_parent, name="treadle parent", daemon=True).start()
    torch.set_num_threads(1)
    world = RankWorld.join(seat.address, seat.port, seat.rank, seat.size)
    orders = Orders(world)
    setup = orders.read_setup()
    with Updater(
        Path(directory),
        ledger=Path(directory) / "ledger",  # rank 0 has the log
        worker=int(worker),
        key=Path(seat.key) if seat.key is not None else None,
        options=setup.options,
        device=torch.device(device) if device else None,
        takeover=setup.takeover,
        world=world,
    ) as updater:
        while not updater.context.coordinator.lost:
            try:
                version = orders.next()
            except Exception:  # stores raise various types: rank 0 has ended
                return 0
            with suppress(UpdateError):  # rank 0 raises it, too, and its caller decides
                updater.update(None, version)
    return 1


if __name__ == "__main__":
    sys.exit(main())
