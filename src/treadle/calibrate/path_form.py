"""The step of a run as a function of the cluster's constants: the longest of some paths through its Program.

A simulated step is as long as its critical path, and what ops on a path take is a sum of terms, each proportional to a
constant (or to a constant and the share of it that shows). So one simulation gives, for every constant, the
seconds that the path spends on it. The path stays a path under other constants, so the step is at least as long as the
longest path that was found; where a simulation finds a longer one, that is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from treadle.calibrate.constants_of_job import (
    constants_of,
    partners_of,
    slower,
    value_of,
    with_constants,
)
from treadle.calibrate.log_fit import Floats
from treadle.costs import Costs, durations
from treadle.estimate import Cluster, Job, estimate_costs
from treadle.planner.job_estimate import JobEstimate, estimate_job
from treadle.planner.structure import recomputed_ops
from treadle.simulator import critical_path, simulate

_SLIGHTLY = 1.01
"""Factor by which a constant is moved both ways to see what a path spends on it. Device and host limit each other, so
a path is longer than its tangent anywhere else: tangents bound it as paths bound the step."""


class PathForm:
    """Seconds of a job's step by constants: `logs[i]` is by how much longer what `keys[i]` is about takes."""

    def __init__(self, estimate: JobEstimate, keys: Sequence[str]) -> None:
        self.job = estimate.job
        self.keys = tuple(keys)
        self._inline = recomputed_ops(estimate.job) != estimate.job.recompute
        self._program = estimate.structure.lower(estimate.job.num_microbatches, estimate.costs)
        self._own = [self.keys.index(key) for key in constants_of(self.job)]
        self._partners = [(self.keys.index(one), self.keys.index(two)) for one, two in partners_of(self.job).items()]
        self._places = np.arange(len(self.keys))
        self._uses = np.eye(len(self.keys))
        for hidden, partner in self._partners:
            self._uses[hidden, partner] = 1
        self._paths: list[Floats] = []
        self.add_path(np.zeros(len(self.keys)))

    @classmethod
    def of(cls, job: Job, keys: Sequence[str]) -> PathForm:
        """Lower a job with the constants of its cluster."""
        return cls(estimate_job(job), keys)

    def cluster(self, logs: Floats) -> Cluster:
        """Return the job's cluster with other constants."""
        return with_constants(self.job.cluster, constants_at(self.job.cluster, self.keys, logs))

    def simulated(self, logs: Floats) -> float:
        """Return the simulated seconds of the step."""
        trace = simulate(self._program, self._costs(logs))
        return float(trace.makespan / trace.clock.ticks / 1e6)

    def add_path(self, logs: Floats) -> None:
        """Add the critical path under these constants."""
        costs = self._costs(logs)
        trace = simulate(self._program, costs)
        path = np.array(critical_path(trace), np.int64)
        unit = trace.clock.ticks * 1e6

        def length(of: Costs) -> float:
            return float(durations(self._program, of)[path].sum()) / unit

        spent = np.zeros(len(self.keys))
        for place in self._own:
            ends = (0.5, 1.0) if self.keys[place].endswith("_hidden") else (1 / _SLIGHTLY, _SLIGHTLY)
            less, more = (length(self._costs(logs + np.log(end) * (self._places == place))) for end in ends)
            spent[place] = (more - less) / (ends[1] - ends[0])
        for hidden, partner in self._partners:
            spent[partner] -= spent[hidden]
        self._paths.append(np.maximum(0.0, spent) * np.exp(-(self._uses @ logs)))

    def restart(self, logs: Floats) -> None:
        """Keep the critical path under these constants alone."""
        self._paths.clear()
        self.add_path(logs)

    def seconds(self, logs: Floats) -> float:
        """Return the seconds of the longest path that is known."""
        return float(self._longest(logs).sum())

    def slopes(self, logs: Floats) -> Floats:
        """Return the slopes of the logarithm of `seconds`."""
        parts = self._longest(logs)
        return np.asarray(parts @ self._uses / parts.sum())

    def shares(self) -> Floats:
        """Return the largest share of a path that each constant decides, where all are as the cluster has them."""
        return np.asarray(np.max([path @ self._uses / path.sum() for path in self._paths], axis=0))

    def _longest(self, logs: Floats) -> Floats:
        """Seconds of the longest path, by term."""
        by = np.exp(self._uses @ logs)
        return np.asarray(max((path * by for path in self._paths), key=np.sum))

    def _costs(self, logs: Floats) -> Costs:
        return estimate_costs(replace(self.job, cluster=self.cluster(logs)), inline_recompute=self._inline)


def constants_at(cluster: Cluster, keys: Sequence[str], logs: Floats) -> Mapping[str, float]:
    """Return the constants that differ from the cluster's own."""
    return {
        key: slower(key, value_of(cluster, key), float(np.exp(log)))
        for key, log in zip(keys, logs, strict=True)
        if log != 0
    }
