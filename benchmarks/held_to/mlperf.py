"""MLPerf Training's Llama 3.1 405B, 256 to 8,192 GPUs, through the closed form that presets are fitted with.

Blind: `treadle.estimate.calibration` is fitted to Megatron-Bridge's runs of the same GPU and precision alone.

`fitted` is where the constant `ring_us` comes from: the step of a machine is taken to be

    T = a (M + (P-1)/V) + c + 2 r B (n-1)

with M micro-batches through P = 8 ranks of V = 8 chunks. a is what the slowest rank takes for a micro-batch, c what a
step takes besides. The last term is what rings of gradients and parameters take besides their bytes: n ranks of data
and context parallelism, B buckets of Megatron's default size (40 million parameters, or a million a rank if that is
more). a and c are a machine's own, from its first two rows; r is one constant for all machines, from the same rows.
None is negative.
"""

from __future__ import annotations

import statistics
from functools import cache

import numpy as np
from scipy.optimize import nnls

from held_to.rows import Miss, Prediction, misses_of, spread
from held_to.runs import bridge_runs, mlperf_runs, title
from treadle.estimate import Job
from treadle.estimate.calibration import Calibration
from treadle.estimate.constants import MeasuredRun
from treadle.estimate.parameters import count_parameters

FITTED = 2
"""Rows of a machine that are fitted."""


def machine(run: MeasuredRun) -> str:
    """Return the machine of a run. NVFP4 runs on GB200 are NVIDIA's own, of one round, on two systems alike."""
    _, submitter, system = run.software.split()
    name = "nvidia" if run.job.precision == "nvfp4" else system.split("_")[0].rstrip("0123456789")
    return f"{submitter} {name} {run.gpu} {run.job.precision}"


@cache
def machines() -> dict[str, list[MeasuredRun]]:
    """Return the runs of each machine, in the order of publication."""
    found: dict[str, list[MeasuredRun]] = {}
    for run in mlperf_runs():
        found.setdefault(machine(run), []).append(run)
    return found


def bucket_steps(job: Job) -> float:
    """Return in how many steps gradients and parameters go around their rings."""
    ranks = job.cp * job.dp
    parameters = count_parameters(job.model) / (job.tp * job.pp)
    return 2 * parameters / max(40e6, 1e6 * ranks) * (ranks - 1)


@cache
def fitted() -> tuple[dict[str, tuple[float, float]], float]:
    """Return a and c of each machine, and r, in seconds."""
    names = list(machines())
    rows = [_row(run, names) / run.seconds for each in machines().values() for run in each[:FITTED]]
    found, _ = nnls(np.array(rows), np.ones(len(rows)), maxiter=10_000)
    own = {name: (float(found[index]), float(found[len(names) + index])) for index, name in enumerate(names)}
    return own, float(found[-1])


def _row(run: MeasuredRun, names: list[str]) -> np.ndarray:
    job, index = run.job, names.index(machine(run))
    row = np.zeros(2 * len(names) + 1)
    row[index] = job.num_microbatches + (job.pp - 1) / job.vpp
    row[len(names) + index] = 1.0
    row[-1] = bucket_steps(job)
    return row


@cache
def blind() -> tuple[Prediction, ...]:
    """Return the predictions of all rows from Megatron-Bridge's runs of the same GPU and precision."""
    found = []
    for runs in machines().values():
        alike = [run for run in bridge_runs() if _machine_kind(run) == _machine_kind(runs[0])]
        calibration = Calibration.fit([run for run in alike if "regression" not in run.flags])
        found += [Prediction(title(run), calibration.predict(run), run.seconds) for run in runs]
    return tuple(found)


def _machine_kind(run: MeasuredRun) -> tuple[str, str]:
    return run.gpu, run.job.precision


def run() -> dict[str, float]:
    """Return the figures of this data set, in percent."""
    return {"mlperf_blind_median": 100 * statistics.median(abs(each.error) for each in blind())}


def distributions() -> dict[str, dict[str, float]]:
    """Return median, mean, 90th percentile and maximum of the absolute errors, by protocol."""
    return {"blind": spread(blind())}


def misses() -> list[Miss]:
    """Return the rows off by more than 15 %, with causes."""
    return misses_of(blind(), lambda _: "not known")
