"""What is believed of constants before a run is measured: they are the cluster's, give or take.

Two things make them differ. Each kind of kernel and link does better or worse than where the constants come from: by
half of `WIDTHS`. And all of a machine is faster or slower together, by its trainer, its clocks, its driver: by
`COMMON`. Both hold for all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.calibrate.constants_of_job import base_of, how_much_slower, value_of
from treadle.calibrate.log_fit import Floats, LogPrior
from treadle.estimate import Cluster

WIDTHS = {
    "attention": 0.3, "attention_narrow": 0.3, "cast": 0.4, "cp": 0.6, "dp": 0.6, "dp_hidden": 0.8, "ep_nic": 0.4,
    "ep_nvlink": 0.4, "expert_us": 0.6, "gemm": 0.3, "grouped": 0.3, "latency_us": 0.7, "launch_us": 0.6,
    "memory": 0.3, "optimizer": 0.5, "overlap_us": 0.6, "pcie": 0.7, "permute": 0.4, "pp": 0.6, "step_us": 0.3,
    "tp": 0.6,
}  # fmt: skip
"""Standard deviation of the logarithm of each constant among GPUs and trainers of all kinds."""

BOUNDS = {
    "attention": (0.2, 0.85), "attention_narrow": (0.1, 0.85), "cast": (0.2, 0.95), "cp": (0.3, 5.0),
    "dp": (0.2, 1.0), "dp_hidden": (0.0, 0.98), "ep_nic": (0.3, 1.0), "ep_nvlink": (0.2, 1.5),
    "expert_us": (2.0, 100.0), "gemm": (0.3, 0.95), "grouped": (0.15, 0.9), "latency_us": (2.0, 30.0),
    "launch_us": (2.0, 100.0), "memory": (0.4, 0.95), "optimizer": (0.2, 0.95), "overlap_us": (2.0, 100.0),
    "pcie": (0.4, 1.0), "permute": (0.1, 0.95), "pp": (0.2, 1.0), "step_us": (5_000.0, 300_000.0), "tp": (0.3, 5.0),
}  # fmt: skip
"""What a constant can be. Links and memory do not exceed their rate; a share above 1 is of what computation hides in
part: collectives of TP and CP. No GEMM has all of the peak rate, which clocks under load do not reach."""

OWN = 0.5
"""Share of `WIDTHS` by which a constant is off by itself."""

COMMON = 0.1
"""Standard deviation of the logarithm of what all constants are off together. Shares that are hidden are not in it."""


def prior_of_constants(keys: Sequence[str], cluster: Cluster) -> LogPrior:
    """Return the prior of how much longer, in logarithms, things take than by the cluster's constants."""
    own = np.array([OWN * WIDTHS[base_of(key)] for key in keys])
    together = np.array([0.0 if key.endswith("_hidden") else COMMON for key in keys])
    return LogPrior(np.zeros(len(keys)), np.diag(own**2) + np.outer(together, together), *bounds(keys, cluster))


def bounds(keys: Sequence[str], cluster: Cluster) -> tuple[Floats, Floats]:
    """Return the least and the most of these logarithms; the cluster's own constant is always allowed."""
    ends = np.zeros((2, len(keys)))
    for place, key in enumerate(keys):
        value = value_of(cluster, key)
        if value < 1 or not key.endswith("_hidden"):
            logs = [np.log(how_much_slower(key, value, bound)) for bound in BOUNDS[base_of(key)]]
            ends[:, place] = min(0.0, *logs), max(0.0, *logs)
    return ends[0], ends[1]
