"""Typed messages as bytes: msgspec structs in MessagePack. Decoding builds the given types and evaluates nothing."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from treadle.wire.errors import WireError

M = TypeVar("M")

encode = msgspec.msgpack.encode


class MessageDecoder(Generic[M]):
    """Decodes the bodies of frames; `takes` is the union of messages that may come."""

    def __init__(self, takes: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(takes).decode

    def __call__(self, body: bytes) -> M:
        """Returns the message, or raises WireError where the body is none of the union."""
        try:
            message: M = self._decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValidationError is a DecodeError
            raise WireError(f"a message of {len(body)} bytes is malformed: {error}") from None
        return message
