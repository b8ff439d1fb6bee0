"""Constants of a cluster, fitted to measured runs: achieved shares of peak rates, by GPU and precision.

The logarithm of each factor has a prior: the default of `EFFICIENCY`, so many percent either way. What runs do not tell
stays near it. A factor that depends on precision or GPU is a common one times small ones of their own, so that runs of
one GPU inform all (partial pooling). `treadle.estimate.log_fit` says how they are weighed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle.estimate.efficiency import EFFICIENCY
from treadle.estimate.job import Job
from treadle.estimate.log_fit import Floats, LogPrior, most_likely
from treadle.estimate.step_terms import TERMS, step_terms


@dataclass(frozen=True)
class MeasuredRun:
    """A job that was run, and its seconds a step."""

    job: Job
    seconds: float
    software: str = ""
    """The release that it ran on."""

    flags: tuple[str, ...] = ()
    """What the job does not say and a run depends on: the dispatcher, which parts graphs hold."""

    offload_layers: int = 0

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return self.job.cluster.gpu or self.job.cluster.name


WIDTHS = {
    "attention": 0.3, "cast": 0.4, "cp": 0.6, "dp": 0.6, "dp_hidden": 0.8, "ep_hidden": 0.6, "ep_nic": 0.4,
    "ep_nvlink": 0.4, "fsdp_hidden": 0.8, "gemm": 0.3, "grouped": 0.3, "latency_us": 0.7, "launch_hidden": 0.6,
    "launch_us": 0.6, "memory": 0.3, "optimizer": 0.5, "pcie": 0.7, "permute": 0.4, "pp": 0.6, "pp_hidden": 0.8,
    "step_us": 0.3, "tp": 0.6,
}  # fmt: skip
"""Standard deviation of the logarithm of each factor's prior."""

_REFINED = {"gemm": 0.15, "grouped": 0.15, "attention": 0.15, "cast": 0.3, "tp": 0.4, "launch_us": 0.3}
"""The same of the small factors that are one GPU's or one precision's own."""


