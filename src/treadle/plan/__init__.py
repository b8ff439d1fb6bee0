"""Planning: from a schedule, a model's shape and costs to the Program that is verified, simulated and run."""

from treadle.plan.folding import Folded, fold, simulate_folded
from treadle.plan.lowering import LoweringOptions, lower
from treadle.plan.stragglers import StragglerStudy, straggler_study

__all__ = ["Folded", "LoweringOptions", "StragglerStudy", "fold", "lower", "simulate_folded", "straggler_study"]
