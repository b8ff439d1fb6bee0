"""What `pip install treadle` leaves out: an import that needs it says which extra brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

BROUGHT = ("torch", "msgspec", "xxhash", "safetensors", "ortools")
"""The packages that extras bring and modules import at once."""


@contextmanager
def brought_by(extra: str, needed_by: str) -> Iterator[None]:
    """Turn the failed import of such a package into one that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in BROUGHT:
            raise
        text = f"{needed_by} needs {missing}; install it with: pip install 'treadle[{extra}]'"
        raise ModuleNotFoundError(text, name=missing) from error
