"""Documents: the texts in the files that a configuration names."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path

STDLIB = "stdlib"
"""A path that means the sources of Python's standard library, without its tests: text that every machine has."""

_BINARY = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PAR1": "parquet"}
"""Formats of files by their first bytes."""

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
        ValueError: a line of a .jsonl file has no text under `field`, or another file is compressed or binary; the
            message names file and line.

    """
    if path.suffix != ".jsonl":
        content = path.read_bytes()
        _refuse_binary(path, content)
        yield content
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _text_of(line, field, f"{path}:{number}")


def _refuse_binary(path: Path, content: bytes) -> None:
    """Refuse a file of a compressed format, or with a zero byte, which no text contains."""
    form = next((name for begin, name in _BINARY.items() if content.startswith(begin)), "binary")
    if form != "binary" or b"\0" in content:
        raise ValueError(
            f"{path} is no text but {form}; unpack or convert it, or name only the files to read in data.paths, as in "
            "'corpus/**/*.txt'"
        )


def _text_of(line: bytes, field: str, where: str) -> bytes:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error}); a .jsonl file has one object a line") from None
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: no text under {field!r}, the line has {has}; name the field in data.field")
    try:
        return str(row[field]).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: the text under {field!r} has half of a surrogate pair, {error.object[error.start]!r} at "
            f"character {error.start}, for which there is no UTF-8; mend the line or remove it"
        ) from None
