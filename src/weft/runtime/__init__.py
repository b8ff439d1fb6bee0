"""Running schedules on torch.distributed: `Pipeline`, and what a stage may return."""

from weft.runtime.batch import StepReport
from weft.runtime.boundary import Boundary, Spec
from weft.runtime.pipeline import Pipeline
from weft.runtime.stage import Output
from weft.runtime.watch import RankLost

__all__ = ["Boundary", "Output", "Pipeline", "RankLost", "Spec", "StepReport"]
