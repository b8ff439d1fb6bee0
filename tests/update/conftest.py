"""Fixtures that tests of updates share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A private directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="treadle-u") as name:
        yield Path(name)
