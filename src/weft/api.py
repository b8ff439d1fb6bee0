"""What Python users call besides the data types: schedules from names, files and text, and back to text."""

from __future__ import annotations

from pathlib import Path

from weft.export import FORMATS, parse_any
from weft.ir import Schedule


def loads(text: str, source: str = "<text>", *, placement: str | None = None) -> Schedule:
    """A schedule from text in any of the forms that `dumps` writes.

    `placement` is for rows without the lines that name one; the default there is loop.
    """
    return parse_any(text, source, placement=placement)


def load(path: str | Path, *, placement: str | None = None) -> Schedule:
    """A schedule from a file in any of the forms that `dumps` writes."""
    return loads(Path(path).read_text(encoding="utf-8"), str(path), placement=placement)


def dumps(schedule: Schedule, format: str = "text") -> str:
    """The schedule as text, torch-csv or json."""
    if format not in FORMATS:
        raise ValueError(f"{format!r} is not a form of a schedule; use {', '.join(FORMATS)}")
    return FORMATS[format].dump(schedule)