def prior_of(name: str) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of a factor. `gemm:fp8` is a small factor of `gemm`."""
    base, _, refined = name.partition(":")
    if refined:
        return 0.0, _REFINED[base]
    default = EFFICIENCY[base][0]
    if base.endswith("_us"):
        return float(np.log(default if base != "step_us" else 1e-6 * default)), WIDTHS[base]
    if base.endswith("_hidden"):
        link = {"dp_hidden": "dp", "fsdp_hidden": "dp", "pp_hidden": "pp"}.get(base)
        shown = 1 - default
        return float(np.log(shown / EFFICIENCY[link][0] if link else shown)), WIDTHS[base]
    return float(-np.log(default)), WIDTHS[base]


def chip_of(run: MeasuredRun) -> str:
    """Return what GPUs with the same chip share: gb200 and b200 are both b200; the ultra ones are b300."""
    return run.gpu.removeprefix("g")


def names_of(run: MeasuredRun) -> dict[str, tuple[str, ...]]:
    """Return the factors that multiply each term of a run."""
    job, chip = run.job, chip_of(run)
    precision, family = job.precision, "hopper" if chip.startswith("h") else "blackwell"
    hidden = ("ep_hidden",) if job.a2a_overlap else ()
    ahead = () if job.model.is_moe else ("launch_hidden",)
    return {
        "gemm": ("gemm", f"gemm:{precision}", f"gemm:{chip}:{precision}"),
        "gemm_bf16": ("gemm",),
        "gemm_bytes": ("memory",),
        "grouped": ("grouped", f"grouped:{precision}", f"grouped:{chip}:{precision}"),
        "grouped_bytes": ("memory",),
        "attention": ("attention", f"attention:{chip}"),
        "vector": ("memory",),
        "cast": ("cast", f"cast:{precision}"),
        "permute": ("permute",),
        "tp": ("tp", f"tp:{family}"),
        "cp": ("cp",),
        "ep_nvlink": ("ep_nvlink", *hidden),
        "ep_nic": ("ep_nic", *hidden),
        "launch": ("launch_us", f"launch_us:{job.cuda_graph}", f"launch_us:{family}", *ahead),
        "latency": ("latency_us",),
        "dp": ("dp_hidden",),
        "fsdp": ("fsdp_hidden",),
        "optimizer": ("optimizer",),
        "pp": ("pp_hidden",),
        "pcie": ("pcie",),
        "step": ("step_us",),
    }


class TermTable:
    """Terms of runs, and which factors multiply them, as arrays."""

    def __init__(self, runs: Sequence[MeasuredRun], factors: Sequence[str] | None = None) -> None:
        named = [names_of(run) for run in runs]
        known = sorted({name for row in named for names in row.values() for name in names})
        self.factors = list(factors) if factors is not None else known
        place = {name: index for index, name in enumerate(self.factors)}
        terms = [step_terms(run.job, offload_layers=run.offload_layers) for run in runs]
        self.terms = np.array([[row[name] for name in TERMS] for row in terms]).reshape(len(runs), len(TERMS))
        self.uses = np.zeros((len(runs), len(TERMS), len(self.factors)))
        for index, row in enumerate(named):
            for term, name in enumerate(TERMS):
                for factor in row[name]:
                    if factor in place:  # a GPU or precision that was never measured has none of its own
                        self.uses[index, term, place[factor]] += 1

    def log_seconds(self, logs: Floats, rows: npt.NDArray[np.intp]) -> Floats:
        """Return the logarithms of the seconds of some rows."""
        return np.asarray(np.log(self._parts(logs, rows).sum(axis=1)))

    def slopes(self, logs: Floats, rows: npt.NDArray[np.intp]) -> Floats:
        """Return the derivatives of `log_seconds` by each logarithm."""
        parts = self._parts(logs, rows)
        return np.asarray(np.einsum("rt,rtf->rf", parts, self.uses[rows]) / parts.sum(axis=1)[:, None])

    def _parts(self, logs: Floats, rows: npt.NDArray[np.intp]) -> Floats:
        return np.asarray(self.terms[rows] * np.exp(self.uses[rows] @ logs))


def fit_logs(table: TermTable, log_seconds: Floats, rows: npt.NDArray[np.intp], steps: int = 20) -> Floats:
    """Return the logarithms of the factors that fit the measured seconds of some rows best."""
    priors = np.array([prior_of(name) for name in table.factors])
    prior = LogPrior.independent(priors[:, 0], priors[:, 1])
    return most_likely(
        lambda logs: (table.log_seconds(logs, rows), table.slopes(logs, rows)), log_seconds[rows], prior, steps
    ).logs


def efficiency_of(logs: Mapping[str, float], gpu: str, precisions: Sequence[str]) -> dict[str, float]:
    """Return the [efficiency] section of a GPU from fitted logarithms of factors."""
    chip = gpu.removeprefix("g")
    family = "hopper" if chip.startswith("h") else "blackwell"

    def over(*names: str) -> float:
        return float(np.exp(-sum(logs.get(name, 0.0) for name in names)))

    found = {"gemm": over("gemm"), "grouped": over("grouped")}
    for precision in precisions:
        found[f"gemm_{precision}"] = over("gemm", f"gemm:{precision}", f"gemm:{chip}:{precision}")
        found[f"grouped_{precision}"] = over("grouped", f"grouped:{precision}", f"grouped:{chip}:{precision}")
        if precision != "bf16":
            found[f"cast_{precision}"] = over("cast", f"cast:{precision}")
    found["attention"] = over("attention", f"attention:{chip}")
    found["tp"] = over("tp", f"tp:{family}")
    for name in ("memory", "permute", "cp", "ep_nvlink", "ep_nic", "optimizer"):
        found[name] = over(name)
    for graph in ("none", "partial"):
        names = ("launch_us", f"launch_us:{graph}", f"launch_us:{family}")
        found[f"launch_us_{graph}"] = 1 / over(*names)
    found["latency_us"] = 1 / over("latency_us")
    found["step_us"] = 1e6 / over("step_us")
    for name, link in (("dp_hidden", "dp"), ("fsdp_hidden", "dp"), ("pp_hidden", "pp")):
        found[name] = min(0.98, max(0.0, 1 - EFFICIENCY[link][0] / over(name)))
    for name in ("ep_hidden", "launch_hidden"):
        found[name] = min(0.98, max(0.0, 1 - 1 / over(name)))
    return found


__all__ = ["MeasuredRun", "TermTable", "efficiency_of", "fit_logs", "names_of", "prior_of"]
