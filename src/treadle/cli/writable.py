"""Outputs in files: the form that a name's ending chooses, and whether the file can be written.

Commands check that before long work, so that its result is not lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

_FORMS = {".json": "json", ".csv": "torch-csv"}


def form_of(path: Path) -> str:
    """Return the form of a schedule that a file's ending chooses: json, torch-csv, or text for any other."""
    return _FORMS.get(path.suffix, "text")


def check_file(path: Path) -> None:
    """Raise a ValueError if no file can be written there. Nothing is left behind."""
    with _refused(path):
        if path.is_dir():
            raise ValueError(f"{path} is a directory; name a file in it")
        if not path.parent.is_dir():
            raise ValueError(f"there is no directory {path.parent}; make it, or write elsewhere")
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            TemporaryFile(dir=path.parent).close()


def check_directory(path: Path) -> None:
    """Raise a ValueError if there is no directory to write to, and none can be made. Nothing is left behind."""
    with _refused(path):
        whole = path.absolute()
        there = next(each for each in (whole, *whole.parents) if each.exists())
        if not there.is_dir():
            raise ValueError(f"{path} names a directory, and {there} is a file; write elsewhere")
        TemporaryFile(dir=there).close()


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; write elsewhere") from error
