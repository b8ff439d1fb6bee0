"""Errors of connections."""

from __future__ import annotations

from treadle.host.errors import TreadleError


class WireError(TreadleError):
    """Bytes came that are no message this end takes: too large, malformed or out of order."""


class MalformedError(WireError):
    """The body of a whole frame is no message that this end takes. The messages after it can be read."""


class WrongKeyError(WireError):
    """The first message was not made with this end's key: the other end has another one, or none."""


class RefusedError(WireError):
    """The other end has closed the connection for a reason that another call does not change."""


class PeerGoneError(TreadleError, ConnectionError):
    """The other end closed the connection, or its process ended."""
