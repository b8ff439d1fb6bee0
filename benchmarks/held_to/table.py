"""The table of README and docs/plan.md: commands of published runs as typed, beside measured steps.

`python benchmarks/typed.py` writes data/typed.csv, and the table between its markers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from held_to.rows import Prediction, read_rows, spread
from held_to.typed_left_out import LeftOut, left_out_rows, range_without

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/plan.md")
BEGIN, END = "<!-- typed: python benchmarks/typed.py -->\n", "<!-- end of typed -->\n"
_LABELS = {"mlperf": "MLPerf 405B, in no fit", "bridge_fsdp": "FSDP, in no fit", "vtrain": "vTrain, in no fit"}


class Typed(NamedTuple):
    """A command of a published run, and what it printed; 0 where it refused."""

    data: str
    run: str
    kind: str
    gpu: str
    measured_s: float
    printed_s: float
    low_s: float
    high_s: float
    command: str

    @property
    def prediction(self) -> Prediction:
        """The printed step beside the measured one."""
        return Prediction(self.run, self.printed_s, self.measured_s)

    @property
    def inside(self) -> bool:
        """True if the measured step is in the printed range."""
        return self.low_s <= self.measured_s <= self.high_s


def typed_rows() -> list[Typed]:
    """Return the rows of data/typed.csv."""
    return [
        Typed(
            row["data"],
            row["run"],
            row["kind"],
            row["gpu"],
            float(row["measured_s"]),
            float(row["printed_s"]),
            float(row["low_s"]),
            float(row["high_s"]),
            row["command"],
        )
        for row in read_rows("typed")
    ]


def table() -> Iterator[str]:
    """Yield the lines of the table: by GPU, dense and MoE, then what no fit has, then with constants fitted without.

    Where a configuration is left out, it is left out of the range too; refused commands have no step to hold to.
    """
    rows = typed_rows()
    fitted = [row for row in rows if row.data in ("bridge", "simumax")]
    yield "| runs | rows | refused | median | 90th percentile | at most | inside the range | width of the range |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in ("dense", "MoE"):
        for gpu in sorted({row.gpu for row in fitted if row.kind == kind}):
            yield _line(f"{kind} on {gpu.upper()}", [row for row in fitted if (row.kind, row.gpu) == (kind, gpu)])
        yield _line(f"{kind}, all", [row for row in fitted if row.kind == kind])
    for data, label in _LABELS.items():
        yield _line(label, [row for row in rows if row.data == data])
    for kind in ("dense", "MoE"):
        yield _line(f"{kind}, configuration left out", [_without(row) for row in left_out_rows() if row.kind == kind])


def _without(row: LeftOut) -> Typed:
    """Return a run with what its command prints if its configuration is left out."""
    low, high = range_without(row)
    return Typed("left out", row.run, row.kind, row.gpu, row.measured_s, row.configuration_s, low, high, "")


def _line(what: str, rows: list[Typed]) -> str:
    printed = [row for row in rows if row.printed_s]
    errors = spread([row.prediction for row in printed])
    shown = " | ".join(f"{100 * errors[name]:.1f}" for name in ("median", "p90", "max"))
    inside = sum(row.inside for row in printed)
    width = statistics.fmean((row.high_s - row.low_s) / row.printed_s for row in printed)
    share = f"{inside} of {len(printed)}, {100 * inside / len(printed):.0f} % | {100 * width:.0f} %"
    return f"| {what} | {len(rows)} | {len(rows) - len(printed)} | {shown} | {share} |"


def with_table(page: str) -> str:
    """Return a page's text with the table as it is now."""
    text = (ROOT / page).read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + "\n" + "\n".join(table()) + "\n\n" + END + rest.partition(END)[2]
