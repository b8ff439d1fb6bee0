"""Asks a worker from another process of the same user; for examples, canaries and tests."""

from __future__ import annotations

from pathlib import Path

from treadle.host.sockets import connect
from treadle.update.protocol.update_messages import PROTOCOL, Answer, Ask, FromWorker, Hello, Refused, Status
from treadle.update.worker.endpoint import MOST_ASK_BYTES, worker_path
from treadle.update.worker.gate import ClosedError
from treadle.wire.errors import WireError
from treadle.wire.link import Link


def ask(directory: Path, worker: int, body: bytes, deadline_s: float = 30.0) -> tuple[int, bytes]:
    """The version that answered, and the answer. Raises ClosedError at a closed gate, RuntimeError on failure."""
    if len(body) > MOST_ASK_BYTES:
        raise ValueError(f"a question has up to {MOST_ASK_BYTES} bytes, got {len(body)}")
    link: Link[FromWorker] = Link(connect(worker_path(directory, worker)), FromWorker)
    try:
        link.trust()
        link.send(Hello(PROTOCOL, "ask"))
        answer = link.receive(deadline_s)
        if isinstance(answer, Status):
            link.send(Ask(body))
            answer = link.receive(deadline_s)
    finally:
        link.close()
    if isinstance(answer, Answer):
        return answer.version, answer.body
    if not isinstance(answer, Refused):
        raise WireError(f"{type(answer).__name__} came where an answer was expected")
    if answer.code == "closed":
        raise ClosedError(answer.text)
    raise RuntimeError(f"worker {worker}: {answer.text}")
