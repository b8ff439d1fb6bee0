"""A mistake that can be planted into a module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    """A mistake, where it is made, and the draws that meet it soonest."""

    about: str
    module: str
    replacements: tuple[tuple[str, str], ...]
    only: str
