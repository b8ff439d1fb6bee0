"""What is believed of constants before a run is measured: they are the cluster's, give or take.

Two things make them differ. Each kind of kernel and link does better or worse than where the constants come from: by
half of `WIDTHS`. And all of a machine is faster or slower together, by its trainer, its clocks, its driver: by
`COMMON`. Both hold for all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.calibrate.constants_of_job import base_of
from treadle.calibrate.log_fit import LogPrior

WIDTHS = {
    "attention": 0.3, "attention_narrow": 0.3, "cast": 0.4, "cp": 0.6, "dp": 0.6, "dp_hidden": 0.8, "ep_nic": 0.4, "ep_nvlink": 0.4,
    "gemm": 0.3, "grouped": 0.3, "latency_us": 0.7, "launch_us": 0.6, "memory": 0.3,
    "expert_us": 0.6, "optimizer": 0.5, "overlap_host": 0.2, "pcie": 0.7, "permute": 0.4, "pp": 0.6, "step_us": 0.3, "tp": 0.6,
}  # fmt: skip
"""Standard deviation of the logarithm of each constant among GPUs and trainers of all kinds."""

OWN = 0.5
"""Share of `WIDTHS` by which a constant is off by itself."""

COMMON = 0.1
"""Standard deviation of the logarithm of what all constants are off together. Shares that are hidden are not in it."""


def prior_of_constants(keys: Sequence[str]) -> LogPrior:
    """Return the prior of how much longer, in logarithms, things take than by the cluster's constants."""
    own = np.array([OWN * WIDTHS[base_of(key)] for key in keys])
    together = np.array([0.0 if key.endswith("_hidden") else COMMON for key in keys])
    return LogPrior(np.zeros(len(keys)), np.diag(own**2) + np.outer(together, together))
