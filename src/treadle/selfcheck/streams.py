"""Checks the order of streams: every read and write of a step is ordered by what a GPU promises, and nothing more."""

from __future__ import annotations

from treadle.selfcheck.report import Passed, SkippedError
from treadle.selfcheck.setup import Setup


def check_streams(setup: Setup) -> Passed:
    """Runs a step under the stream checker."""
    raise SkippedError("the stream checker is not part of this version")
