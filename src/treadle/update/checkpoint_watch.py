"""New checkpoints of a directory, each once it is whole, in the order of their numbers.

    checkpoint-100/  step-00000200/     a checkpoint has its number, which becomes its version, at the end of its name
    step-00000300.partial/  tmp-400/    without a number there, or with a name of something unfinished: not looked at

A checkpoint is whole when two looks have found the same files in it and `fault_of` finds nothing wrong.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

LEAST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0
"""A checkpoint that was not committed is tried again after the first, then each time after twice as long, at most the
second."""

_Files: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of the last change and number of each file."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, and the version that it becomes."""

    version: int
    path: Path


class CheckpointWatch:
    """Finds checkpoints in a directory.

    Of those that are there at the beginning the newest one counts. Then each new one comes, unless a newer one has been
    committed before. A checkpoint that is wrong is named once, and looked at again when its files change.

    Args:
        directory: Where checkpoints appear, one directory each.
        fault_of: Why a checkpoint is not whole, or not yet; None if it is. It may read all of it.
        say: Called with a line: what is passed over, and why.
        clock: Seconds that only grow.

    """

    def __init__(
        self,
        directory: Path,
        fault_of: Callable[[Path], str | None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory, self._fault_of, self._say, self._clock = directory, fault_of, say, clock
        self._above = 0
        self._looks: dict[Path, _Files] | None = None
        self._has_begun = False
        self._faulty: dict[Path, _Files] = {}
        self._said: set[tuple[Path, str]] = set()
        self._waits: dict[Path, tuple[float, float]] = {}

    def look(self, committed: int) -> Checkpoint | None:
        """Return the next checkpoint to load, above the committed version; None if there is none yet."""
        self._above = max(self._above, committed)
        numbered = list(self._numbered())
        before, self._looks = self._looks, {found.path: files for found, files in numbered}
        if before is None:
            return None
        settled = [found for found, files in numbered if before.get(found.path) == files]
        has_begun, self._has_begun = self._has_begun, True
        for found in settled if has_begun else settled[::-1]:
            if found.version > self._above and self._is_due(found.path) and self._is_whole(found.path):
                if not has_begun:
                    self._above = found.version - 1
                return found
        return None

    def failed(self, found: Checkpoint) -> float:
        """Note that a checkpoint was not committed; return the seconds after which it is tried again."""
        wait_s = min(2 * self._waits[found.path][1], LONGEST_WAIT_S) if found.path in self._waits else LEAST_WAIT_S
        self._waits[found.path] = self._clock() + wait_s, wait_s
        return wait_s

    def _numbered(self) -> Iterator[tuple[Checkpoint, _Files]]:
        """All that could be checkpoints, in the order of their numbers, with their files."""
        found: dict[int, Path] = {}
        try:
            paths = sorted(self.directory.iterdir())
        except OSError as error:
            self._say_once(self.directory, f"{error.strerror}; it is looked for again")
            paths = []
        for path in paths:
            match = re.fullmatch(r"(?!\.|tmp)(?:.*\D)?(\d{1,18})", path.name)
            if match is None or not path.is_dir():
                continue
            first = found.setdefault(int(match[1]), path)
            if first != path:
                self._say_once(path, f"it has the number of {first.name}, which counts; rename one of them")
        for version, path in sorted(found.items()):
            files = _files(path)
            if version and files is not None:
                yield Checkpoint(version, path), files

    def _is_due(self, path: Path) -> bool:
        return path not in self._waits or self._clock() >= self._waits[path][0]

    def _is_whole(self, path: Path) -> bool:
        files = (self._looks or {}).get(path)
        if files is not None and self._faulty.get(path) == files:
            return False
        fault = self._fault_of(path)
        if fault is None:
            return True
        if files is not None:
            self._faulty[path] = files
        self._say_once(path, fault)
        return False

    def _say_once(self, path: Path, text: str) -> None:
        if (path, text) not in self._said:
            self._said.add((path, text))
            self._say(f"{path.name} is not loaded: {text}")


def _files(path: Path) -> _Files | None:
    """Return the files of a directory; None if it is going away."""
    try:
        stats = ((each.name, each.stat()) for each in sorted(path.iterdir()))
        return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
    except OSError:
        return None
