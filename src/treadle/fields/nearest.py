"""The nearest known name to a wrong one: one rule for all messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

_CLOSE = 0.65
"""The similarity from which a name is suggested: mi300x is not meant to be b300."""

_MOST_COMPARED = 10_000
"""Names that are compared: a model of a trillion parameters has 140,000 tensors, which would take seconds."""

_MOST_LISTED = 50


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a wrong one most likely stands for; None if no name is close.

    Case does not count. A dotted name that lacks its first parts, or has more of them, is the nearest; if no name is
    close, one that goes on with an underscore is.

    Example:
        >>> nearest("placment", ["name", "placement"]), nearest("x", ["name", "placement"])
        ('placement', None)
        >>> nearest("layers.0.norm", ["layers.0.form", "model.layers.0.norm"])
        'model.layers.0.norm'
        >>> nearest("pp_size", ["pp", "ep"])
        'pp'

    """
    names = list(known)
    for other in names:
        if other.endswith(f".{name}") or name.endswith(f".{other}"):
            return other
    folded = {other.casefold(): other for other in islice(names, _MOST_COMPARED)}
    close = difflib.get_close_matches(name.casefold(), folded, 1, _CLOSE)
    if close:
        return folded[close[0]]
    return next((other for other in names if other.startswith(f"{name}_") or name.startswith(f"{other}_")), None)


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a message that lists the known names itself; nothing if no name is close."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near is not None else ""


def did_you_mean(name: str, known: Iterable[str], most: int = _MOST_LISTED) -> str:
    """Return the way out of a wrong name: the nearest known one, or if none is close the known ones.

    Example:
        >>> did_you_mean("verfy", ["verify", "show"]), did_you_mean("x", ["verify", "show"])
        ("did you mean 'verify'?", 'known are verify, show')

    """
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {near!r}?"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"known are {', '.join(names[:most])}{more}" if names else "there is none"
