"""What a few measured runs are worth: `python benchmarks/calibrate.py [--draws 20]`.

Each GPU of Megatron-Bridge's published runs in turn is taken to be new: its data sheet is known, its constants are
not. They are those that all runs on other chips give (`others`), or the defaults (`defaults`). Then 1, 3 or 5 of its
runs are drawn at random, constants are fitted to them as `treadle calibrate` does, and its other runs are predicted by
simulation, save those of the same configuration as a drawn one: another release of the same job would be too easy.
Runs with parameters cut over replicas or with layers offloaded are left out: a plan has neither.

A draw has the median of the absolute errors of these predictions, before and after. Printed are, over all draws, the
median and the mean of that, in percent, and how often it became smaller. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import lt
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from held_to.bridge import runs as bridge_runs
from treadle.calibrate.constants_of_job import constants_of
from treadle.calibrate.fit import fit_paths
from treadle.calibrate.path_form import PathForm
from treadle.estimate import Calibration, Cluster, Job, MeasuredRun, load_cluster
from treadle.estimate.calibration import configuration
from treadle.estimate.constants import chip_of
from treadle.estimate.stages import stage_rows

GPUS = ("h100", "b200", "b300", "gb200", "gb300")
COUNTS = (1, 3, 5)
SEED = 0


@dataclass(frozen=True)
class Outcome:
    """Medians of a draw: absolute errors of the predicted runs, before and after."""

    before: float
    after: float


def planned_runs(gpu: str) -> list[MeasuredRun]:
    """Return the runs of a GPU that a plan could have."""
    return [
        run for run in bridge_runs() if run.gpu == gpu and run.job.sharding != "parameters" and not run.offload_layers
    ]


def constants_before(gpu: str, prior: str) -> Mapping[str, float]:
    """Return the constants of a GPU that nobody has measured."""
    if prior == "defaults":
        return {}
    others = [run for run in bridge_runs() if chip_of(run) != gpu.removeprefix("g")]
    return Calibration.fit(others).efficiency(gpu)


def planned_job(run: MeasuredRun, efficiency: Mapping[str, float]) -> Job:
    """Return a run's job as a plan has it. Overlap of the all-to-all is a schedule's: with one chunk there is none."""
    job = replace(run.job, cluster=replace(run.job.cluster, efficiency=dict(efficiency)), layout=stage_rows(run.job))
    return replace(job, schedule="interleaved-overlap") if job.a2a_overlap and job.vpp > 1 else job


def median_error(forms: Sequence[PathForm], runs: Sequence[MeasuredRun], logs: np.ndarray) -> float:
    """Return the median of the absolute errors of simulated steps, in percent."""
    known = {form.job: form.simulated(logs) for form in forms}
    return 100 * statistics.median(
        abs(known[form.job] / run.seconds - 1) for form, run in zip(forms, runs, strict=True)
    )


def study(gpu: str, prior: str, draws: int) -> dict[int, list[Outcome]]:
    """Return the outcomes of all draws for a GPU, by the number of runs that are fitted."""
    efficiency, runs = constants_before(gpu, prior), planned_runs(gpu)
    jobs = [planned_job(run, efficiency) for run in runs]
    keys = sorted({key for job in jobs for key in constants_of(job)})
    by_job = {job: PathForm.of(job, keys) for job in dict.fromkeys(jobs)}
    forms = [by_job[job] for job in jobs]
    cluster: Cluster = replace(load_cluster(gpu), num_gpus=max(job.cluster.num_gpus for job in jobs))
    drawn, found = random.Random(SEED), {}
    for count in COUNTS:
        found[count] = [_draw(drawn.sample(range(len(runs)), count), forms, runs, cluster) for _ in range(draws)]
    return found


def _draw(chosen: Sequence[int], forms: Sequence[PathForm], runs: Sequence[MeasuredRun], cluster: Cluster) -> Outcome:
    taken = {configuration(runs[index]) for index in chosen}
    left = [index for index, run in enumerate(runs) if configuration(run) not in taken]
    logs = fit_paths([forms[index] for index in chosen], [runs[index].seconds for index in chosen], cluster).logs
    rest, measured = [forms[index] for index in left], [runs[index] for index in left]
    return Outcome(median_error(rest, measured, np.zeros_like(logs)), median_error(rest, measured, logs))


def main() -> None:
    """Print the table, and the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="How often runs are drawn.")
    draws, figures = parser.parse_args().draws, {}
    print("constants of GPU    runs jobs   k  median before  after   mean before  after   better in")
    for prior in ("others", "defaults"):
        every: dict[int, list[Outcome]] = {count: [] for count in COUNTS}
        for gpu in GPUS:
            runs = planned_runs(gpu)
            size = f"{len(runs):4} {len({configuration(run) for run in runs}):4}"
            for count, outcomes in study(gpu, prior, draws).items():
                every[count] += outcomes
                figures[f"{prior}_{gpu}_{count}"] = _row(prior, gpu, size, count, outcomes)
        for count in COUNTS:
            figures[f"{prior}_all_{count}"] = _row(prior, "all", "", count, every[count])
    print(json.dumps(figures))


def _row(prior: str, gpu: str, size: str, count: int, outcomes: Sequence[Outcome]) -> dict[str, float]:
    before, after = ([getattr(each, name) for each in outcomes] for name in ("before", "after"))
    medians, means = map(statistics.median, (before, after)), map(statistics.fmean, (before, after))
    better = 100 * sum(map(lt, after, before)) / len(outcomes)
    shown = [*medians, *means]
    print(
        f"{prior:12} {gpu:6} {size:9}   {count} {shown[0]:13.1f}  {shown[1]:5.1f}   {shown[2]:11.1f}  {shown[3]:5.1f}"
        f"   {better:7.0f} %",
        flush=True,
    )
    names = ("median_before", "median_after", "mean_before", "mean_after", "better")
    return {name: round(value, 2) for name, value in zip(names, (*shown, better), strict=True)}


if __name__ == "__main__":
    main()
