"""Runs `treadle ...` in this process: what a person types, without the seconds that an interpreter takes to start.

Exit code and streams are those of a process of its own (`docs/pages.py` runs the pages' commands by the same function).
Where starting, signals, pipes or a terminal are the subject, a test starts the real one: `real_treadle`.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from docs.pages import COLUMNS, run_here, settled
from tests.support.patience import HUNG_S

TREADLE = str(Path(sys.executable).parent / "treadle")


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit code and what it wrote into each stream."""

    returncode: int
    stdout: str
    stderr: str


class Screen(io.StringIO):
    """A terminal that keeps what is written on it."""

    def isatty(self) -> bool:
        return True


def treadle(*args: str, stdin: str = "", cwd: Path | None = None, at_terminal: bool = False) -> Finished:
    """Runs a command in this process. What a user would see as a traceback is raised.

    At a terminal it says what to type next, on stderr.
    """
    stdout, stderr = (Screen(), Screen()) if at_terminal else (io.StringIO(), io.StringIO())
    directory = cwd if cwd is not None else Path.cwd()
    code = run_here(["treadle", *args], directory, stdin=stdin, stdout=stdout, stderr=stderr)
    return Finished(code, stdout.getvalue(), settled(stderr.getvalue()))


def real_treadle(*args: str, stdin: str = "", cwd: Path | None = None) -> Finished:
    """Runs a command as its installed script, in a process of its own."""
    env = {**os.environ, "COLUMNS": str(COLUMNS)}
    command = [TREADLE, *args]
    done = subprocess.run(command, input=stdin, cwd=cwd, env=env, capture_output=True, text=True, timeout=HUNG_S)
    return Finished(done.returncode, done.stdout, settled(done.stderr))
