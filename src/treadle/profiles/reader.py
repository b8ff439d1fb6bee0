"""The interface of readers: one form of profile each, recognised by what a file holds."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from treadle.profiles.recording import Recording

Advance: TypeAlias = Callable[[int], None]
"""Takes how many bytes of the files, as they lie on disk, have been read since the last call."""

_HEAD_BYTES = 2**20
"""Chrome traces begin with the names of processes and threads: 300 bytes for each worker."""


@dataclass(frozen=True)
class Opening:
    """The name of a file and the first bytes of its content, decompressed; what `recognises` looks at."""

    path: Path
    head: bytes

    @classmethod
    def of(cls, path: Path) -> Opening:
        """Read the first bytes; a ValueError names a file that is empty or cannot be decompressed."""
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):
            try:
                with gzip.open(path) as file:
                    head = file.read(_HEAD_BYTES)
            except EOFError:
                head = b""
            except (OSError, zlib.error) as error:
                raise ValueError(f"{path}: cannot be decompressed: {error}; the file is damaged") from error
        if not head:
            raise ValueError(f"{path}: empty, or cut off within its first bytes; copy it again")
        return cls(path, head)


class Reader(Protocol):
    """Reads one form of profile."""

    form: str
    """What people call the form, in lists and errors."""

    def recognises(self, opening: Opening) -> bool:
        """Say whether a file is of this form, by its first bytes and its name."""
        ...

    def read(self, paths: Sequence[Path], advance: Advance) -> Recording:
        """Read the files of one run. A ValueError names the file and what is wrong with it."""
        ...
