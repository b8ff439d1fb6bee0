"""What can go wrong with a connection."""

from __future__ import annotations


class WireError(Exception):
    """What came is not a message that this end takes: too large, malformed or out of place."""


class WrongKey(WireError):  # noqa: N818 - a state, not a mistake
    """The first message was not made with this end's key: the other end has another one, or none."""


class Gone(ConnectionError):  # noqa: N818 - a state, not a mistake
    """The other end closed the connection, or its process ended."""
