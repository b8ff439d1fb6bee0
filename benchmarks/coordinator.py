"""How many update ranks one coordinator can move: `python benchmarks/coordinator.py [ranks]`.

The coordinator of weight updates, on real sockets, with 2,048 ranks that do nothing but agree (all in this process, one
connection each), through the phases of one attempt. What ranks want are TP16 layouts of a hundred tensors.

Then each worker reports once in every third of a lease of 9 s, as fast as they can here, and gets its lease.

The last line is JSON: seconds of each phase, which includes what the ranks' end of it takes here; `report_us`, the
coordinator's processor time for a report and its grant, and `core`, its share of a core at that rate: 683 reports a
second from 2,048 workers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

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
from treadle.update.protocol.update_messages import PROTOCOL, Grant, Hello, Status, WeightLayout
from treadle.weights.layouts import Parallel
from treadle.weights.tensor_boxes import Tensor
from treadle.wire.link import Link
from treadle.wire.listeners import listen_at_path

TP, TENSORS, DEADLINE_S = 16, 100, 60.0
LEASE_S, ROUNDS = 9.0, 3
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


def attempt(path: Path, num: int, coordinator: Coordinator) -> dict[str, float]:
    """All phases, and the reports after them."""
    tensors = tuple(Tensor(f"layers.{i}.w", (4096, 64), "bfloat16") for i in range(TENSORS))
    held = Parallel(tp=TP, replicas=num // TP, dim=lambda name: 0).holding(tensors).pieces
    layouts = [WeightLayout(tensors, pieces) for pieces in held]
    digests = [layout_digest(layout) for layout in layouts[:TP]]
    status = [Status(r, 1, "lapsed", None, 0, 0, can_export=True, incarnation=f"{r:016x}") for r in range(num)]
    ranks = Ranks(path, num)
    try:
        names = [(digests[rank % TP], digests[rank % TP]) for rank in range(num)]
        enter = [Enter(r, Asked("update", 1), *names[r], status[r], 0) for r in range(num)]
        go = ranks.say("enter", enter)[0]
        epoch, log = go.epoch, go.grant.log
        sends = ranks.say("settle", [Report(epoch, "settle", status[rank]) for rank in range(num)])
        both = zip(layouts, sends, strict=True)
        told = [(side if send.has else None, side if send.wants else None) for side, send in both]
        ranks.say("layout", [Report(epoch, "layout", sides=Sides(1 << 30, *told[rank])) for rank in range(num)])
        for phase in AGREED:
            ranks.say(phase, [Report(epoch, phase)] * num)
        serving = {"state": "serving", "version": 1, "epoch": epoch, "log": log, "origin": log, "content": epoch}
        return ranks.seconds | reports(ranks, [replace(each, **serving) for each in status], coordinator)
    finally:
        for link in ranks.links:
            link.close()


def reports(ranks: Ranks, status: list[Status], coordinator: Coordinator) -> dict[str, float]:
    """What the coordinator's thread takes for reports."""
    assert coordinator._thread.ident is not None
    clock = time.pthread_getcpuclockid(coordinator._thread.ident)
    before = time.clock_gettime(clock)
    for _ in range(ROUNDS):
        for link, each in zip(ranks.links, status, strict=True):
            link.send(each)
        for link in ranks.links:
            assert isinstance(link.receive(DEADLINE_S), Grant)
    took_s = (time.clock_gettime(clock) - before) / (ROUNDS * len(status))
    return {"report_us": round(took_s * 1e6, 1), "core": round(took_s * len(status) / (LEASE_S / 3), 4)}


def main() -> None:
    """One attempt."""
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    if num % TP:
        sys.exit(f"ranks come in replicas of {TP}, got {num}")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        listener = listen_at_path(place / "c.sock", ToCoordinator, expected=num)
        coordinator = Coordinator(
            listener, CommitLog(place / "ledger"), num, UpdateOptions(deadline_s=DEADLINE_S, drain_s=0, lease_s=LEASE_S)
        )
        try:
            print(json.dumps({"ranks": num, **attempt(place / "c.sock", num, coordinator)}))
        finally:
            coordinator.close()


if __name__ == "__main__":
    main()
