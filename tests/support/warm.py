"""Imported by the forkserver of ranks: planning's kernels, compiled, as every rank that makes a pipeline needs them.

A process of its own would go through small programs in plain Python, which takes a rank longer than all else that it
does in a test (`treadle.ir.kernel`; tests/ir/test_kernel.py holds that both ways give the same).
"""

from __future__ import annotations

from treadle.costs import UNIT_COSTS
from treadle.ir import kernel
from treadle.ir.ops import OpKind
from treadle.lowering.options import LoweringOptions
from treadle.runtime.step_plan import StepEnds, plan, plan_forward
from treadle.schedules import generate

SPLIT = (OpKind.MLP_W, OpKind.ATTN_W)


def warm() -> None:
    """Plans a step and an evaluation of each grain, with kernels that are compiled: the disk holds them."""
    small, kernel.SMALL = kernel.SMALL, -1
    layers = LoweringOptions(layers=1, by_layer=True, moe=True, split=SPLIT, offload=True, recompute=("attn",))
    try:
        for name in ("1f1b", "dualpipe", "interleaved-overlap"):
            schedule = generate(name, pp=2, microbatches=4)
            for shape in (None, layers):
                program, _ = plan(schedule, shape, UNIT_COSTS, StepEnds(reduce=True))
                plan_forward(schedule, shape, UNIT_COSTS, program)
    finally:
        kernel.SMALL = small


warm()
