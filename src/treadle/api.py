"""What Python users call besides the data types: schedules, programs and traces from files and text, and back."""

from __future__ import annotations

from pathlib import Path

from treadle.export import FORMATS, chrome, npz, parse_any
from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.trace import Trace


def loads(text: str, source: str = "<text>", *, placement: str | None = None) -> Schedule:
    """A schedule from text in any of the forms that `dumps` writes.

    `placement` is for rows without the lines that name one; the default there is loop.
    """
    return parse_any(text, source, placement=placement)


def load(path: str | Path, *, placement: str | None = None) -> Schedule:
    """A schedule from a file in any of the forms that `dumps` writes."""
    return loads(_read_text(Path(path)), str(path), placement=placement)


def dumps(schedule: Schedule, format: str = "text") -> str:
    """The schedule as text, torch-csv or json."""
    if format not in FORMATS:
        raise ValueError(f"{format!r} is not a form of a schedule; use {', '.join(FORMATS)}")
    return FORMATS[format].dump(schedule)


def load_any(path: str | Path, *, placement: str | None = None) -> Schedule | Program | Trace:
    """What a file holds: a schedule, a program (.npz) or a trace (.npz, .json, .json.gz)."""
    name = str(path)
    if name.endswith(".npz"):
        return npz.load(path)
    if name.endswith(".gz"):
        return chrome.load(path)
    text = _read_text(Path(path))
    if name.endswith(".json") and '"traceEvents"' in text:
        return chrome.load(path)
    return loads(text, name, placement=placement)


def load_traces(directory: str | Path) -> Trace:
    """Traces in the files of a directory, one rank or some ranks a file, as one."""
    paths = sorted(p for p in Path(directory).iterdir() if p.name.endswith((".json", ".json.gz")))
    if not paths:
        raise ValueError(f"{directory}: no traces; they are files that end in .json or .json.gz")
    return chrome.merge(paths)


def save_trace(trace: Trace, path: str | Path, *, ranks: range | None = None) -> None:
    """Writes a trace in the form that the name's ending says; only some `ranks` of it as JSON."""
    name = str(path)
    if name.endswith(".npz"):
        if ranks is not None:
            raise ValueError(f"{name}: columns are written for all ranks; some ranks are for .json and .json.gz")
        npz.save_trace(trace, path)
    elif name.endswith((".json", ".json.gz")):
        chrome.dump(trace, Path(path), ranks=ranks)
    else:
        raise ValueError(f"a trace's name ends in .json, .json.gz or .npz, got {name!r}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: not UTF-8 text; save it as UTF-8, or, if it is a program or a trace in columns, as .npz"
        ) from None
