"""Storage for a rollback copy: host memory or a file. It stays allocated for the next update."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from treadle.update.memory.copying import boxed
from treadle.weights.tensor_boxes import ITEMSIZE, Box

_ALIGN = 64


class RollbackStore:
    """Boxes of tensors in one allocation. `where` is None for host memory, else a directory for a file."""

    def __init__(self, where: Path | None) -> None:
        self.where = where
        self._raw = _in_memory(0)
        self._places: dict[tuple[str, Box], tuple[int, str]] = {}

    def needs(self, boxes: Sequence[tuple[str, Box, str]]) -> int:
        """Bytes that these boxes take, given as (name, box, dtype)."""
        return sum(_padded(box, dtype) for _, box, dtype in boxes)

    def refusal(self, need_bytes: int) -> str | None:
        """None, or why there is no room for so many bytes. The present allocation is used again."""
        more = need_bytes - len(self._raw)
        if more <= 0:
            return None
        free, what = (free_host_bytes(), "host memory") if self.where is None else self._free_disk()
        if more > free:
            return f"the old version needs {more} more bytes of {what} until commit, {free} are free; {self._instead}"
        return None

    def reserve(self, boxes: Sequence[tuple[str, Box, str]]) -> str | None:
        """Make room for exactly these boxes, dropping what was held; None, or why there is no room."""
        need, self._places, at = self.needs(boxes), {}, 0
        if need > len(self._raw):
            self._raw = _in_memory(0)
            try:
                self._raw = _in_memory(need) if self.where is None else _on_disk(self.where, need)
            except (OSError, MemoryError) as error:
                what = "host memory" if self.where is None else f"disk in {self.where}"
                why = error.strerror if isinstance(error, OSError) else "out of memory"
                return f"the old version needs {need} bytes of {what} until commit: {why}; {self._instead}"
        for name, box, dtype in boxes:
            self._places[name, box] = at, dtype
            at += _padded(box, dtype)
        return None

    def forget(self) -> None:
        """Drop what is held; the memory stays allocated."""
        self._places = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the boxes held now."""
        return sum(_padded(box, dtype) for (_, box), (_, dtype) in self._places.items())

    def tensor(self, name: str, box: Box) -> torch.Tensor:
        """A box's elements."""
        at, dtype = self._places[name, box]
        return boxed(self._raw, at, box.shape, dtype)

    def items(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """All boxes held, as (name, box, elements)."""
        for name, box in self._places:
            yield name, box, self.tensor(name, box)

    @property
    def _instead(self) -> str:
        if self.where is None:
            return "use rollback='disk', or 'none', which has no way back"
        return "use rollback='host', or give the endpoint another directory as `spill`"

    def _free_disk(self) -> tuple[int, str]:
        assert self.where is not None
        return shutil.disk_usage(self.where).free, f"disk in {self.where}"


def _padded(box: Box, dtype: str) -> int:
    return -(-math.prod(box.shape) * ITEMSIZE[dtype] // _ALIGN) * _ALIGN


def _in_memory(size_bytes: int) -> torch.Tensor:
    """Memory of NumPy, which raises MemoryError where there is none; torch's error cannot be told from others."""
    return torch.from_numpy(np.empty(size_bytes, np.uint8))


def _on_disk(where: Path, size_bytes: int) -> torch.Tensor:
    """Map a file without a name, which ends with its process. Without holes: filling one on a full disk kills."""
    with tempfile.TemporaryFile(dir=where, prefix="treadle-old-") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=(size_bytes,)))


def free_host_bytes() -> int:
    """Bytes that this process can still allocate: of the machine, and of its control group if that has a limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    left = left_in_group(Path("/sys/fs/cgroup"))
    return free if left is None else min(free, left)


def left_in_group(group: Path) -> int | None:
    """Bytes left of a control group's limit, None without one. The page cache counts as used, but can be reclaimed."""
    try:
        most, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - used + int(parts.get("inactive_file", 0)))
