"""How updates are done: the same on all update ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from treadle.update.protocol.messages import Close, Rollback
from treadle.weights.buffers import Memory

CompareSources: TypeAlias = Literal["sample", "all", "off"]


@dataclass(frozen=True)
class UpdateOptions:
    """`memory` is for buffers, a device; None: what a GPU has free, 1 GiB on a host.

    `rollback` is where the old version waits until commit: `host` memory, `disk`, or `none`, with which a failed
    attempt leaves workers closed. `close` lets requests end (drain, within `drain_s`) or breaks them off (abort).
    `deadline_s` is for each wait: a bucket, an answer. `checked`: bytes are compared from source to worker.
    `compare_sources`: ranks that have the same piece compare a `sample` of it, `all` of it, or nothing (`off`).
    """

    memory: Memory | None = None
    rollback: Rollback = "host"
    close: Close = "drain"
    drain_s: float = 30.0
    deadline_s: float = 30.0
    checked: bool = True
    compare_sources: CompareSources = "sample"

    def __post_init__(self) -> None:
        if self.rollback not in ("host", "disk", "none"):
            raise ValueError(f"rollback is host, disk or none, got {self.rollback!r}")
        if self.close not in ("drain", "abort"):
            raise ValueError(f"close is drain or abort, got {self.close!r}")
        if self.compare_sources not in ("sample", "all", "off"):
            raise ValueError(f"compare_sources is sample, all or off, got {self.compare_sources!r}")
        if self.deadline_s <= 0 or self.drain_s < 0:
            raise ValueError(f"deadline_s is above 0 and drain_s 0 or more, got {self.deadline_s}, {self.drain_s}")

    @property
    def phase_s(self) -> float:
        """How long ranks may be apart: one may wait for requests to end while another does not."""
        return self.deadline_s + self.drain_s
