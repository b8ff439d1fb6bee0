"""Commands of published runs as typed, with constants that were fitted without the run: what a plan prints for a
configuration, and for a chip, that nobody has measured.

`python benchmarks/fit_presets.py` writes data/typed_left_out.csv; the ranges that a plan prints come from it.
"""

from __future__ import annotations

import csv
from typing import NamedTuple

from held_to.fitting import ConstantPool
from held_to.left_out import Group, by_chip, by_configuration
from held_to.rows import DATA, Prediction, read_rows
from held_to.typed import step_with, typed_plan
from treadle.planner.run_errors import FEWEST, interval


class LeftOut(NamedTuple):
    """A published run, and what its command prints with constants that do not know it."""

    run: str
    kind: str
    gpu: str
    graphs: str
    configuration: str
    """Runs with the same one are left out together."""

    measured_s: float
    configuration_s: float
    chip_s: float

    @property
    def configuration_left_out(self) -> Prediction:
        """The step that is printed without the configuration."""
        return Prediction(self.run, self.configuration_s, self.measured_s)

    @property
    def chip_left_out(self) -> Prediction:
        """The step that is printed without the chip."""
        return Prediction(self.run, self.chip_s, self.measured_s)


def write_left_out(pool: ConstantPool) -> None:
    """Type the command of every run that is not refused, with constants that are fitted without it."""
    names = {group: f"{place}" for place, group in enumerate(dict.fromkeys(map(by_configuration, pool.runs)))}
    known, new = _steps(pool, by_configuration), _steps(pool, by_chip)
    with (DATA / "typed_left_out.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(LeftOut._fields)
        for place, row in enumerate(pool.runs):
            if place in known:
                steps = (f"{each:.4f}" for each in (row.seconds, known[place], new[place]))
                own = names[by_configuration(row)]
                table.writerow([row.name, row.kind, row.job.cluster.gpu, row.job.cuda_graph, own, *steps])


def left_out_rows() -> list[LeftOut]:
    """Return the rows of data/typed_left_out.csv."""
    return [
        LeftOut(
            row["run"],
            row["kind"],
            row["gpu"],
            row["graphs"],
            row["configuration"],
            float(row["measured_s"]),
            float(row["configuration_s"]),
            float(row["chip_s"]),
        )
        for row in read_rows("typed_left_out")
    ]


def range_without(row: LeftOut) -> tuple[float, float]:
    """Return the range, in seconds, that a plan prints where the run's configuration is in no constant and no range."""
    others = [each for each in left_out_rows() if each.kind == row.kind and each.configuration != row.configuration]
    alike = [each for each in others if each.graphs == row.graphs]
    chosen = alike if len({each.configuration for each in alike}) >= FEWEST else others
    low, high = interval([each.configuration_left_out.error for each in chosen])
    return low * row.configuration_s, high * row.configuration_s


def _steps(pool: ConstantPool, group: Group) -> dict[int, float]:
    """Return the printed step of each run by its place, with constants that are fitted without its group."""
    found = {}
    for each in dict.fromkeys(map(group, pool.runs)):
        logs = pool.fit([row for row in pool.runs if group(row) != each])
        for place, row in enumerate(pool.runs):
            if group(row) == each and (job := typed_plan(row.job).job) is not None:
                found[place] = step_with(job, pool.printed(job, logs))
    print(f"{group.__name__}: done", flush=True)
    return found
