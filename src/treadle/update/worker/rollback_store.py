"""Storage for a rollback copy: host memory or a file. It stays allocated for the next update."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from treadle.host.free_memory import available_bytes, unused_bytes
from treadle.update.memory.box_columns import BoxColumns
from treadle.update.memory.copying import copy
from treadle.update.worker.arrived_boxes import Arrival, Leaving, StagedArrivals, StagedColumns

_PIECE_BYTES = 16 << 20
_TAKERS = 16
"""Workers of a host that may take a piece at once, after all have seen the same bytes unused."""


class RollbackStore:
    """Boxes of tensors in one allocation. `where` is None for host memory, else a directory for a file."""

    def __init__(self, where: Path | None) -> None:
        self.where = where
        self.boxes: BoxColumns | None = None
        """What is held, None where nothing is."""
        self._raw = _in_memory(0)

    def reserve(self, boxes: BoxColumns) -> str | None:
        """Make room for exactly these boxes, dropping what was held; None, or why there is no room.

        The present allocation is used again where it suffices. Another one is written to piece by piece, so that what
        one worker of a host has taken is seen by the others before they take more.
        """
        self.boxes, need = None, boxes.end_bytes
        if need > len(self._raw):
            refusal = self._refusal(need - len(self._raw))
            if refusal is not None:
                return refusal
            self._raw = _in_memory(0)
            try:
                self._raw = _in_memory(need) if self.where is None else on_disk(self.where, need)
                refusal = self._take_pages() if self.where is None else None
            except (OSError, MemoryError) as error:
                what = "host memory" if self.where is None else f"disk in {self.where}"
                why = error.strerror if isinstance(error, OSError) else "out of memory"
                return f"the old version needs {need} bytes of {what} until commit: {why}; {self._instead}"
            if refusal is not None:
                self._raw = _in_memory(0)
                return refusal
        self.boxes = boxes
        return None

    def _take_pages(self) -> str | None:
        """Write to each page; None, or why there is no room for them all. Allocating takes none yet."""
        need = len(self._raw)
        for taken in range(0, need, _PIECE_BYTES):
            piece, unused = self._raw[taken : taken + _PIECE_BYTES], unused_bytes()
            if unused is not None and unused < len(piece) * _TAKERS:
                return (
                    f"the old version needs {need} bytes of host memory until commit; when {taken} were taken, "
                    f"{unused} were left on the host, or of its control group's limit, to all workers; {self._instead}"
                )
            piece[:: mmap.PAGESIZE] = 0
        return None

    def _refusal(self, more: int) -> str | None:
        """None, or why there is no room for so many more bytes."""
        free, what = (available_bytes(), "host memory") if self.where is None else self._free_disk()
        if free is not None and more > free:
            return f"the old version needs {more} more bytes of {what} until commit, {free} are free; {self._instead}"
        return None

    def forget(self) -> None:
        """Drop what is held; the memory stays allocated."""
        self.boxes = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the boxes held now. From any thread."""
        boxes = self.boxes
        return boxes.end_bytes if boxes is not None else 0

    @property
    def leaving(self) -> Leaving:
        """All boxes held, each to be written."""
        assert self.boxes is not None
        return Leaving(self.boxes, self._raw)

    @property
    def arrivals(self) -> StagedArrivals:
        """All boxes held, to be loaded."""
        assert self.boxes is not None
        return StagedArrivals(StagedColumns(self.boxes, {}, {}), self._raw, {})

    def give(self, boxes: BoxColumns, raw: torch.Tensor, first: int) -> None:
        """Copy the boxes from number `first` on to these boxes of another memory."""
        assert self.boxes is not None
        for at in range(len(boxes)):
            copy(boxes.view(raw, at), self.boxes.view(self._raw, first + at))

    def take(self, first: int, arrivals: Sequence[Arrival]) -> None:
        """Copy arrivals into the boxes from number `first` on."""
        assert self.boxes is not None
        moved = arrivals.move_to(self.boxes, first, self._raw) if isinstance(arrivals, StagedArrivals) else ()
        for at, arrival in enumerate(arrivals) if len(moved) < len(arrivals) else ():
            if at not in moved:
                arrival.copy_into(self.boxes.view(self._raw, first + at))

    @property
    def _instead(self) -> str:
        if self.where is None:
            return "use rollback='disk', or 'none', which has no way back"
        return "use rollback='host', or give the endpoint another directory as `spill`"

    def _free_disk(self) -> tuple[int | None, str]:
        assert self.where is not None
        return shutil.disk_usage(self.where).free, f"disk in {self.where}"


def _in_memory(size_bytes: int) -> torch.Tensor:
    """Memory of NumPy, which raises MemoryError where there is none; torch's error cannot be told from others."""
    return torch.from_numpy(np.empty(size_bytes, np.uint8))


def on_disk(where: Path, size_bytes: int) -> torch.Tensor:
    """Map a file without a name, which ends with its process. Without holes: filling one on a full disk kills."""
    with tempfile.TemporaryFile(dir=where, prefix="treadle-old-") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=(size_bytes,)))
