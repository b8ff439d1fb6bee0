"""How many update ranks one coordinator can move: `python benchmarks/coordinator.py [ranks]`.

The coordinator of weight updates, on real sockets, with 2,048 ranks that do nothing but agree (all in this process, one
connection each), through the phases of one attempt. What ranks want are TP16 layouts of a hundred tensors.

The last line is JSON: seconds of each phase, which includes what the ranks' end of it takes here.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from treadle.host.sockets import connect
from treadle.update import UpdateOptions
from treadle.update.coordinator.commit_log import CommitLog
from treadle.update.coordinator.coordinator_thread import Coordinator
from treadle.update.protocol.catalogue import layout_digest
from treadle.update.protocol.control import (
    Asked,
    Enter,
    FromCoordinator,
    Phase,
    Report,
    Sides,
    ToCoordinator,
)
from treadle.update.protocol.update_messages import PROTOCOL, Hello, Status, WeightLayout
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Tensor
from treadle.wire.link import Link
from treadle.wire.listeners import listen_at_path

TP, TENSORS, DEADLINE_S = 16, 100, 60.0
AGREED: tuple[Phase, ...] = ("plan", "begin", "finish", "open")


class Ranks:
    """All of them. `say` sends each its own message and gives what each hears then; `seconds` are of these."""

    def __init__(self, path: Path, num: int) -> None:
        self.links: list[Link[Any]] = [Link(connect(path), FromCoordinator) for _ in range(num)]
        self.seconds: dict[str, float] = {}
        for rank, link in enumerate(self.links):
            link.trust()
            link.send(Hello(PROTOCOL, "join", rank, num, 1, "here"))
        for link in self.links:
            link.receive(DEADLINE_S)  # it has joined

    def say(self, phase: Phase, messages: list[Any]) -> list[Any]:
        """One phase."""
        begun = time.perf_counter()
        for link, message in zip(self.links, messages, strict=True):
            link.send(message)
        heard = [link.receive(DEADLINE_S) for link in self.links]
        self.seconds[phase] = round(time.perf_counter() - begun, 2)
        return heard


def attempt(path: Path, num: int) -> dict[str, float]:
    """All phases; seconds of each."""
    tensors = tuple(Tensor(f"layers.{i}.w", (4096, 64), "bfloat16") for i in range(TENSORS))
    held = Parallel(tp=TP, replicas=num // TP, dim=lambda name: 0).holding(tensors).pieces
    layouts = [WeightLayout(tensors, pieces) for pieces in held]
    digests = [layout_digest(layout) for layout in layouts[:TP]]
    status = [Status(rank, 1, "lapsed", None, 0, 0, can_export=True) for rank in range(num)]
    ranks = Ranks(path, num)
    try:
        names = [(digests[rank % TP], digests[rank % TP]) for rank in range(num)]
        enter = [Enter(r, Asked("update", 1), *names[r], status[r], 0) for r in range(num)]
        epoch = ranks.say("enter", enter)[0].epoch
        sends = ranks.say("settle", [Report(epoch, "settle", status[rank]) for rank in range(num)])
        both = zip(layouts, sends, strict=True)
        told = [(side if send.has else None, side if send.wants else None) for side, send in both]
        ranks.say("layout", [Report(epoch, "layout", sides=Sides(1 << 30, *told[rank])) for rank in range(num)])
        for phase in AGREED:
            ranks.say(phase, [Report(epoch, phase)] * num)
    finally:
        for link in ranks.links:
            link.close()
    return ranks.seconds


def main() -> None:
    """One attempt."""
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    if num % TP:
        sys.exit(f"ranks come in replicas of {TP}, got {num}")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        listener = listen_at_path(place / "c.sock", ToCoordinator, expected=num)
        coordinator = Coordinator(
            listener, CommitLog(place / "ledger"), num, UpdateOptions(deadline_s=DEADLINE_S, drain_s=0)
        )
        try:
            print(json.dumps({"ranks": num, **attempt(place / "c.sock", num)}))
        finally:
            coordinator.close()


if __name__ == "__main__":
    main()
