"""Readers of profiles, one form a file; a new one is a file beside these and a line in READERS."""

from __future__ import annotations

from treadle.profiles.reader import Reader
from treadle.profiles.readers.kineto import KinetoReader
from treadle.profiles.readers.ndtimeline import NDTimelineReader
from treadle.profiles.readers.nsys import NsysReader
from treadle.profiles.readers.primus import PrimusReader

READERS: tuple[Reader, ...] = (NsysReader(), PrimusReader(), NDTimelineReader(), KinetoReader())
"""All readers, the most particular first."""
