"""Iterations that vTrain measured with Megatron-LM on 64 to 512 A100: fitted on 20 rows, predicted for the other 89.

An iteration is (M + P - 1) micro-batches of a stage, M heads on the last stage, gradients and optimizer. Five constants
multiply what the machine would take at its peaks: matrix products, bytes of memory, NVLink, NICs; and the time of the
launches of a layer. A fit is robust (rows off by far pull like their root) and is drawn to the priors below.

These runs compute whole layers again, have no sequence parallelism and no fused attention. A forward touches:

- what tensor parallelism does not cut, [tokens, hidden], 11 times: two norms, two dropouts with residual;
- what it cuts, 16 times: queries, keys and values with bias and transposition, GELU on four times the width;
- scores, 5.5 times: product, scale and mask, softmax, dropout, product.

Each counts four times: forward, again, and a backward of twice the forward.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from held_to.rows import Miss, Prediction, misses_of, read_rows, spread

NUM_FITTED = 20
NUM_DRAWS = 40
VOCABULARY = 51200
NODE = 8
PEAK_FLOPS = 312e12
MEMORY_BANDWIDTH = 2.0e12
NVLINK = 300e9
NODE_NIC = 100e9
"""Bytes a second of a node's four HDR links together."""

PASSES = 4
UNCUT, CUT, SCORES = 11, 16, 5.5
OPTIMIZER_BYTES = 40
"""Read and written for a parameter: gradient, master weight, two moments, half-precision weight."""

SMALL = 2000
"""Width of a GPU's share of the hidden states times samples, under which kernels are short against their launch."""

TERMS = ("products", "memory", "nvlink", "nic", "launches")
PRIOR = np.array([1.4, 1.2, 1.3, 1.2, 2e-3])
"""Times over those at the peaks, and seconds for the launches of a layer in all passes."""

PRIOR_SPREAD = 0.5
"""Of a constant's logarithm."""

ROW_SPREAD = 0.03
"""Of a row's error; errors far above it pull like their root."""


@dataclass(frozen=True)
class Run:
    """A measured iteration."""

    gpus: int
    global_batch_size: int
    micro_batch_size: int
    hidden: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    billion_parameters: float
    seconds: float

    @property
    def name(self) -> str:
        """The row in words."""
        plan = f"TP{self.tp} DP{self.dp} PP{self.pp}"
        return f"{self.billion_parameters:g}B {plan} micro-batch {self.micro_batch_size}"

    @property
    def plan(self) -> tuple[int, int, int, int]:
        """What runs that differ only in their micro-batches have in common."""
        return self.hidden, self.tp, self.dp, self.pp

    @property
    def sample_seconds(self) -> float:
        """Seconds of a stage for one sample, without the bubble."""
        microbatches = self.global_batch_size / self.dp / self.micro_batch_size
        return self.seconds / (microbatches + self.pp - 1) / self.micro_batch_size

    def terms(self) -> list[float]:
        """Return the seconds of each of TERMS at the machine's peaks, and the layers launched."""
        microbatches = self.global_batch_size / self.dp / self.micro_batch_size
        ticks = microbatches + self.pp - 1
        tokens, depth = self.micro_batch_size * self.seq_len, self.layers / self.pp
        forward = tokens * (24 * self.hidden**2 + 4 * self.seq_len * self.hidden) / self.tp
        head = 6 * tokens * self.hidden * VOCABULARY / self.tp
        parameters = (12 * self.layers / self.pp * self.hidden + VOCABULARY) * self.hidden / self.tp
        return [
            (ticks * depth * PASSES * forward + microbatches * head) / PEAK_FLOPS,
            (ticks * depth * PASSES * self.layer_bytes() + OPTIMIZER_BYTES * parameters) / MEMORY_BANDWIDTH,
            ticks * depth * self.all_reduce_bytes() / NVLINK if self.tp <= NODE else 0.0,
            ticks * self.nic_seconds() + self.gradient_seconds(parameters),
            ticks * depth,
        ]

    def layer_bytes(self) -> float:
        """Bytes of memory that a layer's forward reads and writes besides its products."""
        tokens = self.micro_batch_size * self.seq_len
        width = UNCUT * self.hidden + CUT * self.hidden / self.tp + SCORES * self.heads / self.tp * self.seq_len
        return 2 * tokens * width

    def all_reduce_bytes(self) -> float:
        """Bytes that a GPU sends in a layer's six all-reduces of tensor parallelism."""
        return 6 * 2 * (self.tp - 1) / self.tp * 2 * self.micro_batch_size * self.seq_len * self.hidden

    def nic_seconds(self) -> float:
        """Messages between nodes of a stage and micro-batch; GPUs of a tensor-parallel group send a share each."""
        wide = self.layers / self.pp * self.all_reduce_bytes() / NODE_NIC if self.tp > NODE else 0.0
        sent = 2 * 2 * self.micro_batch_size * self.seq_len * self.hidden / self.tp
        return wide + (sent / (NODE_NIC / NODE) if self.pp > 1 else 0.0)

    def gradient_seconds(self, parameters: float) -> float:
        """All-reduce of FP32 gradients; the tensor-parallel ranks of a node share its NICs."""
        sent = 4 * parameters * 2 * (self.dp - 1) / self.dp
        return sent / (NODE_NIC / min(self.tp, NODE))


