"""What a few measured runs are worth: `python benchmarks/calibrate.py [--draws 20]`.

Each GPU of Megatron-Bridge's published runs in turn is taken to be new: its data sheet is known, its constants are the
defaults. Then 1, 3 or 5 of its runs are drawn at random, constants are fitted to them as `treadle calibrate` does, and
its other runs are predicted by simulation, save those of the same configuration as a drawn one: another release of the
same job would be too easy.

A draw has the median of the absolute errors of these predictions, before and after. Printed are, over all draws, the
median and the mean of that, in percent, and how often it became smaller. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import lt
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from held_to.runs import PublishedRun, bridge_runs
from treadle.calibrate.constants_of_job import constants_of
from treadle.calibrate.fit import fit_paths
from treadle.calibrate.path_form import PathForm
from treadle.estimate import Cluster, Job, load_cluster

GPUS = ("h100", "b200", "b300", "gb200", "gb300")
COUNTS = (1, 3, 5)
SEED = 0
FIRST_RELEASE = "26.02"
"""Recipes of older releases are not known exactly."""


@dataclass(frozen=True)
class Outcome:
    """Medians of a draw: absolute errors of the predicted runs, before and after."""

    before: float
    after: float


def runs_of(gpu: str) -> list[PublishedRun]:
    """Return the runs of a GPU."""
    runs = (run for run in bridge_runs() if run.job.sharding != "parameters")
    return [run for run in runs if run.gpu == gpu and run.release >= FIRST_RELEASE]


def configuration(run: PublishedRun) -> tuple[object, ...]:
    """Return what tells configurations apart: model, GPUs, precision, batch and cuts; not flags, not the release."""
    job = run.job
    sizes = (job.global_batch_size, job.micro_batch_size, job.seq_len)
    cuts = (job.tp, job.cp, job.pp, job.vpp, job.ep)
    return (job.model.name, run.gpu, job.cluster.num_gpus, job.precision, *sizes, *cuts)


def unfitted(job: Job) -> Job:
    """Return a job on a cluster that nobody has measured: its constants are the defaults."""
    return replace(job, cluster=replace(job.cluster, efficiency={}))


def median_error(forms: Sequence[PathForm], runs: Sequence[PublishedRun], logs: np.ndarray) -> float:
    """Return the median of the absolute errors of simulated steps, in percent."""
    known = {form.job: form.simulated(logs) for form in forms}
    return 100 * statistics.median(
        abs(known[form.job] / run.seconds - 1) for form, run in zip(forms, runs, strict=True)
    )


def study(gpu: str, draws: int) -> dict[int, list[Outcome]]:
    """Return the outcomes of all draws for a GPU, by the number of runs that are fitted."""
    runs = runs_of(gpu)
    jobs = [unfitted(run.job) for run in runs]
    keys = sorted({key for job in jobs for key in constants_of(job)})
    by_job = {job: PathForm.of(job, keys) for job in dict.fromkeys(jobs)}
    forms = [by_job[job] for job in jobs]
    cluster: Cluster = replace(load_cluster(gpu), num_gpus=max(job.cluster.num_gpus for job in jobs))
    drawn, found = random.Random(SEED), {}
    for count in COUNTS:
        found[count] = [_draw(drawn.sample(range(len(runs)), count), forms, runs, cluster) for _ in range(draws)]
    return found


def _draw(chosen: Sequence[int], forms: Sequence[PathForm], runs: Sequence[PublishedRun], cluster: Cluster) -> Outcome:
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
    every: dict[int, list[Outcome]] = {count: [] for count in COUNTS}
    print("GPU    runs jobs   k  median before  after   mean before  after   better in")
    for gpu in GPUS:
        runs = runs_of(gpu)
        size = f"{len(runs):4} {len({configuration(run) for run in runs}):4}"
        for count, outcomes in study(gpu, draws).items():
            every[count] += outcomes
            figures[f"{gpu}_{count}"] = _row(gpu, size, count, outcomes)
    for count in COUNTS:
        figures[f"all_{count}"] = _row("all", "", count, every[count])
    print(json.dumps(figures))


def _row(gpu: str, size: str, count: int, outcomes: Sequence[Outcome]) -> dict[str, float]:
    before, after = ([getattr(each, name) for each in outcomes] for name in ("before", "after"))
    medians, means = map(statistics.median, (before, after)), map(statistics.fmean, (before, after))
    better = 100 * sum(map(lt, after, before)) / len(outcomes)
    shown = [*medians, *means]
    print(
        f"{gpu:6} {size:9}   {count} {shown[0]:13.1f}  {shown[1]:5.1f}   {shown[2]:11.1f}  {shown[3]:5.1f}"
        f"   {better:7.0f} %",
        flush=True,
    )
    names = ("median_before", "median_after", "mean_before", "mean_after", "better")
    return {name: round(value, 2) for name, value in zip(names, (*shown, better), strict=True)}


if __name__ == "__main__":
    main()
