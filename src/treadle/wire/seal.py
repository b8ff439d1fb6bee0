"""Authentication of messages between hosts, where no kernel vouches for the peer.

Each end sends a nonce first. The key and both nonces give a session key, and every message ends with an HMAC-SHA256
under it, over the body, the direction and the message's number. So messages that were made without the key, changed,
repeated, left out or recorded earlier are refused. Nothing is encrypted: these messages hold names and shapes, not
weights.
"""

from __future__ import annotations

import hmac
import secrets
import stat
from pathlib import Path

from treadle.wire.errors import WireError, WrongKeyError

NONCE_BYTES = 32
TAG_BYTES = 32
LEAST_KEY_BYTES = 32

KEYS_DIFFER = (
    "its messages are not made with this key, so it has another one; give all ranks the same key file (sha256sum shows "
    "which differ)"
)


class Seal:
    """The seal of one end of a connection; `listens` for the end that was called."""

    def __init__(self, key: bytes, *, listens: bool) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._key, self._listens = key, listens
        self._session: bytes | None = None
        self._sent = self._came = 0

    @property
    def met(self) -> bool:
        """True once the other end's nonce has come."""
        return self._session is not None

    def meet(self, theirs: bytes) -> None:
        """Take the other end's nonce and make the session key."""
        if len(theirs) != NONCE_BYTES or theirs == self.nonce:
            raise WireError(f"a connection between hosts begins with {NONCE_BYTES} random bytes, {len(theirs)} came")
        called, caller = (self.nonce, theirs) if self._listens else (theirs, self.nonce)
        self._session = hmac.digest(self._key, b"treadle update" + called + caller, "sha256")

    def close(self, body: bytes) -> bytes:
        """Return the body with its code appended."""
        self._sent += 1
        return body + self._code(body, self._sent, from_listener=self._listens)

    def open(self, sealed: bytes) -> bytes:
        """Return the body, or raise WireError where its code is wrong."""
        self._came += 1
        body, code = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(code, self._code(body, self._came, from_listener=not self._listens)):
            if self._came == 1:
                raise WrongKeyError(KEYS_DIFFER)
            raise WireError("a message came that was not made with this key")
        return body

    def _code(self, body: bytes, number: int, *, from_listener: bool) -> bytes:
        assert self._session is not None, "a message before the nonces were exchanged"
        head = number.to_bytes(8, "big") + bytes([from_listener])
        return hmac.digest(self._session, head + body, "sha256")


def read_key(path: Path) -> bytes:
    """Return the key in a file, which only its owner may be able to read."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be a file that only its owner can read, its mode is {stat.S_IMODE(status.st_mode):04o}; "
            f"chmod 600 {path}"
        )
    key = path.read_bytes().strip()
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(
            f"the key in {path} has {len(key)} bytes, at least {LEAST_KEY_BYTES} are needed; make one with: "
            f"(umask 077; openssl rand -hex 32 > {path})"
        )
    return key
