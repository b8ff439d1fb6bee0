"""Measured steps of a run, from whatever holds them: traces of Treadle, or a profile of another trainer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from treadle.api import load_save
from treadle.cli.terminal import note, working, wrote
from treadle.costs import dump
from treadle.ir.steps import Steps
from treadle.planner.plan_directory import is_plan, read_plan
from treadle.profiles.imported import Imported
from treadle.profiles.importing import files_of, import_profile
from treadle.simulator.fitted_run import FittedRun

_SHOWN_REMARKS = 6


def load_steps(paths: Sequence[Path]) -> Steps:
    """Read the measured steps of one run, and note what could not be used; of a plan, its simulated step.

    Raises:
        ValueError: the files hold no run, or several.
        OSError: a file cannot be read.

    """
    if len(paths) == 1 and is_plan(paths[0]):
        with working("simulating"):
            return Steps.of(read_plan(paths[0]).trace)
    if load_save.holds_traces(paths):
        with working(f"reading {paths[0]}"):
            return load_save.load_traced(paths)
    imported = import_run(paths)
    tell(imported, paths)
    return imported.steps


def quoted(paths: Sequence[Path]) -> str:
    """Return paths as they are typed in a command."""
    return " ".join(shlex.quote(str(path)) for path in paths)


def import_run(
    paths: Sequence[Path],
    *,
    dp: int | None = None,
    microbatches: int | None = None,
    blocks: tuple[str, ...] | None = None,
) -> Imported:
    """Read a profile, with a progress bar."""
    for path in filter(is_plan, paths):
        raise ValueError(f"{path} is a plan, of which nothing was measured; 'treadle simulate' predicts its step")
    total = sum(path.stat().st_size for path, _ in files_of(paths))
    done = 0
    with working("reading") as advance:

        def more(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            advance(min(done, total), total)

        return import_profile(paths, dp=dp, microbatches=microbatches, blocks=blocks, advance=more)


def tell(imported: Imported, paths: Sequence[Path]) -> None:
    """Print the remarks on a profile, on stderr."""
    for remark in imported.remarks[:_SHOWN_REMARKS]:
        note(str(remark))
    if len(imported.remarks) > _SHOWN_REMARKS:
        more = len(imported.remarks) - _SHOWN_REMARKS
        note(f"and {more} more remarks; `treadle import {quoted(paths)} --json` has them all")


def write_fit(fitted: FittedRun, path: Path) -> None:
    """Write fitted costs as TOML, and note how far the step that they predict is from the measured one."""
    path.write_text(dump(fitted.costs), encoding="utf-8")
    wrote(path)
    for words in filter(None, (fitted.in_words, fitted.of_head)):
        note(words)


def choose_steps(steps: Steps, text: str | None) -> Steps:
    """Return the steps that a user names: `16,20-39,403-`."""
    if text is None:
        return steps
    chosen: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"(\d+)(-(\d*))?", part.strip())
        if ends is None:
            raise ValueError(f"--steps are numbers and ranges, such as 16,20-39,403-, got {part!r}")
        first = int(ends[1])
        last = first if ends[2] is None else int(ends[3]) if ends[3] else max(steps.numbers)
        chosen |= {number for number in steps.numbers if first <= number <= last}
    if not chosen:
        raise ValueError(f"--steps {text} names none of the measured ones, {steps.numbers[0]} to {steps.numbers[-1]}")
    return steps.select(chosen)
