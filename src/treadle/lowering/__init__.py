"""Lowering: from a schedule, a model's layers and costs to the Program that is verified, simulated and run.

options.py  how a schedule is lowered: the one options type
lower.py    all passes in a row; where holding a weight gradient back, or recomputing earlier, may pay, it lowers and
            simulates both ways
running.py  the Program that ranks execute: reductions, receive rings, launch order
"""

from treadle.lowering.lower import lower
from treadle.lowering.options import LoweringOptions

__all__ = ["LoweringOptions", "lower"]
