"""What can go wrong with a connection."""

from __future__ import annotations

from treadle.host.errors import TreadleError


class WireError(TreadleError):
    """What came is not a message that this end takes: too large, malformed or out of place."""


class WrongKeyError(WireError):
    """The first message was not made with this end's key: the other end has another one, or none."""


class PeerGoneError(TreadleError, ConnectionError):
    """The other end closed the connection, or its process ended."""
