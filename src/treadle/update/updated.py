"""The result of an update that committed, as `Updater.update` and `Updater.recover` return it."""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.update.rank.bucket_loop import BucketTimes
from treadle.update.rank.shares import Shares


@dataclass(frozen=True)
class Updated:
    """An attempt that committed, as one rank saw it."""

    version: int
    """The version that all workers serve now."""
    epoch: int
    """The attempt's number. Numbers grow; those of failed attempts are not used again."""
    size_bytes: int
    """Bytes sent, those of a broadcast counted once; of changed elements as encoded; 0 where nothing had to move."""
    rollback_bytes: int
    """Bytes of the rollback copy that this rank's worker held until commit."""
    rollbacks: int
    """How often this rank's worker has gone back to an old version since it started."""
    seconds: dict[str, float]
    """Elapsed time by phase, and `total`."""
    notes: tuple[str, ...]
    """What the plan left out for want of memory, why all tensors or elements moved, which workers left the set,
    and whether weights on a device went through the host."""
    shares: Shares | None = field(repr=False, default=None)
    """The plan; None where nothing moved."""
    times: BucketTimes | None = field(repr=False, default=None)
    """When this rank's copies, broadcasts and reloads ran; `Updater.trace` puts those of all ranks together."""
