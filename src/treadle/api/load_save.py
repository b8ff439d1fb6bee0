"""Reading and writing schedules, programs and traces: files and text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.files import FORMATS, parse_any
from treadle.ir import Schedule

if TYPE_CHECKING:  # schedules are read and written without numpy; what programs and traces need is imported below
    from treadle.files.torch_comms import Receives
    from treadle.ir.program import Program
    from treadle.ir.steps import Steps
    from treadle.ir.trace import Trace
    from treadle.profiles.imported import Imported

_TRACE = b'"layout":{"placement"'
"""What the head of a trace of Treadle has, and no other Chrome trace."""


def loads(text: str, source: str = "<text>", *, placement: str | None = None) -> Schedule:
    """Read a schedule from text in any of the forms that `dumps` writes.

    Args:
        text: rows, torch's CSV or JSON.
        source: the name that errors give the text.
        placement: for rows without the lines that name one: loop (the default), v, bidirectional, or a table.

    Returns:
        The Schedule, sound or not.

    Raises:
        ValueError: the text holds no schedule; the message names the line.

    Example:
        >>> schedule = treadle.generate("zb-h1", pp=2, microbatches=4)
        >>> loads(dumps(schedule)) == schedule
        True

    """
    return parse_any(text, source, placement=placement)


def dumps(schedule: Schedule, format: str = "text", *, receives: Receives | None = None, fsdp: bool = False) -> str:
    """Write a schedule as text.

    Args:
        schedule: any.
        format: text, torch-csv, torch-comms or json.
        receives: for torch-comms: early, where the message is sent, or late, as late as one communicator for each pair
            of ranks allows; None is the schedule's own order, or early.
        fsdp: for torch-comms: add the entries without which torch's runtime does not compute stages under FSDP.

    Returns:
        Text that `loads` reads back.

    Raises:
        ValueError: there is no such format, it cannot carry the schedule, or has no such option.

    Example:
        >>> "F0.0" in dumps(treadle.generate("gpipe", pp=2, microbatches=2))
        True
        >>> print(dumps(treadle.generate("1f1b", pp=2, microbatches=1), "torch-comms"), end="")
        0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD
        1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD

    """
    if format not in FORMATS:
        raise ValueError(f"{format!r} is not a form of a schedule; use {', '.join(FORMATS)}")
    if format == "torch-comms":
        return FORMATS[format].dump(schedule, receives=receives, fsdp=fsdp)
    for name, given in (("receives", receives is not None), ("fsdp", fsdp)):
        if given:
            raise ValueError(f"`{name}` is for `format='torch-comms'`, got {format!r}")
    return FORMATS[format].dump(schedule)


def load(path: str | Path, *, placement: str | None = None) -> Schedule | Program | Trace:
    """Read a file: a schedule, a program (.npz) or a trace (.npz, .json, .json.gz).

    Args:
        path: of the file.
        placement: for rows of a schedule without the lines that name one.

    Returns:
        A Schedule, a Program or a Trace.

    Raises:
        ValueError: the file holds none of these.
        OSError: the file cannot be read.

    Example:
        >>> _ = Path("rows.json").write_text(dumps(treadle.generate("gpipe", pp=2, microbatches=2), "json"))
        >>> type(load("rows.json")).__name__
        'Schedule'

    """
    name = str(path)
    if name.endswith(".npz"):
        from treadle.files import npz

        return npz.load(path)
    text = _read_text(Path(path)) if not name.endswith(".gz") else ""
    if name.endswith(".gz") or (name.endswith(".json") and '"traceEvents"' in text):
        from treadle.files import chrome

        return chrome.load(path)
    return loads(text, name, placement=placement)


def load_traces(directory: str | Path) -> Trace:
    """Read the traces in a directory, of one or some ranks a file, as one trace."""
    from treadle.files import chrome

    paths = sorted(p for p in Path(directory).iterdir() if p.name.endswith((".json", ".json.gz")))
    if not paths:
        raise ValueError(f"{directory}: no traces; they are files that end in .json or .json.gz")
    return chrome.merge(paths)


def save_trace(trace: Trace, path: str | Path, *, ranks: range | None = None) -> None:
    """Write a trace to a file.

    Args:
        trace: predicted or measured.
        path: its ending chooses the form: .json and .json.gz (Chrome's, for Perfetto) or .npz (columns).
        ranks: only these, as JSON; None for all.

    Raises:
        ValueError: another ending, or `ranks` with .npz.

    Example:
        >>> unit = treadle.load_costs("unit")
        >>> trace = treadle.simulate(treadle.lower(treadle.generate("1f1b", pp=2, microbatches=2), unit), unit)
        >>> save_trace(trace, "trace.json.gz")
        >>> treadle.load("trace.json.gz").makespan == trace.makespan
        True

    """
    from treadle.files import chrome, npz

    name = str(path)
    if name.endswith(".npz"):
        if ranks is not None:
            raise ValueError(f"{name}: columns are written for all ranks; some ranks are for .json and .json.gz")
        npz.save_trace(trace, path)
    elif name.endswith((".json", ".json.gz")):
        chrome.dump(trace, Path(path), ranks=ranks)
    else:
        raise ValueError(f"a trace's name ends in .json, .json.gz or .npz, got {name!r}")


def save_steps(steps: Steps, path: str | Path, number: int | None = None) -> None:
    """Write measured steps to a file for Perfetto, which shows one of them: step `number`, or the typical one."""
    from treadle.files import chrome

    if not str(path).endswith((".json", ".json.gz")):
        raise ValueError(f"the name of a run's trace ends in .json or .json.gz, got {str(path)!r}")
    chrome.dump(steps.trace(number), Path(path), steps=steps)


def load_steps(path: str | Path) -> Steps:
    """Read all steps of the run that a trace is of; a trace of one step is that step."""
    from treadle.files import chrome, npz
    from treadle.ir.steps import Steps

    if str(path).endswith(".npz"):
        return Steps.of(npz.load_trace(path))
    return chrome.load_steps(path)


def load_run(paths: Sequence[Path]) -> Steps | Imported:
    """Read the measured steps of one run: traces of Treadle, or a profile of another trainer.

    Raises:
        ValueError: the files hold no run, or several.
        OSError: a file cannot be read.

    """
    from treadle.profiles.importing import import_profile

    return load_traced(paths) if holds_traces(paths) else import_profile(paths)


def load_traced(paths: Sequence[Path]) -> Steps:
    """Read the measured steps of one run from traces of Treadle: a file, or a directory of them.

    Raises:
        ValueError: there are several.
        OSError: a file cannot be read.

    """
    from treadle.ir.steps import Steps

    if len(paths) > 1:
        raise ValueError(f"traces of one run are one file or one directory, got {len(paths)}: {paths[0]}, ...")
    return Steps.of(load_traces(paths[0])) if paths[0].is_dir() else load_steps(paths[0])


def holds_traces(paths: Sequence[Path]) -> bool:
    """Return True if the files are traces of Treadle, and not a profile of another trainer."""
    from treadle.profiles.importing import files_of

    return any(_is_trace(path) for path, _ in files_of(paths))


def _is_trace(path: Path) -> bool:
    from treadle.profiles.reader import Opening

    if path.name.endswith(".npz"):
        return True
    try:
        return _TRACE in Opening.of(path).head
    except ValueError:  # empty or damaged: whoever reads it reports that
        return False


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: not UTF-8 text; save it as UTF-8, or, if it is a program or a trace in columns, as .npz"
        ) from None
