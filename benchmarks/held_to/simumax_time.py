"""Steps that SimuMax measured on 8 B200: fitted on Llama-3 70B with 12 layers, predicted for 405B with 4.

Works are `treadle.estimate`'s. Eight constants multiply their times at the peaks; a fit is robust and is drawn to the
priors below. One of them is not a share of a rate: the host's time for a launch. A 70B layer cut eight ways is shorter
on the GPU than its launches are on the host, one of 405B is not; without it TP8 of 405B is predicted 13 % too slow.
Kernels of a block differ, some wait for the host and some do not: the block takes a smooth maximum of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from held_to.rows import Miss, Prediction, misses_of, read_rows, spread
from treadle.estimate import Job, load_cluster, load_model
from treadle.estimate.rates import PeakTimes
from treadle.estimate.stages import rank_rows
from treadle.estimate.step_time import GRAD_BYTES, PARAM_BYTES, data_parallel_seconds, job_times, optimizer_seconds
from treadle.estimate.work import BF16

FITTED, HELD_OUT = "llama3-70b", "llama3-405b"
GPUS = "b200:8"

RATES = ("products", "attention", "memory", "tp", "cp")
CONSTANTS = (*RATES, "host_us", "optimizer", "dp")
PRIOR = np.array([1.3, 1.6, 1.2, 1.3, 1.0, 40.0, 1.6, 0.7])
"""Times over those at the peaks, and microseconds of the host for a launch. A part of dp is taken to be hidden."""

PRIOR_SPREAD = 1.0
"""Of a constant's logarithm."""

ROW_SPREAD = 0.02
"""Of a row's error; errors far above it pull like their root."""

STARTS = (5.0, 20.0, 40.0, 80.0)
"""Microseconds of the host that fits start from: below the GPU's time they have no slope. The fitted rows decide."""

SHARPNESS = 6
"""Power of the smooth maximum."""


@dataclass(frozen=True)
class Case:
    """A measured step with the seconds of its parts at the machine's peaks."""

    name: str
    model: str
    num_microbatches: int
    stages: tuple[str, ...]
    """The blocks of each stage."""

    blocks: dict[str, tuple[np.ndarray, float]]
    """Seconds of a block by RATES, and its launches."""

    optimizer: float
    data_parallel: float
    measured: float

    def predict(self, constants: np.ndarray) -> float:
        """Return the seconds of a step: all micro-batches on the slowest stage, one on the others."""
        rates, host = constants[: len(RATES)], 1e-6 * constants[len(RATES)]
        block = {
            letter: float((times @ rates) ** SHARPNESS + (launches * host) ** SHARPNESS) ** (1 / SHARPNESS)
            for letter, (times, launches) in self.blocks.items()
        }
        stages = [sum(block[letter] for letter in row) for row in self.stages]
        slowest = max(stages)
        tail = constants[-2] * self.optimizer + constants[-1] * self.data_parallel
        return float(self.num_microbatches * slowest + sum(stages) - slowest + tail)


def read_cases(model: str) -> list[Case]:
    """Return the cases of a model."""
    return [_case(row) for row in read_rows("simumax") if row["model"] == model]


def _case(row: dict[str, str]) -> Case:
    job = Job(
        replace(load_model(row["model"]), num_hidden_layers=int(row["layers"])),
        replace(load_cluster(GPUS), efficiency={"optimizer": 1.0, "dp": 1.0}),
        tp=int(row["tp"]),
        cp=int(row["cp"]),
        pp=int(row["pp"]),
        global_batch_size=int(row["num_microbatches"]) * int(row["dp"]),
        seq_len=int(row["seq_len"]),
    )
    times = job_times(job)
    stages = tuple("".join(chunks) for chunks in rank_rows(job))
    blocks = {letter: (_by_rate(job, letter, step), step.launch) for letter, step in times.step.items()}
    parameters = max(sum(times.parameters[letter] for letter in stage) for stage in stages)
    return Case(
        row["case"],
        row["model"],
        job.num_microbatches,
        stages,
        blocks,
        optimizer_seconds(job, parameters, 0),
        sum(data_parallel_seconds(job, parameters, 0, size) for size in (GRAD_BYTES, PARAM_BYTES)),
        float(row["ms"]) / 1000,
    )


def _by_rate(job: Job, letter: str, step: PeakTimes) -> np.ndarray:
    exchanged = _all_to_all_seconds(job) if letter == "t" else 0.0
    products, memory = step.gemm + step.gemm_bf16, step.gemm_bytes + step.vector
    return np.array([products, step.attention, memory, step.tp, exchanged])


def _all_to_all_seconds(job: Job) -> float:
    """Queries, keys, values and outputs of a layer, forward and backward: these runs cut heads, not keys, by cp."""
    model = job.model
    width = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim / job.tp
    return 2 * (job.cp - 1) / job.cp * BF16 * job.tokens * width / job.cluster.nvlink_bandwidth


def fit(cases: list[Case]) -> np.ndarray:
    """Return the constants that explain these cases best, given the priors."""
    measured = np.array([case.measured for case in cases])

    def residuals(logs: np.ndarray) -> np.ndarray:
        predicted = np.array([case.predict(np.exp(logs)) for case in cases])
        errors = np.log(predicted / measured) / ROW_SPREAD
        robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([robust, (logs - np.log(PRIOR)) / PRIOR_SPREAD])

    found = []
    for host in STARTS:
        begin = np.log(PRIOR)
        begin[len(RATES)] = np.log(host)
        found.append(least_squares(residuals, begin))
    constants: np.ndarray = np.exp(min(found, key=lambda each: each.cost).x)
    return constants


def predictions() -> list[Prediction]:
    """Return the held-out cases, in seconds."""
    constants = fit(read_cases(FITTED))
    return [Prediction(case.name, case.predict(constants), case.measured) for case in read_cases(HELD_OUT)]


def run() -> dict[str, float]:
    """Return the median absolute error, in percent."""
    return {"simumax_time_median": 100 * spread(predictions())["median"]}


def misses() -> list[Miss]:
    """Return the cases off by more than 15 %."""
    return misses_of(predictions(), lambda _: "none known")
