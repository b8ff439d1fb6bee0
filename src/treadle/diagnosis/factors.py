"""How much longer than its peers each stage of a replica, each micro-batch and each single op computes.

    duration  =  median of its kind  x  stage of a replica  x  micro-batch of a step  x  rest

A stage of a replica takes the mean over steps of its medians, so a pause does not count as slow. A micro-batch has one
factor on all stages of its replica, the lower median of its ops: what one rank alone takes longer is in the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.diagnosis.whatif import WhatIf
from treadle.ir.program import Longs
from treadle.simulator.grouping import Floats, tally, work_of


@dataclass(frozen=True, eq=False)
class Factors:
    """`stage[dp, stage]`; of each computation of each step, in `op`, `microbatch[step, i]` and `rest[step, i]`."""

    op: Longs
    stage: npt.NDArray[np.float64]
    microbatch: npt.NDArray[np.float64]
    rest: npt.NDArray[np.float64]

    @classmethod
    def of(cls, whatif: WhatIf) -> Factors:
        """Take the durations of the measured steps apart."""
        program = whatif.program
        num_dp, num_stages = program.layout.num_replicas, program.layout.placement.num_stages
        op = np.flatnonzero(whatif.computes & ~program.joined)
        took = whatif.measured[:, op].astype(np.float64)
        num_steps = len(took)
        _, kind = np.unique(work_of(program)[op], return_inverse=True)
        num_kinds = int(kind.max(initial=0)) + 1
        usual = np.maximum(_medians(np.tile(kind, (num_steps, 1)), num_kinds, took), 1.0)
        ratio = took / usual[kind]
        place = (whatif.replica[op] * num_stages + whatif.stage[op]) * num_kinds + kind
        num_places = num_dp * num_stages * num_kinds
        each = np.arange(num_steps)[:, None]
        by_step = _medians(each * num_places + place, num_steps * num_places, ratio).reshape(num_steps, -1)
        by_place = by_step.mean(axis=0)
        weight = usual * (by_place.reshape(-1, num_kinds) > 0)
        of_stage = (by_place.reshape(-1, num_kinds) * weight).sum(axis=1) / np.maximum(weight.sum(axis=1), 1e-9)
        ratio /= np.maximum(by_place[place], 1e-9)
        num_mb = program.layout.num_microbatches
        mb = whatif.replica[op] * num_mb + program.mb[op]
        code = each * num_dp * num_mb + mb
        of_mb = np.maximum(_low_medians(code, num_steps * num_dp * num_mb, ratio)[code], 1e-9)
        return cls(op, of_stage.reshape(num_dp, num_stages), of_mb, ratio / of_mb)

    def scaled(self, whatif: WhatIf, factor: npt.NDArray[Any]) -> Longs:
        """Return the durations of all ops, those of the computations times a factor; a pair is scaled together."""
        dur = whatif.measured.copy()
        dur[:, self.op] = np.rint(dur[:, self.op] * factor).astype(np.int64)
        for second in np.flatnonzero(whatif.program.joined):
            dur[:, second] = dur[:, second - 1]
        return dur


def _medians(code: Longs, num: int, values: Floats) -> Floats:
    whole = np.broadcast_to(code, values.shape).reshape(-1).astype(np.int32)
    return tally(whole, num, values.reshape(-1)).median


def _low_medians(code: Longs, num: int, values: Floats) -> Floats:
    """`[code]`: the median of its values, the lower of the two in the middle; 0 where there are none."""
    flat, own = code.reshape(-1), values.reshape(-1)
    order = np.lexsort((own, flat))
    count = np.bincount(flat, minlength=num)
    middle = np.r_[0, np.cumsum(count)[:-1]] + np.maximum(count - 1, 0) // 2
    return np.where(count > 0, own[order][np.minimum(middle, len(own) - 1)], 0.0)
