"""The replica's side of its workers' connections: one thread for each, which notices a worker's end at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.update.adapters.vllm.engine_messages import Attach, FromVllm, Reply
from treadle.wire.errors import WireError
from treadle.wire.link import Link
from treadle.wire.listeners import HELLO_S, LinkThreads, listen_at_path


class Listening:
    """Listens until closed. `answer(worker, pid, message)` returns None or an error; `lose(worker, why)` hears ends."""

    def __init__(
        self, path: Path, answer: Callable[[int, int, FromVllm], str | None], lose: Callable[[int, str], None]
    ) -> None:
        self._answer, self._lose = answer, lose
        self._listener = listen_at_path(path, FromVllm)
        self._links = LinkThreads(self._listener, self._serve, "treadle replica")

    def close(self) -> None:
        """Close all connections; `lose` is not called any more."""
        self._links.close()

    def _serve(self, link: Link[FromVllm]) -> None:
        worker = -1
        try:
            message = link.receive(HELLO_S)
            if not isinstance(message, Attach) or not self._listener.discard(link):
                raise WireError(f"a line begins with Attach, got {message}")
            worker = message.worker
            while True:
                link.send(Reply(self._answer(worker, link.pid, message)))
                message = link.receive(None)
        except (WireError, OSError) as error:
            if worker >= 0 and not self._listener.closed:
                self._lose(worker, str(error))
            raise
