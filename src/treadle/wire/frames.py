"""The one framing of Treadle's connections: four bytes of length, big-endian, then a body of that many bytes."""

from __future__ import annotations

import struct

from treadle.wire.errors import WireError

_LENGTH = struct.Struct("!I")

MOST_BYTES = 1 << 30
"""The largest message by default. The wants of a worker take about 190 bytes a tensor, so there is room."""

FIRST_BYTES = 4 << 10
"""The largest first message of a connection, before the other end has identified itself."""


def framed(body: bytes, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the body after its length."""
    if len(body) > most_bytes:
        raise WireError(f"a message of {len(body)} bytes is larger than the limit of {most_bytes}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into bodies. Memory is taken for bytes that have arrived, not for an announced length."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes of the stream."""
        self._held += data

    def next(self) -> bytes | None:
        """Return the next whole body, or None. Raises WireError for a length beyond `most_bytes`."""
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > self.most_bytes:
            raise WireError(f"a message has {length} bytes, the limit is {self.most_bytes}")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        frame = bytes(memoryview(self._held)[_LENGTH.size : end])
        del self._held[:end]
        return frame
