"""The command line. Environment and terminal are looked at here and nowhere below."""

from __future__ import annotations

import os
import sys

from treadle.cli.app import app
from treadle.ir.kernel import Compiled


def main() -> None:
    """Run a command; a user's mistake ends with a sentence and exit code 2, never with a traceback."""
    Compiled.compiling = staticmethod(
        lambda: _say("compiling, once for this installation; the next run starts at once")
    )
    try:
        app()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        _fail(_sentence(error))
        sys.exit(2)
    except MemoryError:
        _fail("out of memory; a smaller size, or a machine with more")
        sys.exit(2)


def _say(message: str) -> None:
    from treadle.cli.terminal import err

    err.print(message, style="dim", soft_wrap=True)


def _fail(message: str) -> None:
    from treadle.cli.terminal import fail  # rich, which a command that only prints does not need

    fail(message)


def _sentence(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
