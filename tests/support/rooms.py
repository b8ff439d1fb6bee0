"""The rooms of the package and who imports whom, read from the imports; and as ARCHITECTURE.md draws them.

python -m tests.support.rooms            prints the drawing's lines as the imports are now
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

import grimp

from tests.support.paths import ROOT

SOURCE = ROOT / "src" / "treadle"
SPLIT = ("runtime", "update")
"""Rooms whose own rooms are drawn."""

ARROW = re.compile(r"^    ([a-z_.]+) +-> +([a-z_. ]+)$", re.MULTILINE)


def room_of(module: str) -> str:
    """The room of a module, `dist` of `treadle.dist.groups`; files of a split room are in the room itself."""
    parts = module.split(".")[1:]
    if parts[:1] and parts[0] in SPLIT and (SOURCE / parts[0] / (parts[1] if parts[1:] else "-")).is_dir():
        return ".".join(parts[:2])
    return parts[0] if parts else "treadle"


@cache
def imports(*, with_types: bool = False) -> dict[str, set[str]]:
    """For each module the modules of the package that it imports, in functions too, and for types alone if asked."""
    graph = grimp.build_graph("treadle", exclude_type_checking_imports=not with_types, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def arrows() -> dict[str, set[str]]:
    """For each room the rooms that it imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in imports().items():
        found[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return {room: rooms - {"treadle"} for room, rooms in found.items() if room not in ("treadle", "__main__")}


def drawn(text: str) -> dict[str, set[str]]:
    """The arrows of a drawing."""
    return {match[1]: set(match[2].split()) for match in ARROW.finditer(text)}


def lines() -> list[str]:
    """The drawing's lines."""
    found = {room: rooms for room, rooms in arrows().items() if rooms}
    width = max(map(len, found))
    return [f"    {room:{width}} -> {' '.join(sorted(rooms))}" for room, rooms in sorted(found.items())]


if __name__ == "__main__":
    print("\n".join(lines()))  # noqa: T201 - a command
