"""Planning: from a schedule, a model's shape and costs to the Program that is verified, simulated and run."""

from treadle.plan.lowering import Options, lower

__all__ = ["Options", "lower"]
