"""Number and size of the buffers that a device gets for an update.

Two IPC buffers let one be broadcast into while a worker reloads from the other; with an H2D buffer a source has its
bucket on the device before its turn comes; with a second one it copies the next while broadcasts go on. All are of one
size.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGN = 64
"""Bytes; items and buckets begin at multiples of it, so that any dtype can be viewed in place."""

_WAYS = ((2, 2), (1, 2), (0, 2), (0, 1))
"""H2D and IPC buffers, from what hides most to what takes least."""


def aligned(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Memory:
    """Bytes free on each device (one number: on every one), and what may be made of them.

    `share` of the least is used. Sources send `target_bytes` in turn where that fits, a window: of one source that is a
    bucket. A bucket is not made smaller than `least_bytes`: below that a broadcast is all latency, and fewer buffers
    and fewer sources are better than smaller buckets. `copies` are windows that an engine copies on the device while it
    loads: memory besides the buffers.
    """

    free_bytes: int | tuple[int, ...]
    share: float = 0.9
    target_bytes: int = 1 << 30
    least_bytes: int = 1 << 20
    copies: int = 0

    def __post_init__(self) -> None:
        if not self.free or min(self.free) < 0:
            raise ValueError(f"free_bytes is a number of bytes, or one for each device, got {self.free_bytes}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is above 0 and at most 1, got {self.share}")
        if self.copies < 0:
            raise ValueError(f"copies is a number of buckets, 0 or more, got {self.copies}")
        if not ALIGN <= self.least_bytes <= self.target_bytes:
            raise ValueError(
                f"bytes of a bucket go from least_bytes, {ALIGN} or more, to target_bytes; "
                f"got {self.least_bytes} to {self.target_bytes}"
            )

    @property
    def free(self) -> tuple[int, ...]:
        """For each device that was given, or one for all."""
        return (self.free_bytes,) if isinstance(self.free_bytes, int) else self.free_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes that an update may take on the device with the least memory."""
        return int(min(self.free) * self.share)


@dataclass(frozen=True)
class Spread:
    """How sources share what moves: the bytes of a window, and the most of one that comes from one source."""

    window_bytes: int
    largest_share: float


@dataclass(frozen=True)
class Buffers:
    """`limit_bytes` each, of `window_bytes` of all sources; `notes` say what it fell back to and why."""

    num_h2d: int
    num_ipc: int
    limit_bytes: int
    window_bytes: int
    notes: tuple[str, ...]


def choose_buffers(memory: Memory, largest_load_bytes: int, spread: Spread | None = None) -> Buffers:
    """Choose as many buffers as fit. No bucket is larger than `largest_load_bytes`, the most that one source moves."""
    spread = spread if spread is not None else Spread(memory.target_bytes, 1.0)
    even_bytes = max(memory.least_bytes, min(memory.target_bytes, int(spread.window_bytes * spread.largest_share)))
    wanted = aligned(min(even_bytes, max(1, largest_load_bytes)))
    copied = memory.copies / spread.largest_share
    notes: list[str] = []
    for num_h2d, num_ipc in _WAYS:
        num = num_h2d + num_ipc + copied
        limit = min(wanted, int(memory.usable_bytes / num) // ALIGN * ALIGN)
        # A second H2D buffer is for memory that is left over, not for smaller buckets.
        enough = wanted if num_h2d == 2 else min(wanted, memory.least_bytes)
        if limit >= enough:
            return Buffers(num_h2d, num_ipc, limit, max(limit, int(limit / spread.largest_share)), tuple(notes))
        what = "a second H2D buffer" if num_h2d == 2 else _named(num_h2d, num_ipc)
        beside = f" ({copied:g} of them the engine's copy)" if copied else ""
        usable = _bytes(memory.usable_bytes)
        notes.append(f"no {what}: {num:g} of {_bytes(enough)} each{beside}, {usable} usable on a device")
    raise ValueError(
        f"{min(memory.free)} bytes free, of which {memory.usable_bytes} may be used, are less than one bucket of "
        f"{min(wanted, memory.least_bytes)}{f' and {copied:g} that the engine copies' if copied else ''}; "
        "free memory on the device, or lower least_bytes"
    )


def _named(num_h2d: int, num_ipc: int) -> str:
    return {(1, 2): "H2D buffer", (0, 2): "second IPC buffer", (0, 1): "IPC buffer"}[num_h2d, num_ipc]


def _bytes(size: int) -> str:
    unit, scale = next(
        ((u, s) for u, s in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)) if size >= s), ("B", 1)
    )
    return f"{size / scale:.4g} {unit}"
