"""The replica's side of its workers' connections: one thread for each, which notices a worker's end at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from treadle.host.sockets import close_server, listen
from treadle.update.adapters.vllm.engine_messages import Attach, FromVllm, Reply
from treadle.wire.errors import WireError
from treadle.wire.link import HELLO_S, Link, accepting


class Listening:
    """Listens until closed. `answer(worker, pid, message)` returns None or an error; `lose(worker, why)` hears ends."""

    def __init__(
        self, path: Path, answer: Callable[[int, int, FromVllm], str | None], lose: Callable[[int, str], None]
    ) -> None:
        self.path, self._answer, self._lose = path, answer, lose
        self._closing = False
        self._links: set[Link[FromVllm]] = set()
        self._server = listen(path)
        self._thread = threading.Thread(target=self._accept, name="treadle replica", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections; `lose` is not called any more."""
        self._closing = True
        close_server(self._server, self.path)
        self._thread.join()  # the last connection that it accepted is among them
        for link in list(self._links):
            link.shut()

    def _accept(self) -> None:
        for link in accepting(self._server, FromVllm, lambda: self._closing):
            self._links.add(link)
            threading.Thread(target=self._serve, args=(link,), name="treadle line", daemon=True).start()

    def _serve(self, link: Link[FromVllm]) -> None:
        worker, why = -1, ""
        try:
            message = link.receive(HELLO_S)
            if not isinstance(message, Attach):
                raise WireError(f"a line begins with Attach, got {message}")
            worker = message.worker
            while True:
                link.send(Reply(self._answer(worker, link.pid, message)))
                message = link.receive(None)
        except (WireError, OSError) as error:
            why = str(error)
        self._links.discard(link)
        link.close()
        if worker >= 0 and not self._closing:
            self._lose(worker, why)
