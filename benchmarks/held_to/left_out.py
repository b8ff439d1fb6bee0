"""Published runs, estimated with constants that were fitted without them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from held_to.fitting import ConstantPool, chip_of, factor_of
from held_to.printed import Row, data_sets
from held_to.rows import Prediction
from treadle.calibrate.log_fit import Floats
from treadle.planner.job_estimate import estimate_job

Group = Callable[[Row], Hashable | None]
"""What is left out together with a run; None: the run is not left out."""


def fitted_rows() -> tuple[Row, ...]:
    """Return the runs that the presets' constants are fitted to."""
    sets = data_sets()
    return tuple(row for name in ("bridge_dense", "bridge_dense_25", "bridge_moe", "simumax") for row in sets[name])


def predictions(pool: ConstantPool, group: Group, *, aged: bool = True) -> Iterator[tuple[Row, Prediction]]:
    """Yield each run of a group with the step that a plan would print, had its group not been published.

    `aged`: times the factor of its release, if other runs show it.
    """
    groups = dict.fromkeys(group(row) for row in pool.runs)
    groups.pop(None, None)
    for each in groups:
        others = [row for row in pool.runs if group(row) != each]
        logs = pool.fit(others)
        known = {factor_of(row) for row in others}
        for row in pool.runs:
            if group(row) == each:
                factor = pool.aged(row, logs) if aged and factor_of(row) in known else 1.0
                yield row, Prediction(row.name, factor * printed_step(pool, row, logs), row.seconds)


def printed_step(pool: ConstantPool, row: Row, logs: Floats) -> float:
    """Return the seconds that a plan prints with fitted constants."""
    return estimate_job(pool.printed(row.job, logs)).simulated_whole().step_s


def by_configuration(row: Row) -> Hashable:
    """Leave out a model on its GPUs, cut in one way."""
    return row.configuration


def by_release(row: Row) -> Hashable | None:
    """Leave out a release of Megatron-Bridge."""
    return row.release or None


def by_chip(row: Row) -> Hashable:
    """Leave out a chip."""
    return chip_of(row.job.cluster.gpu)


def by_simumax(row: Row) -> Hashable | None:
    """Leave out SimuMax as a whole."""
    return None if row.release else "SimuMax"


def by_kimi(row: Row) -> Hashable | None:
    """Leave out Kimi K2."""
    return "Kimi K2" if row.job.model.name == "kimi-k2" else None
