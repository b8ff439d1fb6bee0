"""`treadle why --follow DIR`: files of a run as they come, one line a step, a page, and metrics for Prometheus."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from treadle.api import load_save
from treadle.cli.terminal import note, plain
from treadle.diagnosis.follow import FollowedStep, Follower, observe
from treadle.diagnosis.follow_page import metrics, page
from treadle.ir.steps import Steps
from treadle.profiles.importing import import_profile

LOOK_S = 0.5
"""Seconds between two looks; what has not changed between two of them is read."""
TRIES = 20
"""Looks at something that does not read, before it is left out: files of other ranks may still be on their way."""
MOST_LINES = 500
_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_ENDINGS = (".json", ".json.gz", ".npz", ".sqlite")


@dataclass
class RunFiles:
    """What appears in a directory: traces of Treadle, each a file; profiles, each a subdirectory of files."""

    directory: Path
    _sizes: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _tries: dict[Path, int] = field(default_factory=dict)
    _done: set[Path] = field(default_factory=set)

    def new(self) -> Iterator[tuple[Path, Steps]]:
        """Read what is whole and was not read, in the order of its numbers."""
        for path in sorted(self._entries(), key=lambda path: (_number(path) or 0, path.name)):
            size = _size(path)
            if self._sizes.get(path) != size:
                self._sizes[path] = size
                continue
            try:
                steps = _read(path)
            except (ValueError, OSError, EOFError) as error:
                self._failed(path, error)
                continue
            self._done.add(path)
            yield path, steps

    def _entries(self) -> Iterator[Path]:
        for path in self.directory.iterdir():
            wanted = path.is_dir() or path.name.endswith(_ENDINGS)
            if wanted and not path.name.startswith(".") and path not in self._done and _size(path)[0]:
                yield path

    def _failed(self, path: Path, error: Exception) -> None:
        self._tries[path] = self._tries.get(path, 0) + 1
        if self._tries[path] >= TRIES:
            self._done.add(path)
            note(f"{path.name} is left out: {error}")


def follow(directory: Path, output: Path | None, prometheus: Path | None, idle_s: float | None) -> bool:
    """Print a line for each step that appears, until an interrupt, or until none did for `idle_s`.

    The page `output` and the metrics `prometheus` are written again after each file. Returns whether an alarm is on.
    """
    if not directory.is_dir():
        raise ValueError(f"--follow {directory}: give the directory in which traces or profiles appear")
    files, follower = RunFiles(directory), Follower()
    lines: list[FollowedStep] = []
    last = time.monotonic()
    with suppress(KeyboardInterrupt):
        while idle_s is None or time.monotonic() - last < idle_s:
            for path, steps in files.new():
                first = _number(path) if len(steps.numbers) == 1 else None
                for observed in observe(steps, first):
                    lines.append(follower.add(observed))
                    plain(f"{lines[-1]}\n")
                del lines[:-MOST_LINES]
                last = time.monotonic()
                if output is not None:
                    _write(output, page(directory.name, lines))
                if prometheus is not None:
                    _write(prometheus, metrics(lines[-1]))
            time.sleep(LOOK_S)
    return bool(follower.alarms)


def _write(path: Path, text: str) -> None:
    """Write a file whole: who reads it meanwhile reads the one before."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> Steps:
    if path.is_dir() and not load_save.holds_traces([path]):
        return import_profile([path]).steps
    return load_save.load_traced([path])


def _number(path: Path) -> int | None:
    """Return the last number of a name: of step1204.json.gz and of iteration_1204 it is 1204."""
    found = _NUMBER.search(path.name.removesuffix(".gz").removesuffix(".json"))
    return int(found[1]) if found is not None else None


def _size(path: Path) -> tuple[int, int]:
    """Return how many bytes there are in a file, or in a directory's files, and when the last of them was written."""
    stats = [each.stat() for each in (path.iterdir() if path.is_dir() else (path,)) if each.is_file()]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
