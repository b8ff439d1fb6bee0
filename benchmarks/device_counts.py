"""Counts the work that a device and its host are given: `python benchmarks/device_counts.py [--before]`.

Kernels, host time, saved bytes, collectives: each is counted on this machine, on CPU and meta tensors, by dispatch
modes and doubles. None is a time on a GPU. `benchmarks/counted` has a module for each room.

The table, with a column of the tree before and one of this tree, goes to docs/running_on_gpus.md. `--before` stores the
counts as that first column instead; run it with the other tree's sources first on the path:

    PYTHONPATH=/path/to/other/src python benchmarks/device_counts.py --before

The last line is JSON: the counts by room.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' devices

from counted import model, runtime, update

ROOMS: dict[str, Callable[[], dict[str, float]]] = {
    "model": model.counts,
    "runtime": runtime.counts,
    "update": update.counts,
}

HERE = Path(__file__).parent
BEFORE = HERE / "counted" / "before.json"
PAGE = HERE.parent / "docs" / "running_on_gpus.md"
BEGIN, END = "<!-- counts: begin -->\n", "<!-- counts: end -->\n"

Counts = dict[str, dict[str, float]]


def table(before: Counts, now: Counts) -> Iterator[str]:
    """Yield the lines of the table; a dash for what the tree before does not have."""
    yield "| what is counted | before | now |"
    yield "|---|---|---|"
    for room, counts in now.items():
        for name, number in counts.items():
            old = before.get(room, {}).get(name)
            yield f"| {name} | {_text(old)} | {_text(number)} |"


def write(lines: list[str]) -> None:
    """Replace the table of the page."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(head + BEGIN + "\n".join(lines) + "\n" + END + tail)


def _text(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


def main() -> None:
    """Count, and write what was counted."""
    counts = {room: {name: round(number, 3) for name, number in count().items()} for room, count in ROOMS.items()}
    if "--before" in sys.argv[1:]:
        BEFORE.write_text(json.dumps(counts, indent=2) + "\n")
    else:
        lines = list(table(json.loads(BEFORE.read_text()), counts))
        write(lines)
        print("\n".join(lines))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
