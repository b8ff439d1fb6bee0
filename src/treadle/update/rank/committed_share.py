"""What this rank has sent of the committed version: a copy in host memory, against which changed elements are found.

An attempt notes what it sends: changed elements where the copy is of the same plan, else whole buckets. The log decides
whether they enter the copy, at the next attempt if not before. After an attempt that failed the copy is what was
committed, not what was sent last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from treadle.update.memory.changed_elements import ElementRun, encode, patch


@dataclass
class _Sent:
    """Bytes of buckets by number, sent by attempt `epoch` of a log under a plan: whole ones, or `deltas`."""

    log: str
    epoch: int
    plan: str
    deltas: bool = False
    buckets: dict[int, torch.Tensor] = field(default_factory=dict)


class CommittedShare:
    """One rank's copy. Buckets are noted by one thread."""

    def __init__(self) -> None:
        self._copy: _Sent | None = None
        self._sent: _Sent | None = None

    def settle(self, log: str, epochs: Collection[int]) -> None:
        """Learn which attempts of which log committed the version that is served now."""
        sent, self._sent = self._sent, None
        if sent is not None and sent.log == log and sent.epoch in epochs:
            if sent.deltas:
                assert self._copy is not None
                for number, stream in sent.buckets.items():
                    patch(self._copy.buckets[number], stream)
                self._copy.epoch = sent.epoch
            else:
                self._copy = sent
        if self._copy is not None and (self._copy.log != log or self._copy.epoch not in epochs):
            self._copy = None

    def holds(self, plan: str) -> bool:
        """Return whether the copy is of this plan."""
        return self._copy is not None and self._copy.plan == plan

    def begin(self, log: str, epoch: int, plan: str) -> None:
        """Begin to note an attempt. A copy of another plan is dropped."""
        if not self.holds(plan):
            self._copy = None
        self._sent = _Sent(log, epoch, plan, deltas=self._copy is not None)

    def note(self, number: int, packed: torch.Tensor, runs: Sequence[ElementRun]) -> torch.Tensor:
        """Note a bucket as it is sent; return its changed elements, or all of it where there is no copy."""
        assert self._sent is not None
        if self._sent.deltas:
            assert self._copy is not None
            noted = encode(self._copy.buckets[number], packed, runs)
        else:
            noted = packed.clone()
        self._sent.buckets[number] = noted
        return noted

    def drop(self) -> None:
        """Forget everything: the copy is not what workers hold."""
        self._copy = self._sent = None
