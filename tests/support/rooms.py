"""The rooms of the package and who imports whom, read from the imports; and as ARCHITECTURE.md draws them.

python -m tests.support.rooms            prints the drawing's lines as the imports are now
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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


def imports_of(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, in functions too, but not for types alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "treadle":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if is_module(name) else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "treadle")


def is_module(name: str) -> bool:
    """Is it a file or a folder of the package, rather than a name in one."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def arrows() -> dict[str, set[str]]:
    """For each room the rooms that it imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        parts = ("treadle", *path.relative_to(SOURCE).with_suffix("").parts)
        room = room_of(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        found[room] |= {room_of(name) for name in imports_of(path)} - {room}
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
