"""Files of a profile -> Imported: who reads them is found by what they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treadle.profiles.assemble_run import assemble
from treadle.profiles.imported import Imported
from treadle.profiles.reader import Advance, Opening, Reader
from treadle.profiles.readers import READERS
from treadle.profiles.recording import Recording, Remark

_NOT_READ = "not read"
_SHOWN = 3
"""Files that an error names."""


def import_profile(
    paths: Sequence[str | Path],
    *,
    dp: int | None = None,
    microbatches: int | None = None,
    blocks: tuple[str, ...] | None = None,
    advance: Advance | None = None,
) -> Imported:
    """Read the profile of a run and match it with a schedule.

    Args:
        paths: files, or directories whose files are those of one run.
        dp: replicas of the pipeline, where the files do not say.
        microbatches: of a step, where the files name neither steps nor micro-batches.
        blocks: of each stage, a string of letters each (`treadle.ir.blocks.parse_layout` reads Megatron's layouts); no
            profile names them. Fitted costs are then of the model, and not of a stage.
        advance: is called with the number of bytes read since its last call.

    Returns:
        The schedule that ran, its Program, the measured steps, and remarks on what could not be used.

    Raises:
        ValueError: the files hold no profile, or one that cannot be matched; the message says what to do.
        OSError: a file cannot be read.

    Example:
        >>> Path("profile").mkdir()
        >>> times = '"fwd_start": [0, 1], "fwd_end": [1, 2], "bwd_start": [2, 3], "bwd_end": [3, 4]'
        >>> _ = Path("profile/pp_rank_0.json").write_text('{"1": {' + times + "}}")
        >>> treadle.import_profile(["profile"]).schedule.name
        'gpipe'

    """
    for option, value in (("dp", dp), ("microbatches", microbatches)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is a whole number from 1, got {value}; leave it out where the files say")
    recording = read_recording(paths, advance)
    recording = replace(
        recording,
        dp=dp if dp is not None else recording.dp,
        num_mb=microbatches if microbatches is not None else recording.num_mb,
    )
    try:
        return assemble(recording, blocks)
    except ValueError as error:
        unread = [str(remark) for remark in recording.remarks if remark.what.startswith(_NOT_READ)]
        raise ValueError("; ".join([str(error), *unread[:_SHOWN]])) from error


def read_recording(paths: Sequence[str | Path], advance: Advance | None = None) -> Recording:
    """Read the files of one run, by the reader that recognises them."""
    by_reader: dict[str, list[Path]] = defaultdict(list)
    readers: dict[str, Reader] = {}
    remarks = []
    for path, asked_for in files_of(paths):
        try:
            opening = Opening.of(path)
        except ValueError as error:
            if asked_for:
                raise
            remarks.append(Remark(f"{_NOT_READ}: {error}"))
            continue
        reader = next((reader for reader in READERS if reader.recognises(opening)), None)
        if reader is not None:
            by_reader[reader.form].append(path)
            readers[reader.form] = reader
        elif asked_for:
            raise ValueError(f"{path}: no profile that Treadle reads; it reads {_forms()}")
        else:
            remarks.append(Remark(f"{_NOT_READ}: no profile of a form that Treadle knows", str(path)))
    if not by_reader:
        places = ", ".join(map(str, paths))
        refused = "; ".join(map(str, remarks[:_SHOWN])) or "it has no files"
        more = f"; and {len(remarks) - _SHOWN} files more" if len(remarks) > _SHOWN else ""
        raise ValueError(f"{places}: no profile is there ({refused}{more}); Treadle reads {_forms()}")
    if len(by_reader) > 1:
        kinds = "; ".join(f"{form}: {files[0]}" for form, files in by_reader.items())
        raise ValueError(f"files of different forms are not of one run ({kinds}); give those of one")
    ((form, files),) = by_reader.items()
    recording = readers[form].read(files, advance or (lambda _: None))
    return replace(recording, remarks=(*remarks, *recording.remarks))


def files_of(paths: Sequence[str | Path]) -> list[tuple[Path, bool]]:
    """Return the files that are named and those of named directories, each with whether it was named itself."""
    found: list[tuple[Path, bool]] = []
    for path in map(Path, paths):
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
            found += [(file, False) for file in files]
        else:
            found.append((path, True))
    return found


def _forms() -> str:
    return "; ".join(reader.form for reader in READERS)
