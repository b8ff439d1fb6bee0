"""Frames: four bytes of length, then that many bytes."""

from __future__ import annotations

import struct

from treadle.wire.errors import WireError

_LENGTH = struct.Struct("!I")

MOST_BYTES = 1 << 30
"""The largest message: what one worker wants of a large model, about 190 bytes a tensor; so there is room."""

FIRST_BYTES = 4 << 10
"""The largest first message of a connection, before the other end has said who it is."""


def framed(body: bytes, most_bytes: int = MOST_BYTES) -> bytes:
    """The body behind its length."""
    if len(body) > most_bytes:
        raise WireError(f"a message of {len(body)} bytes is larger than the limit of {most_bytes}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Takes bytes as they come and gives whole frames. It never holds more than has arrived, whatever a length says."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """More bytes of the stream."""
        self._held += data

    def next(self) -> bytes | None:
        """The next whole frame, if it is there."""
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > self.most_bytes:
            raise WireError(f"a message says it has {length} bytes, the limit is {self.most_bytes}")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        frame = bytes(memoryview(self._held)[_LENGTH.size : end])
        del self._held[:end]
        return frame
