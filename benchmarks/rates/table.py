"""How often what a run did is found: counts of verdicts in NAME.csv, and the table of a page that they give.

A row of the file has what was injected, the size and seed of its runs, and how often each verdict came. A benchmark
replaces the rows of what it ran, then the table between its markers.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).parents[2]

Counts: TypeAlias = Mapping[tuple[str, str], Counter[str]]
"""By what was injected, and the size of the runs."""


class Rates(NamedTuple):
    """A benchmark's name, the page of its table, what its runs differ in, and the verdicts."""

    name: str
    page: str
    injected: str
    verdicts: tuple[str, ...]

    @property
    def begin(self) -> str:
        """The marker above the table."""
        return f"<!-- {self.name}: python benchmarks/{self.name}.py -->\n"

    @property
    def end(self) -> str:
        """The marker below the table."""
        return f"<!-- end of {self.name} -->\n"

    @property
    def path(self) -> Path:
        """The file of the counts."""
        return Path(__file__).with_name(f"{self.name}.csv")

    def counts(self) -> dict[tuple[str, str], Counter[str]]:
        """Return the counts in the file."""
        if not self.path.exists():
            return {}
        with self.path.open(encoding="utf-8", newline="") as file:
            return {
                (row["injected"], row["size"]): Counter({each: int(row[each]) for each in self.verdicts})
                for row in csv.DictReader(file)
            }

    def write(self, counts: Counts) -> None:
        """Replace the counts of these runs in the file, and the table on the page."""
        whole = {**self.counts(), **counts}
        with self.path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["injected", "size", *self.verdicts])
            for key, found in whole.items():
                table.writerow([*key, *(found[each] for each in self.verdicts)])
        (ROOT / self.page).write_text(self.with_table(), encoding="utf-8")

    def table(self) -> Iterator[str]:
        """Yield the lines of the table, with all runs in the last."""
        by_injected: dict[str, Counter[str]] = {}
        for (injected, _), found in self.counts().items():
            by_injected.setdefault(injected, Counter()).update(found)
        yield "".join(f"| {each} " for each in (self.injected, "runs", *self.verdicts)) + "|"
        yield "|---" * (2 + len(self.verdicts)) + "|"
        for injected, found in (*by_injected.items(), ("all", sum(by_injected.values(), Counter()))):
            yield "".join(f"| {each} " for each in (injected, found.total(), *(found[v] for v in self.verdicts))) + "|"

    def with_table(self) -> str:
        """Return the page's text with the table as it is now."""
        head, _, rest = (ROOT / self.page).read_text(encoding="utf-8").partition(self.begin)
        return head + self.begin + "\n" + "\n".join(self.table()) + "\n\n" + self.end + rest.partition(self.end)[2]


WHY = Rates("why_causes", "docs/your_run.md", "injected", ("right", "not to be told apart", "small", "missed", "wrong"))
HANG = Rates("hang_stops", "docs/hung.md", "schedule", ("right", "not to be told apart", "open", "wrong"))
