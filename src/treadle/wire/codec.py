"""Typed messages as bytes: msgspec structs in MessagePack. Decoding builds the given types and evaluates nothing."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from treadle.wire.errors import MalformedError, WireError

M = TypeVar("M")


def encode(message: Any) -> bytes:
    """Return the message's bytes. Raises WireError where it holds what no message can: text with surrogates, say."""
    try:
        return msgspec.msgpack.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error


def sendable(text: str) -> str:
    """Return a text that a message can hold: with surrogates escaped."""
    return text.encode(errors="backslashreplace").decode()


class MessageDecoder(Generic[M]):
    """Decodes the bodies of frames; `takes` is the union of messages that may come."""

    def __init__(self, takes: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(takes).decode

    def __call__(self, body: bytes) -> M:
        """Return the message, or raise MalformedError where the body is none of the union."""
        try:
            message: M = self._decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValidationError is a DecodeError
            raise MalformedError(f"a message of {len(body)} bytes is malformed: {error}") from None
        return message
