"""Removes shared memory that vLLM's processes leave in /dev/shm, after a kill and even after a normal shutdown.

The names that each process has mapped are noted in a file when it joins, so that the next replica at the same place can
remove them even after this replica was killed.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from treadle.host.processes import ended

_NAMED = re.compile(r" (/dev/shm/(?:psm_|sem\.mp-|vllm_dist_|torch_\d)[^/\n]+)$", re.MULTILINE)
"""Names that multiprocessing, vLLM and torch give. Other files there are the user's: checkpoints, say."""


def named_memory(pid: int) -> tuple[str, ...]:
    """Paths of the shared memory that a process has mapped, as far as its libraries made it."""
    try:
        mapped = set(_NAMED.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return ()
    return tuple(sorted(name for name in mapped if not name.endswith(" (deleted)")))


class _Note(msgspec.Struct):
    pids: list[int]
    names: list[str]


class Leftovers:
    """The shared memory of one replica's processes, noted in the file `path`. Workers may join concurrently."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._one = threading.Lock()
        self._note = _Note([], [])
        if path.exists():
            with suppress(msgspec.DecodeError):  # a torn note is no reason not to start
                self._note = msgspec.json.decode(path.read_bytes(), type=_Note)
            self.sweep(0.0)

    @property
    def pids(self) -> list[int]:
        """Processes whose memory is noted, in order."""
        return list(self._note.pids)

    def add(self, worker_pid: int, parent_pid: int) -> None:
        """Note a worker, and the process that started it: vLLM's engine core, or this one."""
        pids = {worker_pid, parent_pid} - {os.getpid()}
        names = {name for one in pids for name in named_memory(one)}
        with self._one:
            self._note = _Note(sorted({*self._note.pids, *pids}), sorted({*self._note.names, *names}))
            part = self.path.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(self._note))
            part.rename(self.path)

    def sweep(self, deadline_s: float) -> None:
        """Remove the memory once all processes have ended; after `deadline_s` leave it to those that live."""
        until = time.monotonic() + deadline_s
        while not all(map(ended, self._note.pids)):
            if time.monotonic() >= until:
                return
            time.sleep(0.05)
        with self._one:
            for name in self._note.names:
                Path(name).unlink(missing_ok=True)
            self._note = _Note([], [])
            self.path.unlink(missing_ok=True)
