"""A worker's connection to its engine's process, which alone can hold requests and reset caches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from treadle.host.sockets import connect
from treadle.update.adapters.vllm.engine_messages import Attach, Reply
from treadle.wire.errors import PeerGoneError, WireError
from treadle.wire.link import Link


def replica_path(directory: Path, first: int) -> Path:
    """Return the socket of the replica whose first worker has this number."""
    return directory / f"replica-{first}.sock"


class Line:
    """Asks the replica, one thread at a time. Errors are returned, not raised, except in the constructor."""

    def __init__(self, path: Path, worker: int, deadline_s: float = 30.0) -> None:
        self.path, self.worker = path, worker
        self._link: Link[Reply] = Link(connect(path), Reply)
        error = self.ask(Attach(worker, os.getppid()), deadline_s)
        if error is not None:
            raise ConnectionRefusedError(error)

    def ask(self, message: Any, deadline_s: float) -> str | None:
        """Send a message and wait for its Reply; None, or what went wrong."""
        try:
            self._link.send(message)
            return self._link.receive(deadline_s).error
        except TimeoutError:
            self._link.shut()  # a late answer would be taken for that to the next question
            return f"the engine's process did not answer {type(message).__name__} within {deadline_s:g} s"
        except (PeerGoneError, WireError, OSError) as error:
            return f"the line to the engine's process is lost: {error}; start the engine again"

    def close(self) -> None:
        """Close the connection; the replica takes that for the end of this worker."""
        self._link.close()
