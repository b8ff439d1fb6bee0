"""Planning: from a schedule, a model's shape and costs to the Program that is verified, simulated and run.

`lowering.py` runs the passes; where holding a weight gradient back, or recomputing earlier, may pay, it lowers and
simulates both ways. `running.py` makes the Program that ranks execute. `balance.py` cuts a row of blocks into stages:
the least slowest stage first, then the least sum of squares, both by dynamic programming over whole numbers.

`folding.py` simulates a mesh of 131,072 GPUs exactly: replicas that are alike once, members of an expert group that
are alike once. That holds while nothing inside the step waits for a reduction; otherwise every GPU is simulated.
"""

from treadle.plan.folding import Folded, fold
from treadle.plan.lowering import lower
from treadle.plan.options import LoweringOptions
from treadle.plan.stragglers import StragglerStudy, straggler_study

__all__ = ["Folded", "LoweringOptions", "StragglerStudy", "fold", "lower", "straggler_study"]
