"""Documents: the texts in the files that a configuration names."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path

STDLIB = "stdlib"
"""A path that means the sources of Python's standard library, without its tests: text that every machine has."""

_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files that paths and patterns name, each once, in order of their names.

    Args:
        paths: files, directories, which stand for all files below them but hidden ones, patterns such as
            `corpus/**/*.jsonl`, or "stdlib".

    Raises:
        ValueError: there is no path, or one names no file.

    """
    if not paths:
        raise ValueError('data.paths is empty; give files or patterns such as "corpus/**/*.txt", or "stdlib"')
    found: set[Path] = set()
    for path in paths:
        files = _stdlib() if path == STDLIB else [Path(name) for name in glob(path, recursive=True)]  # noqa: PTH207
        files = _below(Path(path)) if Path(path).is_dir() else [file for file in files if file.is_file()]
        if not files:
            raise ValueError(
                f"data.paths: {path!r} names no file; give files, directories, patterns such as '*.txt', or 'stdlib'"
            )
        found.update(files)
    return sorted(found)


def _below(directory: Path) -> list[Path]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(directory).parts)]


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in root.rglob("*.py") if not _NOT_STDLIB & set(file.relative_to(root).parts)]


def read_documents(path: Path, field: str) -> Iterator[bytes]:
    """Yield the documents of a file in UTF-8: each line's `field` in .jsonl, the whole text in any other.

    Raises:
        ValueError: a line of a .jsonl file has no text under `field`; the message names file and line.

    """
    if path.suffix != ".jsonl":
        yield path.read_bytes()
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _text_of(line, field, f"{path}:{number}").encode()


def _text_of(line: bytes, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error}); a .jsonl file has one object a line") from None
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: no text under {field!r}, the line has {has}; name the field in data.field")
    text: str = row[field]
    return text
