"""A directory of checkpoints: which are complete, and how one becomes visible all at once.

    step-00000100/              a checkpoint: torch.distributed.checkpoint's files, and
        manifest.json           the sizes of all files, and what else the run has to remember
    step-00000200.partial/      one that is being written, or was when its run ended

A checkpoint is renamed from .partial when every file is on the disk. One that lacks a file, or has one of another
size, counts as none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
METADATA = ".metadata"
PARTIAL, REMOVED = ".partial", ".removed"


def directory_of(directory: Path, step: int) -> Path:
    """Return where a step's checkpoint is."""
    return directory / f"step-{step:08d}"


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of all complete checkpoints, in order.

    Example:
        >>> complete_steps(Path("/no/such/directory"))
        []

    """
    found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in directory.glob("step-*"))
    steps = sorted(int(match[1]) for match in found if match is not None)
    return [step for step in steps if read_manifest(directory_of(directory, step)) is not None]


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a complete checkpoint; None if anything is missing."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        sizes: dict[str, int] = manifest["files"]
        whole = METADATA in sizes and all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole and isinstance(manifest.get("extra"), dict) else None


def publish(partial: Path, extra: Mapping[str, Any]) -> None:
    """Make a written checkpoint visible under its name, in place of any other there; all of it is on the disk then."""
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    _write(partial / MANIFEST, json.dumps({"files": sizes, "extra": extra}).encode())
    sync(partial)
    path = partial.with_name(partial.name.removesuffix(PARTIAL))
    if path.exists():
        remove(path)
    partial.replace(path)
    sync(path.parent)


def keep_newest(directory: Path, num: int) -> None:
    """Remove all but the newest complete checkpoints, and what earlier removals left."""
    for step in complete_steps(directory)[:-num]:
        remove(directory_of(directory, step))
    for path in _leftovers(directory, REMOVED):
        shutil.rmtree(path, ignore_errors=True)


def remove_partial(directory: Path) -> None:
    """Remove what saves that never ended have left."""
    for path in _leftovers(directory, PARTIAL):
        shutil.rmtree(path)


def remove(path: Path) -> None:
    """Remove a checkpoint: at no time is a part of it there under its name."""
    trash = path.with_name(path.name + REMOVED)
    shutil.rmtree(trash, ignore_errors=True)
    path.replace(trash)
    shutil.rmtree(trash)


def sync(path: Path) -> None:
    """Bring a directory's entries, or a file's bytes, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def _leftovers(directory: Path, suffix: str) -> Iterator[Path]:
    return directory.glob(f"step-*{suffix}")