def read_runs() -> list[Run]:
    """Return the 109 runs."""
    runs = []
    for row in read_rows("vtrain"):
        seconds, billions = float(row.pop("ms")) / 1000, float(row.pop("billion_parameters"))
        runs.append(
            Run(**{key: int(value) for key, value in row.items()}, seconds=seconds, billion_parameters=billions)
        )
    return runs


def fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the constants that explain these rows best, given the priors."""

    def residuals(logs: np.ndarray) -> np.ndarray:
        errors = np.log(terms @ np.exp(logs) / seconds) / ROW_SPREAD
        robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([robust, (logs - np.log(PRIOR)) / PRIOR_SPREAD])

    constants: np.ndarray = np.exp(least_squares(residuals, np.log(PRIOR)).x)
    return constants


def draws() -> list[list[Prediction]]:
    """Return the predictions of the 89 other rows for each draw of 20."""
    runs = read_runs()
    terms, seconds = np.array([run.terms() for run in runs]), np.array([run.seconds for run in runs])
    found = []
    for seed in range(NUM_DRAWS):
        order = np.random.default_rng(seed).permutation(len(runs))
        fitted, held = order[:NUM_FITTED], order[NUM_FITTED:]
        predicted = terms @ fit(terms[fitted], seconds[fitted])
        found.append([Prediction(runs[row].name, float(predicted[row]), runs[row].seconds) for row in sorted(held)])
    return found


def run() -> dict[str, float]:
    """Return the median absolute error of the median draw, in percent."""
    return {"vtrain_median": 100 * statistics.median(spread(draw)["median"] for draw in draws())}


def misses() -> list[Miss]:
    """Return the rows that are off by more than 15 % in the median of the draws that leave them out."""
    found: dict[tuple[str, float], list[float]] = {}
    for draw in draws():
        for each in draw:
            found.setdefault((each.row, each.measured), []).append(each.predicted)
    medians = [Prediction(row, statistics.median(all_), measured) for (row, measured), all_ in found.items()]
    return misses_of(medians, _cause)


def _cause(prediction: Prediction) -> str:
    """Say what is known of a row that is off."""
    runs = read_runs()
    this = next(run for run in runs if (run.name, run.seconds) == (prediction.row, prediction.measured))
    plan = [run for run in runs if run.plan == this.plan]
    best = min(plan, key=lambda run: run.sample_seconds)
    gain = f"{this.sample_seconds / best.sample_seconds - 1:.0%}"
    if this is best:
        return "no micro-batch of this plan is faster; why is not known"
    if this is max(plan, key=lambda run: run.micro_batch_size):
        return (
            f"a sample takes {gain} longer than with micro-batches of {best.micro_batch_size}: probably short of memory"
        )
    if this.hidden * this.micro_batch_size / this.tp < SMALL:
        return f"small kernels, {gain} longer a sample than with {best.micro_batch_size}: launches do not keep up"
    return f"a sample takes {gain} longer than with micro-batches of {best.micro_batch_size}; why is not known"
