"""Plans a step when it is imported: the forkserver of tests does so, and its ranks have the compiled kernels from it.

To load them from disk takes a process half a second of computing; what a test has its ranks do is often less.
"""

from __future__ import annotations

import treadle
from treadle.costs import UNIT_COSTS
from treadle.plan.running import host_order
from treadle.runtime.build import plan

_schedule = treadle.generate("interleaved-overlap", pp=2, vpp=2, microbatches=4)
for _shape in (None, treadle.LoweringOptions(layers=2), treadle.LoweringOptions(layers=2, offload=True)):
    _program, _ticks = plan(_schedule, _shape, UNIT_COSTS, reduce=True)
    host_order(_program, _ticks)
treadle.measure(treadle.simulate(_program, UNIT_COSTS))
