"""Published runs as they are typed: `python benchmarks/typed.py`.

Each command has its run's sizes, precision, schedule, recomputation and CUDA graphs, and nothing else
(`held_to/typed.py`); presets are as shipped. Writes held_to/data/typed.csv, and the table of README and docs/plan.md:
how far the printed step is off, and the share of measured steps in the printed range, which claims 80 %. Then it lists
which runs are refused, and what commands leave to `plan` that the runs had otherwise. The last line is JSON.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from held_to.printed import data_sets
from held_to.rows import DATA
from held_to.table import PAGES, ROOT, Typed, typed_rows, with_table
from held_to.typed import differences, typed_plan


def write() -> None:
    """Type the command of every run, and write what it printed."""
    with (DATA / "typed.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(Typed._fields)
        for name, rows in data_sets().items():
            data = "bridge" if name in ("bridge_dense", "bridge_dense_25", "bridge_moe") else name
            for row in rows:
                plan = typed_plan(row.job)
                steps = (f"{each:.4f}" for each in (row.seconds, plan.step_s, plan.low_s, plan.high_s))
                words = " ".join(Path(word).name if "/" in word else word for word in plan.command)
                table.writerow([data, row.name, row.kind, row.job.cluster.gpu, *steps, words])
            print(f"typed: {name}, {len(rows)} runs", flush=True)


def main() -> None:
    """Type, list, and write the table."""
    write()
    refused = Counter(row.command for row in typed_rows() if not row.printed_s)
    for command, count in refused.most_common():
        print(f"refused, although it ran, {count} times: treadle plan {command}")
    for name, rows in data_sets().items():
        found = ", ".join(f"{field} {count}" for field, count in sorted(differences(rows).items()))
        print(f"left to plan, and other than the run's: {name}, of {len(rows)}: {found or 'nothing'}")
    for page in PAGES:
        (ROOT / page).write_text(with_table(page), encoding="utf-8")
    fitted = [row for row in typed_rows() if row.data in ("bridge", "simumax") and row.printed_s]
    inside = sum(row.inside for row in fitted)
    print(json.dumps({"runs": len(fitted), "inside": inside, "refused": sum(refused.values())}))


if __name__ == "__main__":
    main()
