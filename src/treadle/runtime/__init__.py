"""Running schedules on torch.distributed: `Pipeline`, and what a stage may return."""

from treadle.dist.boundary import Boundary, Spec
from treadle.runtime.batch import StepReport
from treadle.runtime.pipeline import Pipeline
from treadle.runtime.stage import Output
from treadle.runtime.watch import RankLost

__all__ = ["Boundary", "Output", "Pipeline", "RankLost", "Spec", "StepReport"]
