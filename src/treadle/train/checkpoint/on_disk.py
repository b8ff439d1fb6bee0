"""A directory of checkpoints: which are intact, and how one becomes visible all at once.

    step-00000100/              a checkpoint: torch.distributed.checkpoint's files, and
        manifest.json           its step, size and digest of all files, and what else the run has to remember
    step-00000200.partial/      one that is being written, or was when its run ended
    step-00000300.aside/        one that a run left behind: it went on from an earlier step, or from the start
    lock                        held by the run that writes here (lock.py)

A checkpoint is renamed from .partial when every file is on the disk. Nothing in it is believed: the manifest has a
digest of itself, names the step it is of, and has the digests that ranks took of the files they wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
METADATA = ".metadata"
PARTIAL, REMOVED, ASIDE = ".partial", ".removed", ".aside"
FORM = 2
"""Of the manifest. One of form 1 has the sizes of files, no digests, and neither its step nor its form."""


@dataclass(frozen=True)
class FileFacts:
    """What a file of a checkpoint has to be."""

    size_bytes: int
    xxh3_128: str | None
    """None where the manifest has no digests."""

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Return the facts of a file, which is read once."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128)
            return cls(file.tell(), digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint records of itself."""

    step: int
    files: Mapping[str, FileFacts]
    extra: dict[str, Any]

    @property
    def has_digests(self) -> bool:
        """False of a checkpoint of form 1, of which only sizes can be compared."""
        return all(facts.xxh3_128 is not None for facts in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's content: JSON that has its own digest."""
        files = {name: vars(facts) for name, facts in self.files.items()}
        content = {"form": FORM, "step": self.step, "files": files, "extra": self.extra}
        return json.dumps({**content, "xxh3_128": _digest(content)}).encode()


class DamagedError(ValueError):
    """A checkpoint is not what was written; the message names the file."""


def directory_of(directory: Path, step: int) -> Path:
    """Return where a step's checkpoint is."""
    return directory / f"step-{step:08d}"


def partial_of(path: Path) -> Path:
    """Return where a checkpoint is written to before it has its name."""
    return path.with_name(path.name + PARTIAL)


def found_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints that are there, intact or not, in order.

    Example:
        >>> found_steps(Path("/no/such/directory"))
        []

    """
    found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in directory.glob("step-*"))
    return sorted(int(match[1]) for match in found if match is not None)


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints whose files are all there with their sizes, in order; no file is read."""
    return [step for step in found_steps(directory) if _is_complete(directory, step)]


def _is_complete(directory: Path, step: int) -> bool:
    try:
        read_manifest(directory, step)
    except DamagedError:
        return False
    return True


def read_manifest(directory: Path, step: int) -> Manifest:
    """Return the manifest of a step's checkpoint; sizes are checked, digests of files are not (`check_files`).

    Raises:
        DamagedError: The manifest is missing, damaged, or another step's, or a file is missing or of another size.

    """
    path = directory_of(directory, step)
    try:
        manifest = _parse((path / MANIFEST).read_bytes(), step)
    except OSError as error:
        raise DamagedError(f"{MANIFEST}: {error.strerror}") from None
    if manifest.step != step:
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}")
    for name, facts in manifest.files.items():
        try:
            size_bytes = (path / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if size_bytes != facts.size_bytes:
            raise DamagedError(f"{name} has {size_bytes:,} bytes, of {facts.size_bytes:,} that were written")
    return manifest


def _parse(text: bytes, step: int) -> Manifest:
    """Return what a manifest says; one of form 1 is taken to be of this step."""
    try:
        content = json.loads(text)
        digest = content.pop("xxh3_128", None)
    except (ValueError, AttributeError, TypeError):
        raise DamagedError(f"{MANIFEST} is damaged: it is no JSON object") from None
    if digest is None and _is_form_1(content):
        return Manifest(
            step, {name: FileFacts(size, None) for name, size in content["files"].items()}, content["extra"]
        )
    if digest != _digest(content):
        raise DamagedError(f"{MANIFEST} is damaged: its digest is another")
    if content["form"] != FORM:
        raise DamagedError(f"{MANIFEST} has form {content['form']}; this version of Treadle reads {FORM}")
    files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
    return Manifest(content["step"], files, content["extra"])


def _is_form_1(content: Mapping[str, Any]) -> bool:
    """Whether this is what the first form had, and nothing else: so a later form is not taken for it by damage."""
    files = content.get("files")
    return (
        content.keys() == {"files", "extra"}
        and isinstance(content["extra"], dict)
        and isinstance(files, dict)
        and METADATA in files
        and all(type(size) is int for size in files.values())
    )


def check_files(directory: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Read some files of a checkpoint, if there are digests to hold them to.

    Raises:
        DamagedError: One has other bytes than were written, or cannot be read.

    """
    for name in names if manifest.has_digests else ():
        try:
            facts = FileFacts.of(directory_of(directory, manifest.step) / name)
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if facts != manifest.files[name]:
            raise DamagedError(f"{name} has other bytes than were written")


def publish(partial: Path, written: Mapping[str, FileFacts], extra: Mapping[str, Any]) -> None:
    """Make a written checkpoint visible under its name, in place of any other there; all of it is on the disk then.

    Args:
        partial: The directory that was written to.
        written: The facts of files that ranks have written, taken by those ranks.
        extra: What else the run has to remember.

    Raises:
        ValueError: A file that a rank has written is not there. The checkpoint does not become visible.

    """
    path = partial.with_name(partial.name.removesuffix(PARTIAL))
    _refuse_missing(partial, written)
    here = [each for each in sorted(partial.iterdir()) if each.name not in written]
    facts = {**written, **{each.name: synced(each) for each in here}}
    step = int(path.name.removeprefix("step-"))
    _write(partial / MANIFEST, Manifest(step, facts, dict(extra)).to_bytes())
    sync(partial)
    if path.exists():
        remove(path)
    partial.replace(path)
    sync(path.parent)


def _refuse_missing(partial: Path, written: Mapping[str, FileFacts]) -> None:
    missing = [name for name in written if not (partial / name).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{missing[0]}{more}, which other ranks have written to {partial.parent}, is missing on the first rank: "
            "the directory is not shared between nodes; give --checkpoint.directory a path that all nodes share"
        )


def keep_newest(directory: Path, step: int, num: int) -> list[int]:
    """Keep the newest complete checkpoints up to a step; remove all before them, and what earlier removals left.

    Those of later steps belong to a run that this one does not continue: they are set aside, where nothing loads them.

    Returns:
        The steps that were set aside.

    """
    later = [each for each in found_steps(directory) if each > step]
    for each in later:
        path = directory_of(directory, each)
        aside = path.with_name(path.name + ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        path.replace(aside)
    kept = complete_steps(directory)[-num:]
    for each in found_steps(directory):
        if kept and each < kept[0]:
            remove(directory_of(directory, each))
    for path in _leftovers(directory, REMOVED):
        shutil.rmtree(path, ignore_errors=True)
    return later


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


def synced(path: Path) -> FileFacts:
    """Bring a file to the disk and return its facts. torch syncs its files too, but before it has flushed them."""
    sync(path)
    return FileFacts.of(path)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def _leftovers(directory: Path, suffix: str) -> Iterator[Path]:
    return directory.glob(f"step-*{suffix}")


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
