"""The dumps of one run: files `<prefix><rank>` of a directory, or files as they are named."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from treadle.recorder.dump_file import RankDump, read_dump

_NAME = re.compile(r"(.*?)(\d{1,9})(\.json|\.pkl|\.pickle)?")

WITHOUT = "without them, compare the stacks of 'py-spy dump --pid PID' on all ranks (docs/hung.md)"
"""The way out where a run left nothing to read."""


def read_dumps(paths: Sequence[Path], prefix: str | None = None) -> dict[int, RankDump]:
    """Read the dumps of one run, by rank.

    Args:
        paths: a directory, or files; their names end in the rank, with or without `.json` or `.pkl`.
        prefix: what stands before the rank, where a directory has other files too.

    Raises:
        ValueError: no dumps are there, or those of several runs, or one cannot be read.
        OSError: a file cannot be read.

    """
    files = _files(paths, prefix)
    return {rank: read_dump(path, rank) for rank, path in sorted(files.items())}


def _files(paths: Sequence[Path], prefix: str | None) -> dict[int, Path]:
    where = ", ".join(map(str, paths))
    listed = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    by_prefix: dict[str, dict[int, Path]] = defaultdict(dict)
    for file in listed:
        match = _NAME.fullmatch(file.name)
        if match is None or (prefix is not None and match[1] != prefix):
            continue
        twice = by_prefix[match[1]].setdefault(int(match[2]), file)
        if twice != file:
            raise ValueError(f"{twice} and {file} are both of rank {int(match[2])}; leave one of them out")
    if not by_prefix:
        named = f"{prefix}<rank>" if prefix is not None else "<prefix><rank>, such as trace_0"
        raise ValueError(
            f"{where}: no dumps; torch's Flight Recorder writes one file a rank, {named}, with "
            f"TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_DUMP_TEMP_FILE; {WITHOUT}"
        )
    if len(by_prefix) > 1:
        found = ", ".join(repr(name) for name in sorted(by_prefix))
        raise ValueError(f"{where}: files of several prefixes: {found}; choose the run's with --prefix")
    return next(iter(by_prefix.values()))
