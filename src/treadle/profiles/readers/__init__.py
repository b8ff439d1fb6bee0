"""Readers of profiles, one form a file; a new one is a file beside these and a line in READERS."""

from __future__ import annotations

from treadle.profiles.reader import Reader

READERS: tuple[Reader, ...] = ()
"""All readers, the most particular first."""
