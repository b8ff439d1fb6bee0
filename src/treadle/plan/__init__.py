"""Planning: from a schedule, a model's shape and costs to the Program that is verified, simulated and run."""

from treadle.plan.lowering import LoweringOptions, lower

__all__ = ["LoweringOptions", "lower"]
